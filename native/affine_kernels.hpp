// The kernels of affine matrices for 256-bit registers. Included by affine_avx2.cpp and affine_vnni.cpp, which say how whole numbers are multiplied:
//
//   struct Dot   { using Cell; static constexpr size_t step; load(cells) -> register; add(sum, weights, inputs) -> sum;
//                  widen(codes, n, cells): n codes to cells, zero up to a multiple of step; fix(sum, ...) }
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "affine_matrix.hpp"
#include "simd.hpp"

namespace polyquant {
namespace {

PQ_INLINE int32_t add_lanes(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1));
  return _mm_cvtsi128_si32(s);
}

PQ_INLINE float add_lanes(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  s = _mm_add_ss(s, _mm_movehdup_ps(s));
  return _mm_cvtss_f32(s);
}

// 32 codes, or the n that are left with zeros behind.
PQ_INLINE __m256i load_codes(const int8_t* p, size_t n) {
  if (n >= 32) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  alignas(32) int8_t room[32] = {};
  std::memcpy(room, p, n);
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(room));
}

// ---------------------------------------------------------------- whole numbers, few tokens: weights go from memory to registers once

template <class Dot, int rows, int tokens>
void few(const int8_t* w, size_t cols, const WideInput& x, int32_t* sums, size_t stride) {
  typename Dot::Sum s[rows][tokens] = {};
  for (size_t i = 0; i < cols; i += 32) {
    typename Dot::Codes c[rows];
    for (int r = 0; r < rows; ++r) c[r] = Dot::codes(load_codes(w + size_t(r) * cols + i, cols - i));
    for (int t = 0; t < tokens; ++t) {
      const auto in = Dot::input(x, size_t(t), i);
      for (int r = 0; r < rows; ++r) s[r][t].add(c[r], in);
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int t = 0; t < tokens; ++t) sums[size_t(t) * stride + size_t(r)] = s[r][t].total();
}

template <class Dot, int tokens>
void few_rows(const AffineMatrix& m, size_t first, size_t last, const WideInput& x, int32_t* sums, size_t stride) {
  constexpr int together = tokens <= 2 ? 4 : 2;
  size_t r = first;
  for (; r + together <= last; r += together) few<Dot, together, tokens>(m.codes + r * m.cols, m.cols, x, sums + (r - first), stride);
  for (; r < last; ++r) few<Dot, 1, tokens>(m.codes + r * m.cols, m.cols, x, sums + (r - first), stride);
}

// ---------------------------------------------------------------- whole numbers, many tokens: panels of 1024 columns in the second cache

constexpr size_t kPanel = 1024, kTokens = 64;

template <class Dot, int rows, int tokens>
PQ_INLINE void tile(const typename Dot::Cell* w, const WideInput& x, size_t token, size_t column, size_t width, int32_t* sums, size_t stride) {
  typename Dot::Lane s[rows][tokens] = {};
  for (size_t i = 0; i < width; i += Dot::cells) {
    __m256i c[rows];
    for (int r = 0; r < rows; ++r) c[r] = Dot::load(w + size_t(r) * kPanel + i);
    for (int t = 0; t < tokens; ++t) {
      const __m256i in = Dot::load_input(x, token + size_t(t), column + i);
      for (int r = 0; r < rows; ++r) s[r][t].add(c[r], in);
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int t = 0; t < tokens; ++t) sums[(token + size_t(t)) * stride + size_t(r)] += s[r][t].total();
}

template <class Dot>
void sums_many(const AffineMatrix& m, size_t first, size_t last, const WideInput& x, int32_t* sums, size_t stride) {
  constexpr int R = Dot::tile_rows, T = 4;
  thread_local std::vector<typename Dot::Cell> room;
  const size_t rows = last - first;
  room.resize(rows * kPanel + 32);
  typename Dot::Cell* panel = room.data();
  for (size_t t = 0; t < x.tokens; ++t) std::fill_n(sums + t * stride, rows, 0);
  for (size_t from = 0; from < x.tokens; from += kTokens) {
    const size_t until = std::min(x.tokens, from + kTokens);
    for (size_t column = 0; column < m.cols; column += kPanel) {
      const size_t width = std::min(kPanel, m.cols - column), whole = (width + 31) / 32 * 32;
      for (size_t r = 0; r < rows; ++r) Dot::widen(m.codes + (first + r) * m.cols + column, width, panel + r * kPanel);
      for (size_t t = from; t < until;) {
        const bool four = t + T <= until;
        for (size_t r = 0; r < rows;) {
          const bool full = r + R <= rows;
          const typename Dot::Cell* w = panel + r * kPanel;
          int32_t* out = sums + r;
          if (four && full)
            tile<Dot, R, T>(w, x, t, column, whole, out, stride);
          else if (full)
            tile<Dot, R, 1>(w, x, t, column, whole, out, stride);
          else if (four)
            tile<Dot, 1, T>(w, x, t, column, whole, out, stride);
          else
            tile<Dot, 1, 1>(w, x, t, column, whole, out, stride);
          r += full ? R : 1;
        }
        t += four ? T : 1;
      }
    }
  }
  Dot::correct(m, first, last, sums, x.tokens, stride);
}

template <class Dot>
void sums(const AffineMatrix& m, size_t first, size_t last, const WideInput& x, int32_t* out, size_t stride) {
  switch (x.tokens) {
    case 1: return few_rows<Dot, 1>(m, first, last, x, out, stride);
    case 2: return few_rows<Dot, 2>(m, first, last, x, out, stride);
    case 3: return few_rows<Dot, 3>(m, first, last, x, out, stride);
    case 4: return few_rows<Dot, 4>(m, first, last, x, out, stride);
    default: return sums_many<Dot>(m, first, last, x, out, stride);
  }
}

// ---------------------------------------------------------------- floats

PQ_INLINE __m256 eight_floats(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// One row of one to four tokens: sums of a group in eight lanes and two chains, scaled lane by lane, added across only at the end.
template <int tokens>
void floats_row(const AffineMatrix& m, size_t r, const float* x, float* y, size_t stride) {
  const size_t size = m.group();
  const int8_t* w = m.codes + r * m.cols;
  __m256 total[tokens] = {};
  float rest[tokens] = {};
  for (size_t g = 0; g < m.groups; ++g) {
    const float scale = m.scale[r * m.groups + g];
    const int8_t* wg = w + g * size;
    const float* xg = x + g * size;
    __m256 a[tokens] = {}, b[tokens] = {};
    size_t i = 0;
    for (; i + 16 <= size; i += 16) {
      const __m256 u = eight_floats(wg + i), v = eight_floats(wg + i + 8);
      for (int t = 0; t < tokens; ++t) {
        a[t] = _mm256_fmadd_ps(u, _mm256_loadu_ps(xg + size_t(t) * m.cols + i), a[t]);
        b[t] = _mm256_fmadd_ps(v, _mm256_loadu_ps(xg + size_t(t) * m.cols + i + 8), b[t]);
      }
    }
    for (int t = 0; t < tokens; ++t) {
      float tail = 0;
      for (size_t j = i; j < size; ++j) tail += float(wg[j]) * xg[size_t(t) * m.cols + j];
      rest[t] += scale * tail;
      total[t] = _mm256_fmadd_ps(_mm256_add_ps(a[t], b[t]), _mm256_set1_ps(scale), total[t]);
    }
  }
  for (int t = 0; t < tokens; ++t) y[size_t(t) * stride + r] = add_lanes(total[t]) + rest[t];
}

void floats(const AffineMatrix& m, size_t first, size_t last, const float* x, size_t tokens, float* y, size_t stride) {
  for (size_t r = first; r < last; ++r) switch (tokens) {
      case 1: floats_row<1>(m, r, x, y, stride); break;
      case 2: floats_row<2>(m, r, x, y, stride); break;
      case 3: floats_row<3>(m, r, x, y, stride); break;
      default: floats_row<4>(m, r, x, y, stride);
    }
}

}  // namespace
}  // namespace polyquant
