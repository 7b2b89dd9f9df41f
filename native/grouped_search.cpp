#include "grouped_search.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

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

// MLX's own grid: the end of the range that is farther from 0 is a level, and so is 0.
PQ_INLINE Grid of_mlx(float bottom, float top, const GridSearch& how, float low, float high) {
  const bool below = std::fabs(bottom) > std::fabs(top);
  const float edge = below ? bottom : top, width = (top - bottom) / (high - low);
  const float least = width > 1e-7f ? width : 1e-7f, step = below ? least : -least;
  const float steps = std::rint(edge / step);
  return {stored(steps != 0 ? edge / steps : step, how.type, 1), low, stored(steps != 0 ? edge : 0, how.type, 0)};
}

// Sixteen small groups side by side: lane l of every array belongs to group l. Sums have the same order as above, with
// an accumulator per column modulo LANES.
constexpr size_t TILE = 16;
constexpr size_t MOST = 512;  // columns of a group that is searched in a tile

struct Grids {
  float scale[TILE], offset[TILE], bias[TILE];
};

PQ_INLINE float stored_lane(float x, ScaleType type, float instead) {
  const float half = half_to_float(float_to_half(x)), brain = bfloat_to_float(float_to_bfloat(x));
  x = type == ScaleType::f16 ? half : type == ScaleType::bf16 ? brain : x;
  const bool finite = std::fabs(x) <= std::numeric_limits<float>::max();
  return finite && (x != 0 || instead == 0) ? x : instead;
}

PQ_INLINE void sum_lanes(float (&acc)[LANES][TILE], float* out) {
  for (size_t half = LANES / 2; half; half /= 2)
    for (size_t i = 0; i < half; ++i) PQ_LOOP for (size_t l = 0; l < TILE; ++l) acc[i][l] += acc[i + half][l];
  PQ_LOOP for (size_t l = 0; l < TILE; ++l) out[l] = acc[0][l];
}

// Which terms a kind of codec has. Unweighted: every importance is 1.
template <Zero Z, bool Weighted>
struct Terms {
  static constexpr bool offset = Z == Zero::integer, bias = Z == Zero::bias, weighted = Weighted;
};

// The code of x in lane l, less its offset. With biases the lowest code, which is the offset of every group, is `low`.
template <class T>
PQ_INLINE float level(float x, const Grids& g, const float* inverse, size_t l, float low, float high) {
  float q = T::bias     ? std::rint((x - g.bias[l]) * inverse[l] + low)
            : T::offset ? std::rint(x * inverse[l] + g.offset[l])
                        : std::rint(x * inverse[l]);
  q = q > low ? q : low;
  q = q < high ? q : high;
  return T::bias ? q - low : T::offset ? q - g.offset[l] : q;
}

template <class T>
PQ_INLINE void errors_of(const float* w, const float* v, size_t size, const Grids& g, float low, float high,
                         float* out) {
  float acc[LANES][TILE] = {}, inverse[TILE];
  PQ_LOOP for (size_t l = 0; l < TILE; ++l) inverse[l] = 1.0f / g.scale[l];
  for (size_t i = 0; i < size; ++i) {
    float* sum = acc[i % LANES];
    const float *x = w + i * TILE, *k = v + i * TILE;
    PQ_LOOP for (size_t l = 0; l < TILE; ++l) {
      const float y = level<T>(x[l], g, inverse, l, low, high) * g.scale[l];
      const float d = (T::bias ? y + g.bias[l] : y) - x[l];
      sum[l] += T::weighted ? (d * d) * k[l] : d * d;
    }
  }
  sum_lanes(acc, out);
}

PQ_INLINE void candidates(const float* bottom, const float* top, float ratio, const GridSearch& how, float low,
                          float high, Grids& out) {
  const float symmetric = float(double(ratio) / double(high)), wide = float(double(ratio) / double(high - low));
  const float middle = (high - low) * 0.5f;
  PQ_LOOP for (size_t l = 0; l < TILE; ++l) {
    const float largest = top[l] > -bottom[l] ? top[l] : -bottom[l];
    const float scale =
        stored_lane(how.zero == Zero::none ? largest * symmetric : (top[l] - bottom[l]) * wide, how.type, 1);
    const float start = (top[l] + bottom[l]) * 0.5f - scale * middle;
    float whole = std::rint(low - start / scale);
    whole = whole > low ? whole : low;
    whole = whole < high ? whole : high;
    out.scale[l] = scale;
    out.offset[l] = how.zero == Zero::none ? 0 : how.zero == Zero::bias ? low : whole;
    out.bias[l] = how.zero == Zero::bias ? stored_lane(start, how.type, 0) : 0;
  }
}

template <class T>
PQ_INLINE void fitted_grids(const float* w, const float* v, size_t size, const GridSearch& how, float low, float high,
                            const Grids& g, Grids& out) {
  float acc[5][LANES][TILE] = {}, sums[5][TILE] = {}, inverse[TILE];
  PQ_LOOP for (size_t l = 0; l < TILE; ++l) inverse[l] = 1.0f / g.scale[l];
  for (size_t i = 0; i < size; ++i) {
    const float *x = w + i * TILE, *importance = v + i * TILE;
    const size_t at = i % LANES;
    PQ_LOOP for (size_t l = 0; l < TILE; ++l) {
      const float q = level<T>(x[l], g, inverse, l, low, high);
      const float k = T::weighted ? importance[l] : 1.0f;
      acc[3][at][l] += T::weighted ? (q * q) * k : q * q;
      acc[4][at][l] += T::weighted ? (q * x[l]) * k : q * x[l];
      if (!T::bias) continue;  // only these two are used
      acc[0][at][l] += k;
      acc[1][at][l] += T::weighted ? q * k : q;
      acc[2][at][l] += T::weighted ? x[l] * k : x[l];
    }
  }
  for (size_t s = T::bias ? 0 : 3; s < 5; ++s) sum_lanes(acc[s], sums[s]);
  PQ_LOOP for (size_t l = 0; l < TILE; ++l) {
    const Sums s{sums[0][l], sums[1][l], sums[2][l], sums[3][l], sums[4][l]};
    const Grid one = fitted(s, {g.scale[l], g.offset[l], g.bias[l]}, how);
    out.scale[l] = one.scale;
    out.offset[l] = one.offset;
    out.bias[l] = one.bias;
  }
}

PQ_INLINE void keep_better(const Grids& g, const float* error, Grids& best, float* least) {
  PQ_LOOP for (size_t l = 0; l < TILE; ++l) {
    const bool wins = error[l] < least[l];
    best.scale[l] = wins ? g.scale[l] : best.scale[l];
    best.offset[l] = wins ? g.offset[l] : best.offset[l];
    best.bias[l] = wins ? g.bias[l] : best.bias[l];
    least[l] = wins ? error[l] : least[l];
  }
}

// w, v: transposed weights and importance of 16 groups, [size][TILE].
template <class T>
PQ_INLINE void searched_tile(const float* w, const float* v, size_t size, const GridSearch& how, float low, float high,
                             Grids& best) {
  const float first = how.zero == Zero::bias ? std::numeric_limits<float>::infinity() : 0;
  float bottom[TILE], top[TILE], least[TILE], error[TILE];
  PQ_LOOP for (size_t l = 0; l < TILE; ++l) bottom[l] = first, top[l] = -first;
  for (size_t i = 0; i < size; ++i) PQ_LOOP for (size_t l = 0; l < TILE; ++l) {
      const float x = w[i * TILE + l];
      bottom[l] = x < bottom[l] ? x : bottom[l];
      top[l] = x > top[l] ? x : top[l];
    }
  candidates(bottom, top, how.clips[0], how, low, high, best);
  errors_of<T>(w, v, size, best, low, high, least);
  Grids next;
  for (size_t c = 1; c < how.clip_count; ++c) {
    candidates(bottom, top, how.clips[c], how, low, high, next);
    errors_of<T>(w, v, size, next, low, high, error);
    keep_better(next, error, best, least);
  }
  if (how.zero == Zero::bias) {
    PQ_LOOP for (size_t l = 0; l < TILE; ++l) {
      const Grid one = of_mlx(bottom[l], top[l], how, low, high);
      next.scale[l] = one.scale;
      next.offset[l] = one.offset;
      next.bias[l] = one.bias;
    }
    errors_of<T>(w, v, size, next, low, high, error);
    keep_better(next, error, best, least);
  }
  fitted_grids<T>(w, v, size, how, low, high, best, next);
  errors_of<T>(w, v, size, next, low, high, error);
  keep_better(next, error, best, least);
}

#define PQ_SEARCH_TILE(name, zero, weighted)                                                                   \
  PQ_SIMD void name(const float* w, const float* v, size_t size, const GridSearch& how, float low, float high, \
                    Grids& best) {                                                                             \
    searched_tile<Terms<zero, weighted>>(w, v, size, how, low, high, best);                                    \
  }
PQ_SEARCH_TILE(symmetric_tile, Zero::none, false)
PQ_SEARCH_TILE(symmetric_weighted_tile, Zero::none, true)
PQ_SEARCH_TILE(offset_tile, Zero::integer, false)
PQ_SEARCH_TILE(offset_weighted_tile, Zero::integer, true)
PQ_SEARCH_TILE(bias_tile, Zero::bias, false)
PQ_SEARCH_TILE(bias_weighted_tile, Zero::bias, true)
#undef PQ_SEARCH_TILE

using TileSearch = decltype(&symmetric_tile);

TileSearch tile_search(Zero zero, bool weighted) {
  if (zero == Zero::none) return weighted ? symmetric_weighted_tile : symmetric_tile;
  if (zero == Zero::integer) return weighted ? offset_weighted_tile : offset_tile;
  return weighted ? bias_weighted_tile : bias_tile;
}

// in: TILE rows of `size` numbers -> out[size][TILE]
void transpose(const float* in, size_t size, float* out) {
  size_t i = 0;
#if defined(__SSE2__)
  for (; i + 4 <= size; i += 4)
    for (size_t l = 0; l < TILE; l += 4) {
      __m128 r[4];
      for (size_t k = 0; k < 4; ++k) r[k] = _mm_loadu_ps(in + (l + k) * size + i);
      _MM_TRANSPOSE4_PS(r[0], r[1], r[2], r[3]);
      for (size_t k = 0; k < 4; ++k) _mm_storeu_ps(out + (i + k) * TILE + l, r[k]);
    }
#endif
  for (; i < size; ++i)
    for (size_t l = 0; l < TILE; ++l) out[i * TILE + l] = in[l * size + i];
}

// The tiles of 16 whole groups; returns the number of groups that are done.
size_t search_tiles(const float* w, const float* weights, size_t count, size_t groups, size_t size,
                    const GridSearch& how, float low, float high, int8_t* codes, float* scale, float* offset,
                    float* bias) {
  const bool weighted = std::any_of(weights, weights + groups * size, [](float k) { return k != 1.0f; });
  const TileSearch search = tile_search(how.zero, weighted);
  std::vector<float> x(size * TILE), v(size * TILE);
  size_t cell = 0;
  for (; cell + TILE <= count; cell += TILE) {
    transpose(w + cell * size, size, x.data());
    if (weighted)
      for (size_t l = 0; l < TILE; ++l)
        for (size_t i = 0; i < size; ++i) v[i * TILE + l] = weights[(cell + l) % groups * size + i];
    Grids best;
    search(x.data(), v.data(), size, how, low, high, best);
    for (size_t l = 0; l < TILE; ++l) {
      const Grid g{best.scale[l], best.offset[l], best.bias[l]};
      write_codes(w + (cell + l) * size, size, g, low, high, codes + (cell + l) * size);
      scale[cell + l] = g.scale;
      offset[cell + l] = g.offset;
      if (bias) bias[cell + l] = g.bias;
    }
  }
  return cell;
}

}  // namespace

void grouped_search(const float* w, const float* weights, size_t rows, size_t groups, size_t size,
                    const GridSearch& how, int8_t* codes, float* scale, float* offset, float* bias) {
  const float low = -float(1 << (how.bits - 1)), high = -low - 1;
  const float first = how.zero == Zero::bias ? std::numeric_limits<float>::infinity() : 0;
  const size_t count = rows * groups;
  const size_t done =
      size <= MOST ? search_tiles(w, weights, count, groups, size, how, low, high, codes, scale, offset, bias) : 0;
  w += done * size;
  codes += done * size;
  for (size_t cell = done; cell < count; ++cell, w += size, codes += size) {
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
    if (how.zero == Zero::bias) consider(of_mlx(bottom, top, how, low, high));
    consider(fitted(sums_of(w, column, size, best, low, high), best, how));
    write_codes(w, size, best, low, high, codes);
    scale[cell] = best.scale;
    offset[cell] = best.offset;
    if (bias) bias[cell] = best.bias;
  }
}

}  // namespace polyquant
