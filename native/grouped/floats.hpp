// Rows of 8-bit floats with scales in tables, times float inputs. Included once per instruction set, after
// packed/kernels.hpp.
#pragma once

#include <bit>
#include <cmath>

#include "base/with_constant.hpp"
#include "grouped/small_float.hpp"
#include "packed/kernels.hpp"

namespace polyquant {
namespace {

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

  SmallFloats() = default;
  PQ_INLINE explicit SmallFloats(__m256i x) {
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

PQ_INLINE float largest_of(const float* x, size_t n) {
  uint32_t top = 0;  // of the bits without signs, which order like the numbers
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
    top = bits > top ? bits : top;
  }
  return std::bit_cast<float>(top);
}

// Columns 0, 4, 8 ... of 32, then 1, 5, 9 ..., and so on, times a factor.
PQ_INLINE void every_fourth(const float* x, __m256 factor, float* out) {
  const auto two = [=](int i) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(x + 4 * i)), _mm_loadu_ps(x + 4 * i + 16), 1);
  };
  const __m256 a = _mm256_unpacklo_ps(two(0), two(1)), b = _mm256_unpackhi_ps(two(0), two(1)),
               c = _mm256_unpacklo_ps(two(2), two(3)), d = _mm256_unpackhi_ps(two(2), two(3));
  _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_shuffle_ps(a, c, 0x44), factor));
  _mm256_storeu_ps(out + 8, _mm256_mul_ps(_mm256_shuffle_ps(a, c, 0xee), factor));
  _mm256_storeu_ps(out + 16, _mm256_mul_ps(_mm256_shuffle_ps(b, d, 0x44), factor));
  _mm256_storeu_ps(out + 24, _mm256_mul_ps(_mm256_shuffle_ps(b, d, 0xee), factor));
}

template <bool e5m2>
Arranged arranged(const float* x, size_t tokens, size_t cols) {
  const size_t whole = cols / kStep * kStep;
  const float top = largest_of(x, tokens * cols);
  if (!(top <= 0x1p20f)) return {nullptr, 0};
  int exponent = 0;
  std::frexp(top, &exponent);
  const int raise = exponent < -20 ? 80 : 60 - exponent;
  const __m256 factor = _mm256_set1_ps(std::ldexp(1.0f, raise));
  Arranged out{reinterpret_cast<float*>(scratch((tokens * whole + 1) * sizeof(float))),
               std::ldexp(1.0f, SmallFloats<e5m2>::bias - raise)};
  for (size_t t = 0; t < tokens; ++t)
    for (size_t k = 0; k < whole; k += kStep) every_fourth(x + t * cols + k, factor, out.x + t * whole + k);
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
void slow_row_of(const PackedMatrix& w, size_t v, const float* scale, const float* x, size_t tokens, float* y,
                 size_t stride) {
  for (size_t t = 0; t < tokens; ++t)
    y[t * stride + v] = w.scale * slow_row<e5m2>(w, w.data + v * w.line_bytes, scale, x + t * w.cols);
}

template <bool e5m2>
void slow_rows(const PackedMatrix& w, size_t first, size_t last, const float* x, size_t tokens, float* y,
               size_t stride) {
  const size_t groups = w.tables.groups;
  float* const scale = table_scratch(2 * (groups + 8));
  for (size_t v = first; v < last; ++v) {
    group_scales(w, v, false, scale, scale + groups + 8);
    slow_row_of<e5m2>(w, v, scale, x, tokens, y, stride);
  }
}

// R rows from v on times N tokens: each input is loaded once for all rows. tables: 2 R rows of t.groups + 8 floats.
// Sums of a group's products are in C vectors per row and token, scaled once: a product waits for the last one in its
// vector.
template <bool e5m2, int N, int R>
PQ_INLINE void rows_times(const PackedMatrix& w, size_t v, const float* x, const Arranged& in, float* tables, float* y,
                          size_t stride) {
#if defined(__AVX512VL__)
  constexpr int C = R * N >= 3 ? 2 : R * N == 2 ? 4 : 8;
#else
  constexpr int C = R * N >= 4 ? 1 : R * N >= 2 ? 2 : 4;
#endif
  const Tables& t = w.tables;
  const size_t whole = w.cols / kStep * kStep, group = t.groups == 1 ? whole : t.group;
  const uint8_t* line[R];
  float *scale[R], *factor[R];
  __m256 total[R][N];
  __m256i top[R];
  each_constant<R>([&]<int r>() PQ_FLAT {
    line[r] = w.data + (v + r) * w.line_bytes;
    scale[r] = tables + 2 * r * (t.groups + 8), factor[r] = scale[r] + t.groups + 8;
    group_scales(w, v + r, false, scale[r], factor[r]);
    for (size_t g = 0; g < t.groups; ++g) factor[r][g] = scale[r][g] * in.after;
    top[r] = _mm256_setzero_si256();
    each_constant<N>([&]<int n>() PQ_FLAT { total[r][n] = _mm256_setzero_ps(); });
  });
  const auto take = [&](int r, size_t k) PQ_FLAT {
    const __m256i bytes = bytes32(line[r] + k);
    top[r] = _mm256_max_epu8(top[r], _mm256_add_epi8(bytes, bytes));
    return SmallFloats<e5m2>(bytes);
  };
  const auto input = [&](int n, size_t k, int j)
                         PQ_FLAT { return _mm256_loadu_ps(in.x + size_t(n) * whole + k + size_t(8 * j)); };
  if (group == kStep) {
    for (size_t k = 0, g = 0; k < whole; k += kStep, ++g)
      each_constant<R>([&]<int r>() PQ_FLAT {
        fetch_ahead<64>(line[r] + k);
        const SmallFloats<e5m2> numbers = take(r, k);
        const __m256 scales = _mm256_broadcast_ss(factor[r] + g);
        each_constant<N>([&]<int n>() PQ_FLAT {
          const auto product = [&](int j, __m256 more)
                                   PQ_FLAT { return _mm256_fmadd_ps(numbers.four[j], input(n, k, j), more); };
          // Not by multiplying, which is slow for subnormal numbers on some processors.
          const __m256 low = product(1, product(0, _mm256_setzero_ps())),
                       high = product(3, product(2, _mm256_setzero_ps()));
          total[r][n] = _mm256_fmadd_ps(_mm256_add_ps(low, high), scales, total[r][n]);
        });
      });
  } else {
    for (size_t k = 0, g = 0; k < whole; ++g) {
      const size_t end = whole - k < group ? whole : k + group;
      __m256 sum[R][N][C];
      each_constant<R * N * C>([&]<int i>() PQ_FLAT { sum[i / C / N][i / C % N][i % C] = _mm256_setzero_ps(); });
      const auto step = [&]<int odd>(size_t at) PQ_FLAT {
        SmallFloats<e5m2> numbers[R];
        each_constant<R>([&]<int r>() PQ_FLAT { numbers[r] = take(r, at); });
        each_constant<4 * N>([&]<int i>() PQ_FLAT {
          constexpr int j = i / N, n = i % N, c = (4 * odd + j) % C;
          const __m256 inputs = input(n, at, j);
          each_constant<R>([&]<int r>()
                               PQ_FLAT { sum[r][n][c] = _mm256_fmadd_ps(numbers[r].four[j], inputs, sum[r][n][c]); });
        });
      };
      for (; k + 2 * kStep <= end; k += 2 * kStep) {
        each_constant<R>([&]<int r>() PQ_FLAT { fetch_ahead<64>(line[r] + k); });
        step.template operator()<0>(k);
        step.template operator()<1>(k + kStep);
      }
      if (k < end) step.template operator()<0>(k), k += kStep;
      each_constant<R * N>([&]<int i>() PQ_FLAT {
        __m256* const of = sum[i / N][i % N];
        if constexpr (C == 8) each_constant<4>([&]<int c>() PQ_FLAT { of[c] = _mm256_add_ps(of[c], of[c + 4]); });
        if constexpr (C >= 4) each_constant<2>([&]<int c>() PQ_FLAT { of[c] = _mm256_add_ps(of[c], of[c + 2]); });
        if constexpr (C >= 2) of[0] = _mm256_add_ps(of[0], of[1]);
        total[i / N][i % N] = _mm256_fmadd_ps(of[0], _mm256_broadcast_ss(factor[i / N] + g), total[i / N][i % N]);
      });
    }
  }
  const __m256i least = _mm256_set1_epi8(char(SmallFloats<e5m2>::special));
  each_constant<R>([&]<int r>() PQ_FLAT {
    if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(top[r], least), top[r]))) [[unlikely]] {
      slow_row_of<e5m2>(w, v + r, scale[r], x, N, y, stride);
      return;
    }
    each_constant<N>([&]<int n>() PQ_FLAT {
      float rest = 0;
      for (size_t k = whole; k < w.cols; ++k)
        rest += small_float<e5m2>(line[r][k]) * scale[r][k / t.group] * x[size_t(n) * w.cols + k];
      y[size_t(n) * stride + v + r] = w.scale * (sum8(total[r][n]) + rest);
    });
  });
}

template <bool e5m2, int N>
void floats_rows(const PackedMatrix& w, size_t first, size_t last, const float* x, float* y, size_t stride) {
  const Arranged in = arranged<e5m2>(x, N, w.cols);
  if (!in.x) return slow_rows<e5m2>(w, first, last, x, N, y, stride);
  float* const tables = table_scratch(4 * (w.tables.groups + 8));
  size_t v = first;
  for (; v + 2 <= last; v += 2) rows_times<e5m2, N, 2>(w, v, x, in, tables, y, stride);
  if (v < last) rows_times<e5m2, N, 1>(w, v, x, in, tables, y, stride);
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

template <bool e5m2>
void dequantize_floats(const PackedMatrix& w, size_t v, float* row) {
  const Tables& t = w.tables;
  const uint8_t* line = w.data + v * w.line_bytes;
  float* const scale = table_scratch(2 * (t.groups + 8));
  group_scales(w, v, false, scale, scale + t.groups + 8);
  for (size_t g = 0, k = 0; g < t.groups; ++g) {
    const size_t end = w.cols - k < t.group ? w.cols : k + t.group;
    const float s = scale[g];
    for (; k < end; ++k) row[k] = small_float<e5m2>(line[k]) * s;
  }
}

}  // namespace
}  // namespace polyquant
