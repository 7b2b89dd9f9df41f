// Rows of 8-bit floats with scales in tables, times float inputs. Included once per instruction set, after
// packed_kernels.hpp.
#pragma once

#include <array>
#include <cmath>
#include <limits>

#include "packed_kernels.hpp"

namespace polyquant {
namespace {

// One number. E4M3 has no infinity; both formats are rounded half floats, E4M3 with another bias.
template <bool e5m2>
PQ_INLINE float small_float(uint8_t x) {
  if (e5m2) return half_to_float(uint16_t(x << 8));
  const uint16_t magnitude = x & 0x7f;
  return half_to_float(uint16_t((x & 0x80) << 8 | (magnitude == 0x7f ? 0x7e00 : magnitude << 7))) * 256.0f;
}

#if defined(__AVX2__)

constexpr size_t kStep = 32;  // columns at a time

// The upper half of a float has the exponent and the fraction of a small float where a shift by 4 or 3 moves them, with
// another bias. So 32 numbers are four vectors of floats, divided by 2^120 or 2^112: of columns 0, 4, 8 ..., of 1, 5, 9
// ..., and so on. Infinities of E5M2, and all NaN, become finite.
template <bool e5m2>
struct SmallFloats {
  static constexpr int shift = e5m2 ? 3 : 4, bias = e5m2 ? 112 : 120;
  static constexpr uint8_t special = e5m2 ? 0xf8 : 0xfe;  // doubled
  __m256 four[4];

  PQ_INLINE SmallFloats(__m256i x) {
    const __m256i mask = _mm256_set1_epi32(int(e5m2 ? 0x8fe00000u : 0x87f00000u));
    const auto upper = [=](__m256i v) { return _mm256_castsi256_ps(_mm256_and_si256(v, mask)); };
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), shift), odd = _mm256_srai_epi16(x, shift);
    four[0] = upper(_mm256_slli_epi32(even, 16)), four[1] = upper(_mm256_slli_epi32(odd, 16));
    four[2] = upper(even), four[3] = upper(odd);
  }
};

// Inputs [T, K] in the order of these vectors, times a power of two that keeps products far from the least floats.
struct Arranged {
  float* x;     // [T, K rounded down to 32]; null for inputs so large that products might overflow
  float after;  // factor of the sums
};

template <bool e5m2>
Arranged arranged(const float* x, size_t tokens, size_t cols) {
  const size_t whole = cols / kStep * kStep;
  float top = 0;
  for (size_t i = 0; i < tokens * cols; ++i) top = std::fabs(x[i]) > top ? std::fabs(x[i]) : top;
  int exponent = 0;
  if (top > 0x1p20f) return {nullptr, 0};
  std::frexp(top, &exponent);
  const int raise = exponent < -20 ? 80 : 60 - exponent;
  const float factor = std::ldexp(1.0f, raise);
  Arranged out{reinterpret_cast<float*>(scratch((tokens * whole + 1) * sizeof(float))),
               std::ldexp(1.0f, SmallFloats<e5m2>::bias - raise)};
  for (size_t t = 0; t < tokens; ++t)
    for (size_t k = 0; k < whole; k += kStep)
      for (size_t j = 0; j < 4; ++j)
        for (size_t i = 0; i < 8; ++i) out.x[t * whole + k + 8 * j + i] = x[t * cols + k + 4 * i + j] * factor;
  return out;
}

// One row times one token, number by number.
template <bool e5m2>
float slow_row(const PackedMatrix& w, const uint8_t* line, const float* scale, const float* x) {
  float sum = 0;
  for (size_t g = 0, k = 0; g < w.tables.groups; ++g)
    for (const size_t end = w.cols - k < w.tables.group ? w.cols : k + w.tables.group; k < end; ++k)
      sum += small_float<e5m2>(line[k]) * scale[g] * x[k];
  return sum;
}

template <bool e5m2>
void slow_rows(const PackedMatrix& w, size_t first, size_t last, const float* x, size_t tokens, float* y, size_t stride) {
  const size_t groups = w.tables.groups;
  float* const scale = table_scratch(2 * (groups + 8));
  for (size_t v = first; v < last; ++v) {
    group_scales(w, v, false, scale, scale + groups + 8);
    for (size_t t = 0; t < tokens; ++t)
      y[t * stride + v] = w.scale * slow_row<e5m2>(w, w.data + v * w.line_bytes, scale, x + t * w.cols);
  }
}

// Sums of a group's products in C vectors per token, scaled once.
template <bool e5m2, int N>
void floats_rows(const PackedMatrix& w, size_t first, size_t last, const float* x, float* y, size_t stride) {
  constexpr int C = N == 1 ? 4 : N == 2 ? 2 : 1;
  const Tables& t = w.tables;
  const size_t whole = w.cols / kStep * kStep;
  const Arranged in = arranged<e5m2>(x, N, w.cols);
  if (!in.x) return slow_rows<e5m2>(w, first, last, x, N, y, stride);
  float* const scale = table_scratch(2 * (t.groups + 8));
  const __m256i least = _mm256_set1_epi8(char(SmallFloats<e5m2>::special));
  for (size_t v = first; v < last; ++v) {
    const uint8_t* line = w.data + v * w.line_bytes;
    group_scales(w, v, false, scale, scale + t.groups + 8);
    __m256 total[N];
    __m256i top = _mm256_setzero_si256();
    float rest[N] = {};
    for (int n = 0; n < N; ++n) total[n] = _mm256_setzero_ps();
    for (size_t g = 0, k = 0; g < t.groups; ++g) {
      const size_t end = w.cols - k < t.group ? w.cols : k + t.group;
      __m256 sum[N][C];
      PQ_UNROLL
      for (int i = 0; i < N * C; ++i) sum[i / C][i % C] = _mm256_setzero_ps();
      const auto step = [&](size_t at) __attribute__((always_inline)) {
        const __m256i bytes = bytes32(line + at);
        top = _mm256_max_epu8(top, _mm256_add_epi8(bytes, bytes));
        const SmallFloats<e5m2> numbers(bytes);
        PQ_UNROLL
        for (int i = 0; i < 4 * N; ++i) {
          const int j = i / N, n = i % N;
          const __m256 inputs = _mm256_loadu_ps(in.x + size_t(n) * whole + at + size_t(8 * j));
          sum[n][j % C] = _mm256_fmadd_ps(numbers.four[j], inputs, sum[n][j % C]);
        }
      };
      for (; k + 2 * kStep <= end; k += 2 * kStep) {
        _mm_prefetch(reinterpret_cast<const char*>(line + k + 4096), _MM_HINT_T0);
        step(k);
        step(k + kStep);
      }
      if (k + kStep <= end) step(k), k += kStep;
      const __m256 factor = _mm256_set1_ps(scale[g] * in.after);
      PQ_UNROLL
      for (int n = 0; n < N; ++n) {
        __m256 all = sum[n][0];
        if constexpr (C == 2) all = _mm256_add_ps(all, sum[n][1]);
        if constexpr (C == 4)
          all = _mm256_add_ps(_mm256_add_ps(all, sum[n][1]), _mm256_add_ps(sum[n][2], sum[n][3]));
        total[n] = _mm256_fmadd_ps(all, factor, total[n]);
      }
      for (; k < end; ++k)
        for (int n = 0; n < N; ++n) rest[n] += small_float<e5m2>(line[k]) * scale[g] * x[size_t(n) * w.cols + k];
    }
    if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(top, least), top))) [[unlikely]] {
      slow_rows<e5m2>(w, v, v + 1, x, N, y, stride);
      continue;
    }
    for (int n = 0; n < N; ++n) y[size_t(n) * stride + v] = w.scale * (sum8(total[n]) + rest[n]);
  }
}

template <bool e5m2>
void floats_few(const PackedMatrix& w, size_t first, size_t last, const float* x, size_t tokens, float* y,
                size_t stride) {
  if (w.tables.groups > 1 && w.tables.group % kStep) return slow_rows<e5m2>(w, first, last, x, tokens, y, stride);
  switch (tokens) {
    case 1:
      return floats_rows<e5m2, 1>(w, first, last, x, y, stride);
    case 2:
      return floats_rows<e5m2, 2>(w, first, last, x, y, stride);
    case 3:
      return floats_rows<e5m2, 3>(w, first, last, x, y, stride);
    default:
      return floats_rows<e5m2, 4>(w, first, last, x, y, stride);
  }
}

#endif

// All 256 numbers.
template <bool e5m2>
const float* small_floats() {
  static const auto all = [] {
    std::array<float, 256> a;
    for (int i = 0; i < 256; ++i) a[size_t(i)] = small_float<e5m2>(uint8_t(i));
    return a;
  }();
  return all.data();
}

template <bool e5m2>
void dequantize_floats(const PackedMatrix& w, size_t v, float* row) {
  const Tables& t = w.tables;
  const uint8_t* line = w.data + v * w.line_bytes;
  const float* table = small_floats<e5m2>();
  float* const scale = table_scratch(2 * (t.groups + 8));
  group_scales(w, v, false, scale, scale + t.groups + 8);
  for (size_t g = 0, k = 0; g < t.groups; ++g) {
    const size_t end = w.cols - k < t.group ? w.cols : k + t.group;
    for (; k < end; ++k) row[k] = table[line[k]] * scale[g];
  }
}

}  // namespace
}  // namespace polyquant
