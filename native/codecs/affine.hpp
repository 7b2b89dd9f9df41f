// Affine-quantized integers, w = (q - z) * s, with a scale and an offset per `group` columns.
// Reference: src/polyquant/ops/affine.py.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/blocks.hpp"
#include "codecs/metrics.hpp"

namespace polyquant {

struct Levels {
  float low, high;  // range of the codes
  float steps;      // (max - min) / s if asymmetric, max|w| / s if symmetric
  bool symmetric;
};
Levels levels_of(int bits, bool symmetric);

// `groups` groups of `size` elements each.
void affine_grid(const float* w, size_t groups, size_t size, Levels levels, float* scale, float* offset);
void affine_encode(const float* w, size_t groups, size_t size, Levels levels, const float* scale, const float* offset,
                   int8_t* codes);
// bias: null, or one per group, added to the products.
void affine_decode(const int8_t* codes, size_t groups, size_t size, const float* scale, const float* offset,
                   const float* bias, float* w);

void row_sums(const int8_t* codes, size_t rows, size_t cols, int64_t* sums);

// Quantizes stored rows of the type `source` (floats of one to four bytes), each on its own grid; a row at a time, in
// L1.
// errors: null, or the error sums of the codes. False if a weight is not finite.
bool affine_quantize(const BlockKernel& source, const uint8_t* data, size_t rows, size_t cols, size_t groups,
                     Levels levels, int8_t* codes, float* scale, float* offset, ErrorSums* errors);

}  // namespace polyquant
