// What follows the decoding of weights, on squares of 128 x 128 with row stride kLine: rotations of the first axis, and
// the factors of rows and columns. Included once per instruction set; matrix.cpp has that of any processor.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <bit>
#include <cmath>

#include "base/lanes.hpp"
#include "base/unroll.hpp"
#include "base/with_constant.hpp"
#include "trellis/matrix.hpp"

namespace polyquant {
namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kMostStages = 4;  // 32 registers
#else
constexpr int kMostStages = 3;  // 16 registers
#endif

// Butterflies between rows at distances half, 2 half, ...: a few columns of 2 ** count rows are in registers.
template <int count, bool last>
PQ_INLINE void stages(float* x, size_t rows, size_t columns, size_t half, float scale) {
  constexpr size_t together = size_t(1) << count;
  for (size_t top = 0; top < rows; top += half * together)
    for (size_t r = top; r < top + half; ++r)
      for (size_t i = 0; i < columns; i += kWide) {
        float* const first = x + r * kLine + i;
        Wide v[together];
        PQ_UNROLL
        for (size_t j = 0; j < together; ++j) v[j] = take(first + j * half * kLine);
        PQ_UNROLL
        for (size_t h = 1; h < together; h *= 2) PQ_UNROLL
        for (size_t j = 0; j < together; ++j) {
          if (j & h) continue;
          const Wide a = v[j], b = v[j | h];
          v[j] = a + b, v[j | h] = a - b;
        }
        PQ_UNROLL
        for (size_t j = 0; j < together; ++j) put(first + j * half * kLine, last ? v[j] * scale : v[j]);
      }
}

void rotate_down(float* x, size_t rows, size_t columns, size_t block) {
  const float scale = float(1 / std::sqrt(double(block)));
  int left = std::countr_zero(block);
  size_t half = 1;
  for (; left > kMostStages; left -= kMostStages, half <<= kMostStages)
    stages<kMostStages, false>(x, rows, columns, half, scale);
  with_constant<kMostStages>(size_t(left), [&]<int count>() { stages<count, true>(x, rows, columns, half, scale); });
}

// Past the caches where possible: a decoded weight is larger.
PQ_INLINE void put_past_caches(float* p, Wide v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, __m512(v));
#elif defined(__AVX2__)
  _mm256_stream_ps(p, __m256(v));
#else
  put(p, v);
#endif
}

void finish(const float* x, float sv, const float* su, float* out, size_t count) {
  size_t i = 0;
  if (reinterpret_cast<uintptr_t>(out) % sizeof(Wide) == 0)
    for (; i + kWide <= count; i += kWide) put_past_caches(out + i, take(x + i) * sv * take(su + i));
  for (; i + kWide <= count; i += kWide) put(out + i, take(x + i) * sv * take(su + i));
  for (; i < count; ++i) out[i] = x[i] * sv * su[i];
}

}  // namespace
}  // namespace polyquant
