// Whole numbers on evenly spaced levels, w = (q - z) * s, a scale and an offset for each `group` columns. Reference: src/polyquant/ops/affine.py.
#pragma once

#include <cstddef>
#include <cstdint>

#include "blocks.hpp"
#include "metrics.hpp"

namespace polyquant {

struct Levels {
  float low, high;  // of the codes
  float steps;      // (max - min) / s where asymmetric, max|w| / s where symmetric
  bool symmetric;
};
Levels levels_of(int bits, bool symmetric);

// `groups` runs of `size` numbers each.
void affine_grid(const float* w, size_t groups, size_t size, Levels levels, float* scale, float* offset);
void affine_encode(const float* w, size_t groups, size_t size, Levels levels, const float* scale, const float* offset, int8_t* codes);
void affine_decode(const int8_t* codes, size_t groups, size_t size, const float* scale, const float* offset, float* w);

void row_sums(const int8_t* codes, size_t rows, size_t cols, int64_t* sums);

// Rows as they lie in a file, of the kind `source` (floats of one to four bytes), to codes on their own grids, one row at a time in the first cache.
// errors: null, or what the codes miss. False if a weight is not finite.
bool affine_quantize(const BlockKernel& source, const uint8_t* data, size_t rows, size_t cols, size_t groups, Levels levels, int8_t* codes, float* scale,
                     float* offset, ErrorSums* errors);

}  // namespace polyquant
