#include "codecs/number_tables.hpp"

#include "base/half.hpp"

namespace polyquant {
namespace {

// 1 if the rounded number, without its sign, is 0 and the number is not, or if it is not finite.
PQ_INLINE uint32_t lost(uint32_t stored, float value, uint32_t infinity) {
  const uint32_t magnitude = stored & 0x7fff;
  return uint32_t(magnitude >= infinity) | (uint32_t(magnitude == 0) & uint32_t(value != 0.0f));
}

}  // namespace

PQ_SIMD void widen_halves(const uint16_t* stored, float* values, size_t n) {
  for (size_t i = 0; i < n; ++i) values[i] = half_to_float(stored[i]);
}

PQ_SIMD void widen_bfloats(const uint16_t* stored, float* values, size_t n) {
  for (size_t i = 0; i < n; ++i) values[i] = bfloat_to_float(stored[i]);
}

PQ_SIMD bool narrow_halves(const float* values, uint16_t* stored, size_t n) {
  uint32_t bad = 0;
  for (size_t i = 0; i < n; ++i) {
    stored[i] = float_to_half(values[i]);
    bad |= lost(stored[i], values[i], 0x7c00);
  }
  return bad == 0;
}

PQ_SIMD bool narrow_bfloats(const float* values, uint16_t* stored, size_t n) {
  uint32_t bad = 0;
  for (size_t i = 0; i < n; ++i) {
    stored[i] = float_to_bfloat(values[i]);
    bad |= lost(stored[i], values[i], 0x7f80);
  }
  return bad == 0;
}

}  // namespace polyquant
