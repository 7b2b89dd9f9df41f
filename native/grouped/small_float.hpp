// Numbers of the 8-bit floats E4M3 (finite, with NaN) and E5M2.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "base/simd.hpp"

namespace polyquant {

// A float of the exponent and the fraction, in place, is the number divided by 2^120 or 2^112.
template <bool e5m2>
constexpr PQ_INLINE float small_float(uint8_t x) {
  constexpr int fraction = e5m2 ? 2 : 3;
  constexpr uint32_t infinity = 0x7c;  // of E5M2; above it, and at the end of E4M3, is NaN
  const uint32_t bits = x, magnitude = bits & 0x7f;
  const float number = std::bit_cast<float>(magnitude << (23 - fraction)) * (e5m2 ? 0x1p112f : 0x1p120f);
  const float special =
      e5m2 && magnitude == infinity ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  const float all = magnitude < (e5m2 ? infinity : 0x7f) ? number : special;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(all) | (bits & 0x80) << 24);
}

}  // namespace polyquant
