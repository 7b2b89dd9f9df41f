// The kernels of affine matrices for 256-bit registers. Included by affine_avx2.cpp and affine_vnni.cpp, which say how whole numbers are multiplied:
//
//   Cell, cells, load      a number of a panel, how many a register holds, one register of them; cells_of: an input's
//   widen                  codes to cells, zeros behind them up to a multiple of 32
//   add(sums, w, x)        sums += products of one register of cells
//   tokens                 of a tile: its four rows times so many tokens fill the registers with sums
//   correct                takes off what the sums of many tokens have too much
//   codes, input, total    32 codes as they lie in two parts, the inputs that meet a part, the sum of both chains
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "affine_matrix.hpp"
#include "simd.hpp"

#define PQ_UNROLL _Pragma("GCC unroll 16")

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

PQ_INLINE __m256i load_codes(const int8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// The n < 32 codes that are left, with zeros behind.
PQ_INLINE __m256i load_codes(const int8_t* p, size_t n) {
  alignas(32) int8_t room[32] = {};
  std::memcpy(room, p, n);
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(room));
}

// ---------------------------------------------------------------- whole numbers, few tokens: weights go from memory to registers once

template <class Dot, int rows, int tokens>
void few(const int8_t* w, size_t cols, const WideInput& x, int32_t* sums, size_t stride) {
  constexpr int chains = Dot::chains;
  __m256i s[rows][tokens][chains];
  PQ_UNROLL for (int r = 0; r < rows; ++r)
    PQ_UNROLL for (int t = 0; t < tokens; ++t)
      PQ_UNROLL for (int c = 0; c < chains; ++c) s[r][t][c] = _mm256_setzero_si256();
  size_t i = 0;
  for (; i + 32 <= cols; i += 32) {
    PQ_UNROLL for (int r = 0; r < rows; ++r) {
      const typename Dot::Codes c = Dot::codes(w + size_t(r) * cols + i);
      PQ_UNROLL for (int t = 0; t < tokens; ++t)
        PQ_UNROLL for (int h = 0; h < chains; ++h) s[r][t][h] = Dot::add(s[r][t][h], c.part[h], Dot::input(x, size_t(t), i, h));
    }
  }
  PQ_UNROLL for (int r = 0; r < rows; ++r)
    PQ_UNROLL for (int t = 0; t < tokens; ++t) {
      int32_t sum = Dot::total(s[r][t][0], s[r][t][1]);
      for (size_t j = i; j < cols; ++j) sum += int32_t(w[size_t(r) * cols + j]) * x.words[size_t(t) * x.padded + j];
      sums[size_t(t) * stride + size_t(r)] = sum;
    }
}

template <class Dot, int tokens>
void few_rows(const AffineMatrix& m, size_t first, size_t last, const WideInput& x, int32_t* sums, size_t stride) {
  constexpr int together = tokens <= 2 ? 4 : 2;
  size_t r = first;
  for (; r + together <= last; r += together) few<Dot, together, tokens>(m.codes + r * m.cols, m.cols, x, sums + (r - first), stride);
  for (; r < last; ++r) few<Dot, 1, tokens>(m.codes + r * m.cols, m.cols, x, sums + (r - first), stride);
}

// ---------------------------------------------------------------- whole numbers, many tokens: panels of 8 rows and 1024 columns in the first cache

constexpr size_t kRows = 8, kTokens = 64;

// Sums of four registers, side by side.
PQ_INLINE __m128i add_lanes(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i s = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
  return _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
}

// sums[0 ... 3] of each token += four rows of the panel times the token.
template <class Dot, int tokens>
PQ_INLINE void tile(const typename Dot::Cell* w, const WideInput& x, size_t token, size_t column, size_t width, int32_t* sums, size_t stride) {
  __m256i s[4][tokens];
  PQ_UNROLL for (size_t r = 0; r < 4; ++r)
    PQ_UNROLL for (size_t t = 0; t < tokens; ++t) s[r][t] = _mm256_setzero_si256();
  const typename Dot::Cell* in[tokens];
  PQ_UNROLL for (size_t t = 0; t < tokens; ++t) in[t] = Dot::cells_of(x) + (column * x.tokens + (token + t) * kPanel);  // columns are whole panels
  for (size_t i = 0; i < width; i += Dot::cells) {
    __m256i c[4];
    PQ_UNROLL for (size_t r = 0; r < 4; ++r) {
      c[r] = Dot::load(w + r * kPanel + i);
      asm("" : "+x"(c[r]));  // loaded once, not with each product
    }
    PQ_UNROLL for (size_t t = 0; t < tokens; ++t) {
      const __m256i v = Dot::load(in[t] + i);
      PQ_UNROLL for (size_t r = 0; r < 4; ++r) s[r][t] = Dot::add(s[r][t], c[r], v);
    }
  }
  PQ_UNROLL for (size_t t = 0; t < tokens; ++t) {
    auto* out = reinterpret_cast<__m128i*>(sums + (token + t) * stride);
    _mm_storeu_si128(out, _mm_add_epi32(_mm_loadu_si128(out), add_lanes(s[0][t], s[1][t], s[2][t], s[3][t])));
  }
}

// sums[t * stride ...] of 8 rows, some of them for nothing, += columns [column, column + kPanel) of tokens [from, until).
template <class Dot>
void panel_rows(const int8_t* w, size_t rows, size_t cols, const WideInput& x, size_t column, size_t from, size_t until, int32_t* sums, size_t stride) {
  alignas(64) typename Dot::Cell panel[kRows * kPanel];
  const size_t width = std::min(kPanel, cols - column), whole = (width + 31) / 32 * 32;
  for (size_t r = 0; r < kRows; ++r) Dot::widen(w + std::min(r, rows - 1) * cols + column, width, panel + r * kPanel);
  size_t t = from;
  for (; t + Dot::tokens <= until; t += Dot::tokens)
    for (size_t r = 0; r < kRows; r += 4) tile<Dot, Dot::tokens>(panel + r * kPanel, x, t, column, whole, sums + r, stride);
  for (; t < until; ++t)
    for (size_t r = 0; r < kRows; r += 4) tile<Dot, 1>(panel + r * kPanel, x, t, column, whole, sums + r, stride);
}

// A panel of the input stays in the second cache while all rows pass.
template <class Dot>
void sums_many(const AffineMatrix& m, size_t first, size_t last, const WideInput& x, int32_t* sums, size_t stride) {
  thread_local std::vector<int32_t> room;
  const size_t rows = last - first, padded = (rows + kRows - 1) / kRows * kRows;
  room.assign(x.tokens * padded, 0);
  for (size_t from = 0; from < x.tokens; from += kTokens)
    for (size_t column = 0; column < m.cols; column += kPanel)
      for (size_t r = 0; r < rows; r += kRows)
        panel_rows<Dot>(m.codes + (first + r) * m.cols, std::min(kRows, rows - r), m.cols, x, column, from, std::min(x.tokens, from + kTokens), room.data() + r, padded);
  for (size_t t = 0; t < x.tokens; ++t) std::copy_n(room.data() + t * padded, rows, sums + t * stride);
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
