// Blocks of 32 with an fp16 scale. The bytes are drawn in src/polyquant/codecs/ggml_legacy.py.
#include <cmath>

#include "blocks.hpp"
#include "half.hpp"

namespace polyquant {
namespace {

PQ_SIMD void dequantize_q8_0(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 34, dst += 32) {
    const float d = load_half(src);
    const auto* q = reinterpret_cast<const int8_t*>(src + 2);
    for (int j = 0; j < 32; ++j) dst[j] = float(q[j]) * d;
  }
}

PQ_SIMD void quantize_q8_0(const float* src, uint8_t* dst, size_t rows, size_t cols, const float*) {
  for (size_t i = 0; i < rows * cols / 32; ++i, src += 32, dst += 34) {
    float amax = 0;
    for (int j = 0; j < 32; ++j) amax = std::fabs(src[j]) > amax ? std::fabs(src[j]) : amax;
    const float d = amax / 127;
    const float inverse = d != 0 ? 1.0f / d : 0.0f;
    store_half(dst, d);
    for (int j = 0; j < 32; ++j) dst[2 + j] = uint8_t(int8_t(std::round(src[j] * inverse)));
  }
}

constexpr BlockKernel table[] = {
    {"q8_0", 32, 34, dequantize_q8_0, quantize_q8_0},
};

}  // namespace

KernelTable legacy_kernels() { return table; }

}  // namespace polyquant
