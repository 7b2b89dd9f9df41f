// IEEE half, bfloat16 and E8M0 conversions; unaligned little-endian loads and stores. Branch-free, to vectorize in
// loops.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "base/simd.hpp"

namespace polyquant {

template <class T>
PQ_INLINE T load(const uint8_t* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class T>
PQ_INLINE void store(uint8_t* p, T v) {
  std::memcpy(p, &v, sizeof v);
}

// binary16 -> binary32, exact; NaN payloads are preserved.
PQ_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  // Scaling by 2^112 moves the exponent and normalizes subnormals in one exact multiplication.
  const float finite = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  return std::bit_cast<float>(sign | (magnitude >= 0x7c00u ? special : std::bit_cast<uint32_t>(finite)));
}

// binary32 -> binary16, round half to even; overflow to infinity; NaN to a quiet NaN (0x7e00), as in ggml's portable
// code.
PQ_INLINE uint16_t float_to_half(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const float magnitude = std::bit_cast<float>(bits & 0x7fffffffu);
  // Two scalings saturate to infinity; the rounding is done by one float addition with a power-of-two bias.
  float base = (magnitude * 0x1p112f) * 0x1p-110f;
  uint32_t bias = (bits << 1) & 0xff000000u;
  if (bias < 0x71000000u) bias = 0x71000000u;
  base = std::bit_cast<float>((bias >> 1) + 0x07800000u) + base;
  const uint32_t r = std::bit_cast<uint32_t>(base);
  const uint32_t rounded = ((r >> 13) & 0x7c00u) + (r & 0x0fffu);
  return uint16_t(sign | ((bits << 1) > 0xff000000u ? 0x7e00u : rounded));
}

PQ_INLINE float bfloat_to_float(uint16_t b) { return std::bit_cast<float>(uint32_t(b) << 16); }

// binary32 -> bfloat16, round half to even; NaN keeps its upper payload and becomes quiet, as in ggml.
PQ_INLINE uint16_t float_to_bfloat(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

PQ_INLINE float load_half(const uint8_t* p) { return half_to_float(load<uint16_t>(p)); }
PQ_INLINE void store_half(uint8_t* p, float f) { store(p, float_to_half(f)); }

}  // namespace polyquant
