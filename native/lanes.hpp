// Eight floats as one value, and what the decoder's kernels need of them. PQ_FMA is PQ_SIMD with fused multiply-add.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simd.hpp"

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(POLYQUANT_NO_CLONES)
#define PQ_FMA __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define PQ_FMA
#endif

namespace polyquant {

using F8 = float __attribute__((vector_size(32)));
using U8x = uint32_t __attribute__((vector_size(32)));

PQ_INLINE F8 load8(const float* p) {
  F8 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

PQ_INLINE void store8(float* p, F8 v) { std::memcpy(p, &v, sizeof v); }

PQ_INLINE F8 all8(float x) { return F8{x, x, x, x, x, x, x, x}; }

PQ_INLINE float sum8(F8 v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

// exp(x) with a relative error below 1e-7: x = n ln 2 + r, |r| <= ln 2 / 2, and a polynomial in r fitted to the smallest relative
// error (degree 6). Below -86.9 it is 0, above 88.72 infinity; NaN stays NaN.
PQ_INLINE F8 exp8(F8 x) {
  const F8 shifted = x * all8(0x1.715476p+0f) + all8(0x1.8p23f);  // n in the lowest bits of the mantissa
  const F8 n = shifted - all8(0x1.8p23f);
  const F8 r = (x - n * all8(0x1.62e4p-1f)) - n * all8(0x1.7f7d1cp-20f);
  F8 p = all8(0x1.6a2434p-10f);
  p = p * r + all8(0x1.1239e2p-7f);
  p = p * r + all8(0x1.5558f2p-5f);
  p = p * r + all8(0x1.555492p-3f);
  p = p * r + all8(0x1.fffffcp-2f);
  p = p * (r * r) + r + all8(1.0f);
  const U8x bits = (std::bit_cast<U8x>(shifted) << 23) + (126u << 23);  // 2^(n - 1): n may be 128
  const F8 y = p * std::bit_cast<F8>(bits) * all8(2.0f);
  return x < all8(-86.9f) ? all8(0.0f) : x > all8(0x1.62e42ep6f) ? all8(INFINITY) : y;
}

}  // namespace polyquant
