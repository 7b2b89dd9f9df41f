// Whole numbers on evenly spaced levels, w = (q - z) * s, a scale and an offset for each `group` columns. Reference: src/polyquant/ops/affine.py.
#pragma once

#include <cstddef>
#include <cstdint>

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

}  // namespace polyquant
