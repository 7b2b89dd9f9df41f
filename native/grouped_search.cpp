#include "grouped_search.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "half.hpp"
#include "simd.hpp"

namespace polyquant {
namespace {

constexpr size_t LANES = 16;  // sums run in this many lanes, then pairwise: the same order on every machine

struct Grid {
  float scale, offset, bias;
};

float stored(float x, ScaleType type, float instead) {
  if (type == ScaleType::f16) x = half_to_float(float_to_half(x));
  if (type == ScaleType::bf16) x = bfloat_to_float(float_to_bfloat(x));
  return std::isfinite(x) && (x != 0 || instead == 0) ? x : instead;
}

PQ_INLINE float total(float* lanes) {
  for (size_t half = LANES / 2; half; half /= 2)
    for (size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

PQ_INLINE float code_of(float w, const Grid& g, float inverse, float low, float high) {
  float q = std::rint((w - g.bias) * inverse + g.offset);
  q = q > low ? q : low;
  return q < high ? q : high;
}

PQ_SIMD float error_of(const float* w, const float* weights, size_t size, Grid g, float low, float high) {
  float lanes[LANES] = {};
  const float inverse = 1.0f / g.scale;
  size_t i = 0;
  for (; i + LANES <= size; i += LANES)
    for (size_t l = 0; l < LANES; ++l) {
      const float q = code_of(w[i + l], g, inverse, low, high);
      const float d = ((q - g.offset) * g.scale + g.bias) - w[i + l];
      lanes[l] += (d * d) * weights[i + l];
    }
  for (size_t l = 0; i + l < size; ++l) {
    const float q = code_of(w[i + l], g, inverse, low, high);
    const float d = ((q - g.offset) * g.scale + g.bias) - w[i + l];
    lanes[l] += (d * d) * weights[i + l];
  }
  return total(lanes);
}

struct Sums {
  float v, q, w, qq, qw;
};

PQ_SIMD Sums sums_of(const float* w, const float* weights, size_t size, Grid g, float low, float high) {
  float v[LANES] = {}, sq[LANES] = {}, sw[LANES] = {}, qq[LANES] = {}, qw[LANES] = {};
  const float inverse = 1.0f / g.scale;
  const auto add = [&](size_t i, size_t l) {
    const float x = w[i], k = weights[i], q = code_of(x, g, inverse, low, high) - g.offset;
    v[l] += k;
    sq[l] += q * k;
    sw[l] += x * k;
    qq[l] += (q * q) * k;
    qw[l] += (q * x) * k;
  };
  size_t i = 0;
  for (; i + LANES <= size; i += LANES)
    for (size_t l = 0; l < LANES; ++l) add(i + l, l);
  for (size_t l = 0; i + l < size; ++l) add(i + l, l);
  return {total(v), total(sq), total(sw), total(qq), total(qw)};
}

PQ_SIMD void range_of(const float* w, size_t size, float& low, float& high) {
  float a = low, b = high;
  for (size_t i = 0; i < size; ++i) {
    a = w[i] < a ? w[i] : a;
    b = w[i] > b ? w[i] : b;
  }
  low = a;
  high = b;
}

PQ_SIMD void write_codes(const float* w, size_t size, Grid g, float low, float high, int8_t* codes) {
  const float inverse = 1.0f / g.scale;
  for (size_t i = 0; i < size; ++i) codes[i] = int8_t(int32_t(code_of(w[i], g, inverse, low, high)));
}

Grid fitted(const Sums& s, const Grid& g, const GridSearch& how) {
  if (how.zero != Zero::bias) return {stored(s.qw / s.qq, how.type, 1), g.offset, g.bias};
  const float slope = (s.v * s.qw - s.q * s.w) / (s.v * s.qq - s.q * s.q);
  const float scale = stored(slope, how.type, 1);
  return {scale, g.offset, stored((s.w - scale * s.q) / s.v, how.type, 0)};
}

Grid candidate(float bottom, float top, float ratio, const GridSearch& how, float low, float high) {
  if (how.zero == Zero::none)
    return {stored(std::max(top, -bottom) * float(double(ratio) / double(high)), how.type, 1), 0, 0};
  const float scale = stored((top - bottom) * float(double(ratio) / double(high - low)), how.type, 1);
  const float start = (top + bottom) * 0.5f - scale * ((high - low) * 0.5f);
  if (how.zero == Zero::bias) return {scale, low, stored(start, how.type, 0)};
  return {scale, std::min(std::max(std::rint(low - start / scale), low), high), 0};
}

}  // namespace

void grouped_search(const float* w, const float* weights, size_t rows, size_t groups, size_t size,
                    const GridSearch& how, int8_t* codes, float* scale, float* offset, float* bias) {
  const float low = -float(1 << (how.bits - 1)), high = -low - 1;
  const float first = how.zero == Zero::bias ? std::numeric_limits<float>::infinity() : 0;
  for (size_t cell = 0; cell < rows * groups; ++cell, w += size, codes += size) {
    const float* column = weights + cell % groups * size;
    float bottom = first, top = -first;
    range_of(w, size, bottom, top);
    Grid best = candidate(bottom, top, how.clips[0], how, low, high);
    float least = error_of(w, column, size, best, low, high);
    const auto consider = [&](const Grid& g) {
      const float error = error_of(w, column, size, g, low, high);
      if (error < least) best = g, least = error;
    };
    for (size_t i = 1; i < how.clip_count; ++i) consider(candidate(bottom, top, how.clips[i], how, low, high));
    consider(fitted(sums_of(w, column, size, best, low, high), best, how));
    write_codes(w, size, best, low, high, codes);
    scale[cell] = best.scale;
    offset[cell] = best.offset;
    if (bias) bias[cell] = best.bias;
  }
}

}  // namespace polyquant
