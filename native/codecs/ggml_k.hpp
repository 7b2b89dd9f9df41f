// The encoders of the K types, implemented in codecs/ggml_k_quantize.cpp and listed in codecs/ggml_k.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

namespace polyquant {

void quantize_q2_k(const float* src, uint8_t* dst, size_t rows, size_t cols, const float* importance);
void quantize_q3_k(const float* src, uint8_t* dst, size_t rows, size_t cols, const float* importance);
void quantize_q4_k(const float* src, uint8_t* dst, size_t rows, size_t cols, const float* importance);
void quantize_q5_k(const float* src, uint8_t* dst, size_t rows, size_t cols, const float* importance);
void quantize_q6_k(const float* src, uint8_t* dst, size_t rows, size_t cols, const float* importance);
void quantize_q8_k(const float* src, uint8_t* dst, size_t rows, size_t cols, const float* importance);

}  // namespace polyquant
