// The kernels of affine matrices for 256-bit registers. Included by affine/avx2.cpp and affine/bytes.hpp, which
// define the integer products:
//
//   codes, inputs, add     few tokens: 32 codes, the inputs of a token for them, sums += products
//   excess, add_codes      few tokens: how many times the sum of the codes is in the sums; sums += codes
//   Cell, Register, Sum    many tokens: an element of a panel, a register of `cells` elements, and the type of sums
//   load, add              load a register; sums += products
//   widen                  columns of a row of codes to cells, zero-padded to a multiple of 32
//   rows, tokens           of a panel; of a tile: four rows times this many tokens fill the registers with sums
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "affine/matrix.hpp"
#include "base/simd.hpp"
#include "base/unroll.hpp"

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

// The remaining n < 32 codes, zero-padded.
PQ_INLINE __m256i load_codes(const int8_t* p, size_t n) {
  alignas(32) int8_t room[32] = {};
  std::memcpy(room, p, n);
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(room));
}

// Rows that are read side by side are fetched one after the other, as they lie in memory: each on its own, they are
// half as fast.
PQ_INLINE void fetch_ahead(const int8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p + 16384), _MM_HINT_T1); }

// ---------------------------------------------------------------- integers, few tokens: weights are loaded once

template <class Dot, int rows, int tokens>
void few(const int8_t* w, size_t cols, const WideInput& x, int32_t* sums, size_t stride) {
  __m256i s[rows][tokens], extra[rows];
  PQ_UNROLL
  for (int r = 0; r < rows; ++r) {
    extra[r] = _mm256_setzero_si256();
    PQ_UNROLL
    for (int t = 0; t < tokens; ++t) s[r][t] = _mm256_setzero_si256();
  }
  size_t i = 0;
  for (; i + 32 <= cols; i += 32) {
    typename Dot::Inputs inputs[tokens];
    PQ_UNROLL
    for (int t = 0; t < tokens; ++t) inputs[t] = Dot::inputs(x, size_t(t), i);
    PQ_UNROLL
    for (int r = 0; r < rows; ++r) {
      const int8_t* p = w + size_t(r) * cols + i;
      if (i % 64 == 0) fetch_ahead(w + size_t(rows) * i + 64 * size_t(r));
      const typename Dot::Codes c = Dot::codes(p);
      extra[r] = Dot::add_codes(extra[r], c);
      PQ_UNROLL
      for (int t = 0; t < tokens; ++t) s[r][t] = Dot::add(s[r][t], c, inputs[t]);
    }
  }
  PQ_UNROLL
  for (int r = 0; r < rows; ++r) {
    const uint32_t subtracted = Dot::excess * uint32_t(add_lanes(extra[r]));
    PQ_UNROLL
    for (int t = 0; t < tokens; ++t) {
      int32_t sum = int32_t(uint32_t(add_lanes(s[r][t])) - subtracted);  // may wrap in between
      for (size_t j = i; j < cols; ++j) sum += int32_t(w[size_t(r) * cols + j]) * x.words[size_t(t) * x.padded + j];
      sums[size_t(t) * stride + size_t(r)] = sum;
    }
  }
}

template <class Dot, int tokens>
void few_rows(const AffineMatrix& m, size_t first, size_t last, const WideInput& x, int32_t* sums, size_t stride) {
  constexpr int together = tokens <= 2 ? 4 : 2;
  size_t r = first;
  for (; r + together <= last; r += together)
    few<Dot, together, tokens>(m.codes + r * m.cols, m.cols, x, sums + (r - first), stride);
  for (; r < last; ++r) few<Dot, 1, tokens>(m.codes + r * m.cols, m.cols, x, sums + (r - first), stride);
}

// Up to kFew tokens, four at a time; the weights of twelve rows stay in L1.
template <class Dot>
void few_sums(const AffineMatrix& m, size_t first, size_t last, const WideInput& x, int32_t* out, size_t stride) {
  static constexpr decltype(&few_rows<Dot, 1>) times[] = {few_rows<Dot, 1>, few_rows<Dot, 2>, few_rows<Dot, 3>,
                                                          few_rows<Dot, 4>};
  for (size_t r = first; r < last; r += 12)
    for (size_t t = 0; t < x.tokens; t += 4) {
      const size_t tokens = std::min<size_t>(4, x.tokens - t);
      const WideInput some{tokens, x.padded, x.words + t * x.padded, x.bytes + t * x.padded};
      times[tokens - 1](m, r, std::min(last, r + 12), some, out + t * stride + (r - first), stride);
    }
}

// ---------------------------------------------------------------- many tokens: panels of a few rows and 1024 columns
// in L1

constexpr size_t kTokens = 64;

// Adds the sums of four registers to four values.
PQ_INLINE void add_four(int32_t* out, __m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i s = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
  auto* to = reinterpret_cast<__m128i*>(out);
  _mm_storeu_si128(
      to, _mm_add_epi32(_mm_loadu_si128(to), _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1))));
}
PQ_INLINE void add_four(float* out, __m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(out, _mm_add_ps(_mm_loadu_ps(out), _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1))));
}

// Keeps a register loaded, instead of reloading it for each product as GCC would.
template <class Dot>
PQ_INLINE typename Dot::Register kept(const typename Dot::Cell* p) {
  typename Dot::Register v = Dot::load(p);
  asm("" : "+x"(v));
  return v;
}

// sums[0 ... 3] of each token += four rows of the panel times the token. x: a panel of tokens.
template <class Dot, int tokens>
PQ_INLINE void tile(const typename Dot::Cell* w, const typename Dot::Cell* x, size_t width, typename Dot::Sum* sums,
                    size_t stride) {
  typename Dot::Register s[4][tokens];
  PQ_UNROLL
  for (size_t r = 0; r < 4; ++r) PQ_UNROLL
  for (size_t t = 0; t < tokens; ++t) s[r][t] = typename Dot::Register{};
  for (size_t i = 0; i < width; i += Dot::cells) {
    const auto c0 = kept<Dot>(w + i), c1 = kept<Dot>(w + kPanel + i), c2 = kept<Dot>(w + 2 * kPanel + i),
               c3 = kept<Dot>(w + 3 * kPanel + i);
    PQ_UNROLL
    for (size_t t = 0; t < tokens; ++t) {
      const typename Dot::Register v = Dot::load(x + t * kPanel + i);
      s[0][t] = Dot::add(s[0][t], c0, v);
      s[1][t] = Dot::add(s[1][t], c1, v);
      s[2][t] = Dot::add(s[2][t], c2, v);
      s[3][t] = Dot::add(s[3][t], c3, v);
    }
  }
  PQ_UNROLL
  for (size_t t = 0; t < tokens; ++t) add_four(sums + t * stride, s[0][t], s[1][t], s[2][t], s[3][t]);
}

// sums[t * stride ...] of Dot::rows rows from `row` on (possibly unused) += columns [column, column + kPanel) of
// `tokens`
// tokens.
template <class Dot>
void panel_rows(const AffineMatrix& m, size_t row, size_t last, size_t column, const typename Dot::Cell* x,
                size_t tokens, typename Dot::Sum* sums, size_t stride) {
  alignas(64) typename Dot::Cell panel[Dot::rows * kPanel];
  const size_t width = std::min(kPanel, m.cols - column), whole = (width + 31) / 32 * 32;
  for (size_t r = 0; r < Dot::rows; ++r) Dot::widen(m, std::min(row + r, last - 1), column, width, panel + r * kPanel);
  for (size_t r = row + Dot::rows; r < std::min(row + 2 * Dot::rows, last); ++r)  // prefetches the next rows
    for (size_t i = 0; i < width; i += 64) __builtin_prefetch(m.codes + r * m.cols + column + i);
  size_t t = 0;
  for (; t + Dot::tokens <= tokens; t += Dot::tokens)
    for (size_t r = 0; r < Dot::rows; r += 4)
      tile<Dot, Dot::tokens>(panel + r * kPanel, x + t * kPanel, whole, sums + t * stride + r, stride);
  for (; t < tokens; ++t)
    for (size_t r = 0; r < Dot::rows; r += 4)
      tile<Dot, 1>(panel + r * kPanel, x + t * kPanel, whole, sums + t * stride + r, stride);
}

// out[t * stride + r - first]. A panel of the input [T, kPanel] stays in L2 during all rows.
template <class Dot>
void many(const AffineMatrix& m, size_t first, size_t last, const typename Dot::Cell* x, size_t tokens,
          typename Dot::Sum* out, size_t stride) {
  thread_local std::vector<typename Dot::Sum> room;
  const size_t rows = last - first, padded = (rows + Dot::rows - 1) / Dot::rows * Dot::rows;
  room.assign(tokens * padded, 0);
  for (size_t from = 0; from < tokens; from += kTokens)
    for (size_t column = 0; column < m.cols; column += kPanel)
      for (size_t r = 0; r < rows; r += Dot::rows)
        panel_rows<Dot>(m, first + r, last, column, x + column * tokens + from * kPanel,
                        std::min(kTokens, tokens - from), room.data() + from * padded + r, padded);
  for (size_t t = 0; t < tokens; ++t) std::copy_n(room.data() + t * padded, rows, out + t * stride);
}

// ---------------------------------------------------------------- floats

PQ_INLINE __m256 eight_floats(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// Some rows times one to four tokens: group sums in eight lanes and two chains, scaled per lane, reduced at the end.
template <int rows, int tokens>
void floats_rows(const AffineMatrix& m, size_t first, const float* x, float* y, size_t stride) {
  const size_t size = m.group();
  const int8_t* w = m.codes + first * m.cols;
  __m256 total[rows][tokens];
  float rest[rows][tokens] = {};
  PQ_UNROLL
  for (int r = 0; r < rows; ++r) PQ_UNROLL
  for (int t = 0; t < tokens; ++t) total[r][t] = _mm256_setzero_ps();
  for (size_t g = 0; g < m.groups; ++g) {
    const int8_t* wg = w + g * size;
    const float* xg = x + g * size;
    __m256 sums[rows][tokens];
    PQ_UNROLL
    for (int r = 0; r < rows; ++r) PQ_UNROLL
    for (int t = 0; t < tokens; ++t) sums[r][t] = _mm256_setzero_ps();
    const int8_t* const ahead = w + rows * (g * size);
    size_t i = 0;
    for (; i + 8 <= size; i += 8) {
      __m256 floats[rows];
      PQ_UNROLL
      for (int r = 0; r < rows; ++r) {
        if (i % 64 == 0) fetch_ahead(ahead + rows * i + 64 * r);
        floats[r] = eight_floats(wg + size_t(r) * m.cols + i);
      }
      PQ_UNROLL
      for (int t = 0; t < tokens; ++t) {
        const __m256 v = _mm256_loadu_ps(xg + size_t(t) * m.cols + i);
        PQ_UNROLL
        for (int r = 0; r < rows; ++r) sums[r][t] = _mm256_fmadd_ps(floats[r], v, sums[r][t]);
      }
    }
    PQ_UNROLL
    for (int r = 0; r < rows; ++r) {
      const float scale = m.scale[(first + size_t(r)) * m.groups + g];
      PQ_UNROLL
      for (int t = 0; t < tokens; ++t) {
        float tail = 0;
        for (size_t j = i; j < size; ++j) tail += float(wg[size_t(r) * m.cols + j]) * xg[size_t(t) * m.cols + j];
        rest[r][t] += scale * tail;
        total[r][t] = _mm256_fmadd_ps(sums[r][t], _mm256_set1_ps(scale), total[r][t]);
      }
    }
  }
  PQ_UNROLL
  for (int r = 0; r < rows; ++r) PQ_UNROLL
  for (int t = 0; t < tokens; ++t) y[size_t(t) * stride + first + size_t(r)] = add_lanes(total[r][t]) + rest[r][t];
}

template <int tokens>
void few_floats(const AffineMatrix& m, size_t first, size_t last, const float* x, float* y, size_t stride) {
  constexpr int together = tokens == 1 ? 4 : 2;
  size_t r = first;
  for (; r + together <= last; r += together) floats_rows<together, tokens>(m, r, x, y, stride);
  for (; r < last; ++r) floats_rows<1, tokens>(m, r, x, y, stride);
}

// The weights of a panel as floats, multiplied like integers.
struct FloatDot {
  using Cell = float;
  using Sum = float;
  using Register = __m256;
  static constexpr size_t cells = 8, rows = 4, tokens = 2;

  static PQ_INLINE __m256 load(const float* p) { return _mm256_loadu_ps(p); }
  static PQ_INLINE __m256 add(__m256 sums, __m256 w, __m256 x) { return _mm256_fmadd_ps(w, x, sums); }
  static void widen(const AffineMatrix& m, size_t row, size_t column, size_t width, float* out) {
    const size_t size = m.group();
    const int8_t* codes = m.codes + row * m.cols;
    for (size_t i = 0; i < width;) {
      const size_t g = (column + i) / size, end = std::min(width, (g + 1) * size - column);
      const float scale = m.scale[row * m.groups + g], offset = m.offset ? m.offset[row * m.groups + g] : 0.0f;
      const __m256 s = _mm256_set1_ps(scale), z = _mm256_set1_ps(offset);
      for (; i + 8 <= end; i += 8)
        _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_sub_ps(eight_floats(codes + column + i), z), s));
      for (; i < end; ++i) out[i] = (float(codes[column + i]) - offset) * scale;
    }
    std::fill_n(out + width, (32 - width % 32) % 32, 0.0f);
  }
};

void floats(const AffineMatrix& m, size_t first, size_t last, const float* x, size_t tokens, float* y, size_t stride) {
  if (tokens > kFewFloats) return many<FloatDot>(m, first, last, x, tokens, y + first, stride);
  static constexpr decltype(&few_floats<1>) times[] = {few_floats<1>, few_floats<2>, few_floats<3>, few_floats<4>};
  times[tokens - 1](m, first, last, x, y, stride);
}

}  // namespace
}  // namespace polyquant
