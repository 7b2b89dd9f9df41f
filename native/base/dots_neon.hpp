// Sums of products of signed bytes with NEON, as wide as the instruction set of the file that includes this.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "base/simd.hpp"

namespace polyquant {
namespace {

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kProductsOfPairs = true;
#else
constexpr bool kProductsOfPairs = false;
#endif

// acc plus products of four adjacent bytes per lane. a: at least -127.
PQ_INLINE int32x4_t dot4(int32x4_t acc, int8x16_t w, int8x16_t a) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(acc, w, a);
#else  // two products fit 16 bits
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(a)), high = vmull_high_s8(w, a);
  return vpadalq_s16(acc, vpaddq_s16(low, high));
#endif
}

// acc plus 16 products, in any lanes.
PQ_INLINE int32x4_t dot16(int32x4_t acc, int8x16_t w, int8x16_t a) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(acc, w, a);
#else
  acc = vpadalq_s16(acc, vmull_s8(vget_low_s8(w), vget_low_s8(a)));
  return vpadalq_s16(acc, vmull_high_s8(w, a));
#endif
}

// As dot4, of lane `lane` of the codes w with every lane of `a`, which may have bytes of -128.
template <int lane>
PQ_INLINE int32x4_t dot4_lane(int32x4_t acc, int8x16_t w, int8x16_t a) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_laneq_s32(acc, a, w, lane);
#else
  const int8x16_t all = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(w), lane));
  const int16x8_t low = vmull_s8(vget_low_s8(all), vget_low_s8(a)), high = vmull_high_s8(all, a);
  return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// acc [2][2] plus the products of two rows with two tokens, of eight columns each.
PQ_INLINE int32x4_t dot_pairs(int32x4_t acc, int8x16_t rows, int8x16_t tokens) { return vmmlaq_s32(acc, rows, tokens); }
#endif

// The lower and the upper halves of two registers.
PQ_INLINE int8x16_t lower_halves(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s64(vzip1q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}
PQ_INLINE int8x16_t upper_halves(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s64(vzip2q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}
PQ_INLINE int32x4_t lower_halves(int32x4_t a, int32x4_t b) {
  return vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
}
PQ_INLINE int32x4_t upper_halves(int32x4_t a, int32x4_t b) {
  return vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
}

// Four columns of eight tokens in two times two registers (by quads of columns) -> pairs of tokens with eight columns.
PQ_INLINE int8x16_t first_pair(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}
PQ_INLINE int8x16_t second_pair(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}

PQ_INLINE void transpose4(float32x4_t (&v)[4]) {
  const auto wide = [](float32x4_t x) { return vreinterpretq_f64_f32(x); };
  const float32x4_t a = vzip1q_f32(v[0], v[1]), b = vzip2q_f32(v[0], v[1]), c = vzip1q_f32(v[2], v[3]),
                    d = vzip2q_f32(v[2], v[3]);
  v[0] = vreinterpretq_f32_f64(vzip1q_f64(wide(a), wide(c))),
  v[1] = vreinterpretq_f32_f64(vzip2q_f64(wide(a), wide(c)));
  v[2] = vreinterpretq_f32_f64(vzip1q_f64(wide(b), wide(d))),
  v[3] = vreinterpretq_f32_f64(vzip2q_f64(wide(b), wide(d)));
}

}  // namespace
}  // namespace polyquant
