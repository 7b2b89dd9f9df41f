// A register of floats of the instruction set as one value. Included by files compiled for one set, in an unnamed
// namespace: no two sets share a function.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/simd.hpp"

namespace polyquant {
namespace {

#if defined(__AVX512F__)
constexpr int kWide = 16;
#elif defined(__AVX2__)
constexpr int kWide = 8;
#else
constexpr int kWide = 4;
#endif

using Wide = float __attribute__((vector_size(4 * kWide)));
using WideBits = uint32_t __attribute__((vector_size(4 * kWide)));

PQ_INLINE Wide take(const float* p) {
  Wide v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

PQ_INLINE void put(float* p, Wide v) { std::memcpy(p, &v, sizeof v); }

PQ_INLINE Wide all(float x) { return x - Wide{}; }

PQ_INLINE float sum_of(Wide v) {
  float sum[kWide];
  put(sum, v);
  for (int width = kWide / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) sum[i] += sum[i + width];
  return sum[0];
}

PQ_INLINE float largest_of(Wide v) {
  float top[kWide];
  put(top, v);
  for (int width = kWide / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) top[i] = top[i + width] > top[i] ? top[i + width] : top[i];
  return top[0];
}

// exp(x) with a relative error below 1e-7: x = n ln 2 + r, |r| <= ln 2 / 2, and a polynomial in r of degree 6 fitted
// for minimal relative error. Below -86.9 it is 0, above 88.72 infinity; NaN stays NaN.
PQ_INLINE Wide exponential(Wide x) {
  const Wide shifted = x * 0x1.715476p+0f + 0x1.8p23f;  // n in the lowest bits of the mantissa
  const Wide n = shifted - 0x1.8p23f;
  const Wide r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
  Wide p = 0x1.6a2434p-10f * r + 0x1.1239e2p-7f;
  p = p * r + 0x1.5558f2p-5f;
  p = p * r + 0x1.555492p-3f;
  p = p * r + 0x1.fffffcp-2f;
  p = p * (r * r) + r + 1.0f;
  const WideBits bits = (std::bit_cast<WideBits>(shifted) << 23) + (126u << 23);  // 2^(n - 1): n may be 128
  const Wide y = p * std::bit_cast<Wide>(bits) * 2.0f;
  return x < -86.9f ? Wide{} : x > 0x1.62e42ep6f ? all(INFINITY) : y;
}

}  // namespace
}  // namespace polyquant
