// The kernels of affine matrices with NEON. Included by affine/neon.cpp, affine/neon_dotprod.cpp and
// affine/neon_i8mm.cpp.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "affine/matrix.hpp"
#include "base/dots_neon.hpp"
#include "base/unroll.hpp"

namespace polyquant {
namespace {

// 16 codes from p; n < 16: those that remain, and zeros.
PQ_INLINE int8x16_t codes16(const int8_t* p, size_t n) {
  if (n >= 16) [[likely]]
    return vld1q_s8(p);
  int8_t rest[16] = {};
  std::memcpy(rest, p, n);
  return vld1q_s8(rest);
}

// ---------------------------------------------------------------- integers, few tokens: weights are loaded once

template <int rows, int tokens>
PQ_INLINE void few(const int8_t* w, size_t cols, const WideInput& x, int32_t* sums, size_t stride) {
  int32x4_t s[rows][tokens];
  PQ_UNROLL
  for (int i = 0; i < rows * tokens; ++i) s[i / tokens][i % tokens] = vdupq_n_s32(0);
  for (size_t i = 0; i < cols; i += 16) {
    int8x16_t in[tokens];
    PQ_UNROLL
    for (size_t t = 0; t < tokens; ++t)
      in[t] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(x.bytes + t * x.padded + i), vdupq_n_u8(128)));
    PQ_UNROLL
    for (size_t r = 0; r < rows; ++r) {
      const int8_t* p = w + r * cols + i;
      if (i % 64 == 0) __builtin_prefetch(p + rows * cols);
      const int8x16_t c = codes16(p, cols - i);
      PQ_UNROLL
      for (int t = 0; t < tokens; ++t) s[r][t] = dot16(s[r][t], c, in[t]);
    }
  }
  PQ_UNROLL
  for (size_t r = 0; r < rows; ++r) PQ_UNROLL
  for (size_t t = 0; t < tokens; ++t) sums[t * stride + r] = vaddvq_s32(s[r][t]);
}

template <int tokens>
void few_rows(const AffineMatrix& m, size_t first, size_t last, const WideInput& x, int32_t* sums, size_t stride) {
  size_t r = first;
  for (; r + 4 <= last; r += 4) few<4, tokens>(m.codes + r * m.cols, m.cols, x, sums + (r - first), stride);
  for (; r < last; ++r) few<1, tokens>(m.codes + r * m.cols, m.cols, x, sums + (r - first), stride);
}

// ---------------------------------------------------------------- many tokens: a vector of them stays in L1 and L2

constexpr size_t kStep = kProductsOfPairs ? 8 : 4;  // adjacent columns of a token in WideInput::lanes

// out [lane_columns / kStep][kLaneWidth][kStep], signed
void put_lanes(const WideInput& x, size_t first, size_t cols, uint8_t* out) {
  constexpr size_t line = kLaneWidth * kStep;
  const size_t tokens = std::min(kLaneWidth, x.tokens - first);
  if (tokens < kLaneWidth) std::memset(out, 0, kLaneWidth * lane_columns(cols));
  for (size_t t = 0; t < tokens; ++t)
    for (size_t i = 0; i < lane_columns(cols); i += kStep) {
      uint8_t* const to = out + i / kStep * line + t * kStep;
      const uint8_t* const from = x.bytes + (i / kPanel * x.tokens + first + t) * kPanel + i % kPanel;
      for (size_t j = 0; j < kStep; ++j) to[j] = from[j] ^ 128;
    }
}

// sums[t * stride + r] of four rows and one vector of tokens.
PQ_INLINE void lanes_times(const int8_t* const (&w)[4], size_t cols, const int8_t* x, size_t tokens, int32_t* sums,
                           size_t stride, size_t count) {
  alignas(16) int32_t out[4][kLaneWidth];
#if defined(__ARM_FEATURE_MATMUL_INT8)
  int32x4_t acc[2][8];
  PQ_UNROLL
  for (int i = 0; i < 16; ++i) acc[i / 8][i % 8] = vdupq_n_s32(0);
  for (size_t i = 0; i < cols; i += 16, x += 16 * kLaneWidth) {
    int8x16_t rows[2][2];
    PQ_UNROLL
    for (int p = 0; p < 2; ++p) {
      const int8x16_t a = codes16(w[2 * p] + i, cols - i), b = codes16(w[2 * p + 1] + i, cols - i);
      rows[p][0] = lower_halves(a, b), rows[p][1] = upper_halves(a, b);
    }
    PQ_UNROLL
    for (int e = 0; e < 2; ++e) PQ_UNROLL
    for (int v = 0; v < 8; ++v) {
      const int8x16_t two = vld1q_s8(x + 8 * int(kLaneWidth) * e + 16 * v);
      PQ_UNROLL
      for (int p = 0; p < 2; ++p) acc[p][v] = dot_pairs(acc[p][v], rows[p][e], two);
    }
  }
  PQ_UNROLL
  for (int p = 0; p < 2; ++p) PQ_UNROLL
  for (int v = 0; v < 8; v += 2) {
    vst1q_s32(out[2 * p] + 2 * v, lower_halves(acc[p][v], acc[p][v + 1]));
    vst1q_s32(out[2 * p + 1] + 2 * v, upper_halves(acc[p][v], acc[p][v + 1]));
  }
#else
  int32x4_t acc[4][4];
  PQ_UNROLL
  for (int i = 0; i < 16; ++i) acc[i / 4][i % 4] = vdupq_n_s32(0);
  for (size_t i = 0; i < cols; i += 16, x += 16 * kLaneWidth) {
    int8x16_t rows[4];
    PQ_UNROLL
    for (int r = 0; r < 4; ++r) rows[r] = codes16(w[r] + i, cols - i);
    const auto quad = [&]<int j>(std::integral_constant<int, j>) PQ_FLAT {
      PQ_UNROLL
      for (int v = 0; v < 4; ++v) {
        const int8x16_t four = vld1q_s8(x + 4 * int(kLaneWidth) * j + 16 * v);
        PQ_UNROLL
        for (int r = 0; r < 4; ++r) acc[r][v] = dot4_lane<j>(acc[r][v], rows[r], four);
      }
    };
    quad(std::integral_constant<int, 0>{}), quad(std::integral_constant<int, 1>{});
    quad(std::integral_constant<int, 2>{}), quad(std::integral_constant<int, 3>{});
  }
  PQ_UNROLL
  for (int r = 0; r < 4; ++r) PQ_UNROLL
  for (int v = 0; v < 4; ++v) vst1q_s32(out[r] + 4 * v, acc[r][v]);
#endif
  for (size_t t = 0; t < tokens; ++t)
    for (size_t r = 0; r < count; ++r) sums[t * stride + r] = out[r][t];
}

void sums(const AffineMatrix& m, size_t first, size_t last, const WideInput& x, int32_t* out, size_t stride) {
  if (x.tokens <= kFew) {
    static constexpr decltype(&few_rows<1>) times[] = {few_rows<1>, few_rows<2>, few_rows<3>, few_rows<4>};
    for (size_t t = 0; t < x.tokens; t += 4) {
      const size_t tokens = std::min<size_t>(4, x.tokens - t);
      const WideInput some{tokens, x.padded, x.words + t * x.padded, x.bytes + t * x.padded};
      times[tokens - 1](m, first, last, some, out + t * stride, stride);
    }
    return;
  }
  const auto* lanes = reinterpret_cast<const int8_t*>(x.lanes);
  for (size_t t = 0; t < x.tokens; t += kLaneWidth, lanes += kLaneWidth * lane_columns(m.cols))
    for (size_t r = first; r < last; r += 4) {
      const int8_t* w[4];
      for (size_t i = 0; i < 4; ++i) w[i] = m.codes + std::min(r + i, last - 1) * m.cols;
      lanes_times(w, m.cols, lanes, std::min(kLaneWidth, x.tokens - t), out + t * stride + (r - first), stride,
                  std::min<size_t>(4, last - r));
    }
}

// ---------------------------------------------------------------- floats

struct Sixteen {
  float32x4_t of[4];
};
PQ_INLINE Sixteen sixteen_floats(const int8_t* p) {
  const int8x16_t x = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_high_s8(x);
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))}};
}

// Some rows times one to four tokens: group sums in four lanes, scaled per lane, reduced at the end.
template <int rows, int tokens>
void floats_rows(const AffineMatrix& m, size_t first, const float* x, float* y, size_t stride) {
  const size_t size = m.group();
  const int8_t* w = m.codes + first * m.cols;
  float32x4_t total[rows][tokens];
  float rest[rows][tokens] = {};
  PQ_UNROLL
  for (int i = 0; i < rows * tokens; ++i) total[i / tokens][i % tokens] = vdupq_n_f32(0);
  for (size_t g = 0; g < m.groups; ++g) {
    const int8_t* wg = w + g * size;
    const float* xg = x + g * size;
    float32x4_t sums[rows][tokens];
    PQ_UNROLL
    for (int i = 0; i < rows * tokens; ++i) sums[i / tokens][i % tokens] = vdupq_n_f32(0);
    size_t i = 0;
    for (; i + 16 <= size; i += 16) {
      Sixteen numbers[rows];
      PQ_UNROLL
      for (size_t r = 0; r < rows; ++r) {
        const int8_t* p = wg + r * m.cols + i;
        if (i % 64 == 0) __builtin_prefetch(p + rows * m.cols);
        numbers[r] = sixteen_floats(p);
      }
      PQ_UNROLL
      for (size_t t = 0; t < tokens; ++t) PQ_UNROLL
      for (size_t k = 0; k < 4; ++k) {
        const float32x4_t v = vld1q_f32(xg + t * m.cols + i + 4 * k);
        PQ_UNROLL
        for (int r = 0; r < rows; ++r) sums[r][t] = vfmaq_f32(sums[r][t], numbers[r].of[k], v);
      }
    }
    PQ_UNROLL
    for (size_t r = 0; r < rows; ++r) {
      const float scale = m.scale[(first + r) * m.groups + g];
      PQ_UNROLL
      for (size_t t = 0; t < tokens; ++t) {
        float tail = 0;
        for (size_t j = i; j < size; ++j) tail += float(wg[r * m.cols + j]) * xg[t * m.cols + j];
        rest[r][t] += scale * tail;
        total[r][t] = vfmaq_n_f32(total[r][t], sums[r][t], scale);
      }
    }
  }
  PQ_UNROLL
  for (size_t r = 0; r < rows; ++r) PQ_UNROLL
  for (size_t t = 0; t < tokens; ++t) y[t * stride + first + r] = vaddvq_f32(total[r][t]) + rest[r][t];
}

template <int tokens>
void few_floats(const AffineMatrix& m, size_t first, size_t last, const float* x, float* y, size_t stride) {
  size_t r = first;
  for (; r + 2 <= last; r += 2) floats_rows<2, tokens>(m, r, x, y, stride);
  for (; r < last; ++r) floats_rows<1, tokens>(m, r, x, y, stride);
}

// Columns of a row of codes as floats.
PQ_INLINE void widen(const AffineMatrix& m, size_t row, size_t column, size_t width, float* out) {
  const size_t size = m.group();
  const int8_t* codes = m.codes + row * m.cols + column;
  for (size_t i = 0; i < width;) {
    const size_t g = (column + i) / size, end = std::min(width, (g + 1) * size - column);
    const float scale = m.scale[row * m.groups + g], offset = m.offset ? m.offset[row * m.groups + g] : 0.0f;
    for (; i + 16 <= end; i += 16) {
      const Sixteen x = sixteen_floats(codes + i);
      PQ_UNROLL
      for (size_t k = 0; k < 4; ++k)
        vst1q_f32(out + i + 4 * k, vmulq_n_f32(vsubq_f32(x.of[k], vdupq_n_f32(offset)), scale));
    }
    for (; i < end; ++i) out[i] = (float(codes[i]) - offset) * scale;
  }
  std::fill_n(out + width, (4 - width % 4) % 4, 0.0f);
}

// Four rows of a panel [4][kPanel] times `tokens` tokens [tokens][kPanel], zero-padded: out[t * stride + r]. more:
// added.
template <int tokens>
PQ_INLINE void panel_times(const float* w, const float* x, size_t width, float* out, size_t stride, size_t count,
                           bool more) {
  float32x4_t acc[4][tokens];
  PQ_UNROLL
  for (int i = 0; i < 4 * tokens; ++i) acc[i / tokens][i % tokens] = vdupq_n_f32(0);
  for (size_t i = 0; i < width; i += 4) {
    float32x4_t rows[4];
    PQ_UNROLL
    for (size_t r = 0; r < 4; ++r) rows[r] = vld1q_f32(w + r * kPanel + i);
    PQ_UNROLL
    for (size_t t = 0; t < tokens; ++t) {
      const float32x4_t v = vld1q_f32(x + t * kPanel + i);
      PQ_UNROLL
      for (int r = 0; r < 4; ++r) acc[r][t] = vfmaq_f32(acc[r][t], rows[r], v);
    }
  }
  for (size_t t = 0; t < tokens; ++t) {
    float sums[4];
    PQ_UNROLL
    for (int r = 0; r < 4; ++r) sums[r] = vaddvq_f32(acc[r][t]);
    for (size_t r = 0; r < count; ++r) out[t * stride + r] = (more ? out[t * stride + r] : 0.0f) + sums[r];
  }
}

void floats(const AffineMatrix& m, size_t first, size_t last, const float* x, size_t tokens, float* y, size_t stride) {
  if (tokens <= kFewFloats) {
    static constexpr decltype(&few_floats<1>) times[] = {few_floats<1>, few_floats<2>, few_floats<3>, few_floats<4>};
    return times[tokens - 1](m, first, last, x, y, stride);
  }
  alignas(64) float panel[4 * kPanel];
  for (size_t column = 0; column < m.cols; column += kPanel)
    for (size_t r = first; r < last; r += 4) {
      const size_t width = std::min(kPanel, m.cols - column), count = std::min<size_t>(4, last - r);
      for (size_t i = 0; i < 4; ++i) widen(m, std::min(r + i, last - 1), column, width, panel + i * kPanel);
      const float* in = x + column * tokens;
      size_t t = 0;
      for (; t + 4 <= tokens; t += 4)
        panel_times<4>(panel, in + t * kPanel, width, y + t * stride + r, stride, count, column != 0);
      for (; t < tokens; ++t)
        panel_times<1>(panel, in + t * kPanel, width, y + t * stride + r, stride, count, column != 0);
    }
}

constexpr AffineSet kSet{true, true, sums, floats, put_lanes};

}  // namespace
}  // namespace polyquant
