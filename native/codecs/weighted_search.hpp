// ggml's searches for a scale (and minimum) with importance weights, eight blocks of 32 at a time, one per lane.
// Each lane adds in ggml's order, so results equal its scalar code bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/round.hpp"
#include "base/simd.hpp"

namespace polyquant {

constexpr int search_lanes = 8;

struct SearchBlocks {
  float x[32][search_lanes];      // weights
  float w[32][search_lanes];      // their importance
  float codes[32][search_lanes];  // out: integers from 0
  float scale[search_lanes];      // out
  float offset[search_lanes];     // out: the value of code 0 (search_affine)
};

// weight = importance * sqrt(mean square of the row + x^2): large weights count more, small ones never vanish.
PQ_INLINE void load_search(SearchBlocks& s, const float* x, const float* importance, float mean_square, int blocks) {
  for (int t = 0; t < search_lanes; ++t)
    for (int i = 0; i < 32; ++i) {
      const bool there = t < blocks;
      const float v = there ? x[32 * t + i] : 0.0f;
      s.x[i][t] = v;
      s.w[i][t] = there ? importance[32 * t + i] * std::sqrt(mean_square + v * v) : 0.0f;
    }
}

// x ~ scale * (code - n), codes 0 .. 2n - 1: the first scale maps the extreme to code 0; 18 nearby scales compete with
// it.
PQ_INLINE void search_symmetric(SearchBlocks& s, int n) {
  constexpr int lanes = search_lanes;
  float extreme[lanes] = {}, amax[lanes] = {}, pick[lanes], best[lanes], candidate[lanes], xl[lanes], ll[lanes];
  for (int i = 0; i < 32; ++i)
    for (int t = 0; t < lanes; ++t) {
      const float a = std::fabs(s.x[i][t]);
      extreme[t] = a > amax[t] ? s.x[i][t] : extreme[t];
      amax[t] = a > amax[t] ? a : amax[t];
    }
  const float low = -float(n), high = float(n - 1);
  for (int trial = 0; trial < 19; ++trial) {
    const int shift = trial == 0 ? 0 : trial <= 9 ? trial - 10 : trial - 9;  // 0, -9 .. -1, 1 .. 9
    for (int t = 0; t < lanes; ++t) {
      candidate[t] = -(float(n) + 0.1f * float(shift)) / extreme[t];
      xl[t] = ll[t] = 0;
    }
    for (int i = 0; i < 32; ++i)
      for (int t = 0; t < lanes; ++t) {
        const float l = clamp(round_half_even(candidate[t] * s.x[i][t]), low, high);
        xl[t] += s.w[i][t] * s.x[i][t] * l;
        ll[t] += s.w[i][t] * l * l;
      }
    for (int t = 0; t < lanes; ++t) {
      const float fit = xl[t] / ll[t];
      const bool better = trial == 0 || (ll[t] > 0 && xl[t] * xl[t] > best[t] * ll[t]);
      const float scale = ll[t] != 0 ? fit : 0.0f;
      pick[t] = better ? candidate[t] : pick[t];
      s.scale[t] = better ? scale : s.scale[t];
      best[t] = better ? scale * xl[t] : best[t];
    }
  }
  for (int t = 0; t < lanes; ++t) s.scale[t] = amax[t] < 1e-15f ? 0.0f : s.scale[t];
  for (int i = 0; i < 32; ++i)
    for (int t = 0; t < lanes; ++t) {
      const float l = clamp(round_half_even(pick[t] * s.x[i][t]), low, high) + float(n);
      s.codes[i][t] = amax[t] < 1e-15f ? 0.0f : l;
    }
}

// x ~ scale * code + offset, codes 0 .. n, offset <= 0. Each of 37 trials starts from the best offset so far.
PQ_INLINE void search_affine(SearchBlocks& s, int n) {
  constexpr int lanes = search_lanes;
  float min[lanes], max[lanes], sum_w[lanes], sum_x[lanes], best[lanes], step[lanes], trial_codes[32][lanes];
  float sum_l[lanes], sum_ll[lanes], sum_xl[lanes], error[lanes], fit[lanes], base[lanes];
  const float top = float(n);
  for (int t = 0; t < lanes; ++t) min[t] = max[t] = s.x[0][t], sum_w[t] = sum_x[t] = best[t] = 0;
  for (int i = 0; i < 32; ++i)
    for (int t = 0; t < lanes; ++t) {
      const float x = s.x[i][t];
      min[t] = x < min[t] ? x : min[t];
      max[t] = x > max[t] ? x : max[t];
      sum_w[t] += s.w[i][t];
      sum_x[t] += s.w[i][t] * x;
    }
  bool flat[lanes];
  for (int t = 0; t < lanes; ++t) {
    min[t] = min[t] > 0 ? 0.0f : min[t];
    flat[t] = max[t] <= min[t];
    base[t] = min[t];
    step[t] = top / (max[t] - min[t]);
    s.scale[t] = 1.0f / step[t];
  }
  for (int i = 0; i < 32; ++i)
    for (int t = 0; t < lanes; ++t) {
      const float l = round_half_even(clamp(step[t] * (s.x[i][t] - min[t]), 0.0f, top));
      const float miss = s.scale[t] * l + min[t] - s.x[i][t];
      s.codes[i][t] = l;
      best[t] += s.w[i][t] * (miss * miss);
    }
  for (int trial = 0; trial <= 36; ++trial) {
    for (int t = 0; t < lanes; ++t) {
      step[t] = (-0.9f + 0.05f * float(trial) + top) / (max[t] - min[t]);
      sum_l[t] = sum_ll[t] = sum_xl[t] = error[t] = 0;
    }
    for (int i = 0; i < 32; ++i)
      for (int t = 0; t < lanes; ++t) {
        const float l = round_half_even(clamp(step[t] * (s.x[i][t] - min[t]), 0.0f, top));
        const float wl = s.w[i][t] * l;
        trial_codes[i][t] = l;
        sum_l[t] += wl;
        sum_ll[t] += wl * l;
        sum_xl[t] += wl * s.x[i][t];
      }
    bool solvable[lanes];
    for (int t = 0; t < lanes; ++t) {
      const float det = sum_w[t] * sum_ll[t] - sum_l[t] * sum_l[t];
      const float free_fit = (sum_w[t] * sum_xl[t] - sum_x[t] * sum_l[t]) / det;
      const float free_base = (sum_ll[t] * sum_x[t] - sum_l[t] * sum_xl[t]) / det;
      const float pinned_fit = sum_xl[t] / sum_ll[t];
      solvable[t] = det > 0;
      fit[t] = free_base > 0 ? pinned_fit : free_fit;
      base[t] = free_base > 0 ? 0.0f : free_base;
    }
    for (int i = 0; i < 32; ++i)
      for (int t = 0; t < lanes; ++t) {
        const float miss = fit[t] * trial_codes[i][t] + base[t] - s.x[i][t];
        error[t] += s.w[i][t] * (miss * miss);
      }
    int32_t better[lanes];
    for (int t = 0; t < lanes; ++t) {
      better[t] = solvable[t] && error[t] < best[t];
      best[t] = better[t] ? error[t] : best[t];
      s.scale[t] = better[t] ? fit[t] : s.scale[t];
      min[t] = better[t] ? base[t] : min[t];
    }
    for (int i = 0; i < 32; ++i)
      for (int t = 0; t < lanes; ++t) s.codes[i][t] = better[t] ? trial_codes[i][t] : s.codes[i][t];
  }
  for (int t = 0; t < lanes; ++t) s.offset[t] = min[t], s.scale[t] = flat[t] ? 0.0f : s.scale[t];
  for (int i = 0; i < 32; ++i)
    for (int t = 0; t < lanes; ++t) s.codes[i][t] = flat[t] ? 0.0f : s.codes[i][t];
}

}  // namespace polyquant
