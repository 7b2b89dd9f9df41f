// Rounding and extremes of a block, written so that compilers vectorize them without relaxing IEEE arithmetic. NaN and
// infinity give some code, never undefined behaviour.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/simd.hpp"

namespace polyquant {

// NaN becomes low: a comparison with NaN is false.
PQ_INLINE float clamp(float x, float low, float high) {
  x = x > low ? x : low;
  return x < high ? x : high;
}

// C's roundf (half away from zero) for |x| < 2^22: the addend is the float below one half, so 0.49999997 stays below 1.
PQ_INLINE int round_half_away(float x) { return int(x + std::copysign(0x1.fffffep-2f, x)); }

// Half to even for |x| < 2^22, as ggml's nearest_int.
PQ_INLINE float round_half_even(float x) { return (x + 12582912.0f) - 12582912.0f; }

// 1 / d, or 0 if that is not finite (d zero, tiny or NaN): such a block stores zeros.
PQ_INLINE float inverse(float d) {
  const float r = 1.0f / d;
  return std::fabs(r) <= std::numeric_limits<float>::max() ? r : 0.0f;
}

// Magnitudes compare as integers, and integer reductions vectorize.
PQ_INLINE int32_t magnitude_bits(float x) { return std::bit_cast<int32_t>(x) & 0x7fffffff; }

template <int n>
PQ_INLINE float abs_max(const float* x) {
  int32_t top = 0;
  for (int j = 0; j < n; ++j) top = magnitude_bits(x[j]) > top ? magnitude_bits(x[j]) : top;
  return std::bit_cast<float>(top);
}

// The first value of the largest magnitude, with its sign; +0 if all are zero.
template <int n>
PQ_INLINE float first_extreme(const float* x) {
  constexpr int32_t sign = std::numeric_limits<int32_t>::min();
  int32_t plus = 0, minus = 0;  // magnitudes of the positive values, and of the negative ones
  for (int j = 0; j < n; ++j) {
    const int32_t bits = std::bit_cast<int32_t>(x[j]), other = bits ^ sign;
    plus = bits > plus ? bits : plus;
    minus = other > minus ? other : minus;
  }
  if (plus != minus) return plus > minus ? std::bit_cast<float>(plus) : std::bit_cast<float>(minus ^ sign);
  if (plus)
    for (int j = 0; j < n; ++j)
      if (magnitude_bits(x[j]) == plus) return x[j];
  return 0.0f;
}

struct Range {
  float min, max;
};

// Smallest and largest value. Of equal zeros the first one counts, as in ggml, whose stored minimum reveals the sign.
template <int n>
PQ_INLINE Range range(const float* x) {
  int32_t low = std::numeric_limits<int32_t>::max(), high = std::numeric_limits<int32_t>::min();
  for (int j = 0; j < n; ++j) {
    const int32_t bits = std::bit_cast<int32_t>(x[j]);
    const int32_t key = bits ^ ((bits >> 31) & 0x7fffffff);  // orders like the floats
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  Range r{std::bit_cast<float>(low ^ ((low >> 31) & 0x7fffffff)),
          std::bit_cast<float>(high ^ ((high >> 31) & 0x7fffffff))};
  if (r.min == 0)
    for (int j = n - 1; j >= 0; --j) r.min = x[j] == 0 ? x[j] : r.min;
  if (r.max == r.min) r.max = r.min;
  return r;
}

}  // namespace polyquant
