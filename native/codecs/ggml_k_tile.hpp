// Sixteen sub-blocks in parallel, one per lane, with the errors and weighted sums needed by the search for K types.
// Weight i of every sub-block is in row i, so each lane sums over i in order: this vectorizes without horizontal steps,
// and
// the order of additions, which decides ties between candidates, matches the numpy reference.
#pragma once

#include <cstring>

#include "base/half.hpp"

namespace polyquant::k_search {

constexpr int kLanes = 16;
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds to integer, half to even
constexpr float kHuge = 1e9f;          // beyond the range of fp16 scales; keeps every sum finite
constexpr float kTinyHalf = 0x1p-24f, kMaxHalf = 65504.0f;
constexpr float kSingular = 1e-4f;    // a determinant below this fraction of its terms is rounding noise
constexpr float kMargin = 1.000001f;  // so that rounding noise does not replace the natural initial value
// Fraction of the energy below which the remaining error is only due to the rounding of super-scales.
constexpr float kExact = 0x1p-20f;
constexpr float kAffineStarts[] = {0.0f, -0.3f, 0.3f, -0.6f, 0.6f, -0.9f, 0.9f};
constexpr float kSymmetricStarts[] = {0.0f, -0.4f, 0.4f, -0.8f, 0.8f};

using Lane = float[kLanes];

PQ_INLINE float clamp(float v, float lo, float hi) { return v > lo ? (v < hi ? v : hi) : lo; }  // NaN becomes lo
PQ_INLINE float nearest(float v, float lo, float hi) { return (clamp(v, lo, hi) + kMagic) - kMagic; }
PQ_INLINE float inverse(float s) { return s != 0 ? 1.0f / s : 0.0f; }
// Positive and rounded to fp16, but never to zero: a zero super-scale would erase weights that the smallest one can
// express.
PQ_INLINE float super_scale(float v) {
  return v > 0 ? half_to_float(float_to_half(clamp(v, kTinyHalf, kMaxHalf))) : 0.0f;
}

// The integer for the largest sub-scale: two values for every block, then a power of two and others near the largest
// integer.
constexpr int kAnchors = 11;
PQ_INLINE int anchor(int k, int subs, int second) {
  return k == 0 ? subs : k == 1 ? second : k == 2 ? (subs + 1) / 2 : subs + 2 - k;
}

struct Sums {
  Lane q, qq, xq;
};

// W weights in each of 16 lanes; codes in [lo, hi].
template <int W>
struct Tile {
  static constexpr int kPer = 256 / W, kBlocks = kLanes / kPer;
  float lo, hi;
  float x[W][kLanes], w[W][kLanes];
  Lane sw, sx, sxx;

  PQ_INLINE float code(float x, float min, float inv) const { return nearest((x + min) * inv, lo, hi); }

  // blocks: number of existing super-blocks; missing ones are filled with zeros.
  PQ_INLINE void load(const float* src, const float* importance, int blocks) {
    for (int l = 0; l < kLanes; ++l) {
      const bool there = l / kPer < blocks;
      for (int i = 0; i < W; ++i) {
        const float v = there ? src[l * W + i] : 0.0f;
        x[i][l] = v == v ? clamp(v, -kHuge, kHuge) : 0.0f;
        w[i][l] = there ? importance[l * W + i] : 1.0f;
      }
      sw[l] = sx[l] = sxx[l] = 0;
    }
    for (int i = 0; i < W; ++i)
      for (int l = 0; l < kLanes; ++l) {
        const float wx = w[i][l] * x[i][l];
        sw[l] += w[i][l];
        sx[l] += wx;
        sxx[l] += wx * x[i][l];
      }
  }

  PQ_INLINE void extremes(Lane& down, Lane& up) const {
    for (int l = 0; l < kLanes; ++l) down[l] = up[l] = x[0][l];
    for (int i = 1; i < W; ++i)
      for (int l = 0; l < kLanes; ++l) {
        down[l] = x[i][l] < down[l] ? x[i][l] : down[l];
        up[l] = x[i][l] > up[l] ? x[i][l] : up[l];
      }
  }

  // Weighted squared error of each sub-block with the nearest codes.
  PQ_INLINE void error(const Lane& scale, const Lane& min, Lane& out) const {
    Lane inv, sum = {};
    for (int l = 0; l < kLanes; ++l) inv[l] = inverse(scale[l]);
    for (int i = 0; i < W; ++i)
      for (int l = 0; l < kLanes; ++l) {
        const float e = (x[i][l] + min[l]) - scale[l] * code(x[i][l], min[l], inv[l]);
        sum[l] += w[i][l] * (e * e);
      }
    std::memcpy(out, sum, sizeof sum);
  }

  PQ_INLINE void sums(const Lane& inv, const Lane& min, Sums& out) const {
    Sums t = {};
    for (int i = 0; i < W; ++i)
      for (int l = 0; l < kLanes; ++l) {
        const float q = code(x[i][l], min[l], inv[l]), wq = w[i][l] * q;
        t.q[l] += wq;
        t.qq[l] += wq * q;
        t.xq[l] += wq * x[i][l];
      }
    out = t;
  }

  // Total of the super-block that starts at a lane.
  static PQ_INLINE float total(const Lane& v, int first) {
    float sum = 0;
    for (int l = first; l < first + kPer; ++l) sum += v[l];
    return sum;
  }

  // True if `error` is nearly, but not exactly, zero.
  PQ_INLINE bool nearly_exact(const Lane& error, int first) const {
    const float e = total(error, first);
    return e > 0 && e < kExact * total(sxx, first);
  }
};

}  // namespace polyquant::k_search
