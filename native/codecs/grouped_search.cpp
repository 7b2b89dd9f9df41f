#include "codecs/grouped_search.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "base/half.hpp"
#include "base/simd.hpp"
#include "codecs/affine.hpp"
#include "codecs/blocks.hpp"
#include "codecs/metrics.hpp"

namespace polyquant {
namespace {

constexpr size_t IN_CACHE = 16 << 10;  // weights that are searched, decoded and compared before the next ones
constexpr size_t LANES = 16;           // sums run in this many lanes, then pairwise: the same order on every machine

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

// Eight small groups side by side: lane l of every register belongs to group l. Sums have the same order as above, with
// a sum for each column modulo LANES. Registers of 32 bytes: GCC splits wider ones badly for AVX2.
constexpr size_t TILE = 8;
constexpr size_t MOST = 512;  // columns of a group that is searched in a tile

using V = float __attribute__((vector_size(4 * TILE)));
using Bits = uint32_t __attribute__((vector_size(4 * TILE)));
using Signed = int32_t __attribute__((vector_size(4 * TILE)));

PQ_INLINE V take(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

PQ_INLINE V all(float x) { return x - V{}; }

PQ_INLINE V larger(V a, V b) { return a > b ? a : b; }
PQ_INLINE V smaller(V a, V b) { return a < b ? a : b; }

PQ_INLINE V sum_of(V (&acc)[LANES]) {
  for (size_t half = LANES / 2; half; half /= 2)
    for (size_t i = 0; i < half; ++i) acc[i] += acc[i + half];
  return acc[0];
}

PQ_INLINE float rounded_to_half(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffff;
  const float small = (x + 0.75f) - 0.75f;  // subnormals have the step 2^-24, which is that of numbers from 0.5 to 1
  const float normal = std::bit_cast<float>((bits + 0xfff + ((bits >> 13) & 1)) & ~0x1fffu);
  const float finite = magnitude < 0x38800000 ? small : normal;
  return magnitude < 0x477ff000 ? finite : std::numeric_limits<float>::infinity();
}

PQ_INLINE float rounded_to_bfloat(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const float finite = std::bit_cast<float>((bits + 0x7fff + ((bits >> 16) & 1)) & ~0xffffu);
  return (bits & 0x7fffffff) < 0x7f800000 ? finite : std::numeric_limits<float>::infinity();
}

// x as stored; `instead` for NaN, infinity and (if it is not 0) for 0. Loops, which GCC vectorizes with these integers.
PQ_INLINE V stored_all(V v, ScaleType type, float instead) {
  float x[TILE];
  std::memcpy(x, &v, sizeof x);
  if (type == ScaleType::f16) PQ_LOOP for (size_t l = 0; l < TILE; ++l) x[l] = rounded_to_half(x[l]);
  if (type == ScaleType::bf16) PQ_LOOP for (size_t l = 0; l < TILE; ++l) x[l] = rounded_to_bfloat(x[l]);
  PQ_LOOP for (size_t l = 0; l < TILE; ++l) {
    const bool finite = std::fabs(x[l]) <= std::numeric_limits<float>::max();
    x[l] = finite && (x[l] != 0 || instead == 0) ? x[l] : instead;
  }
  return take(x);
}

// In memory: as registers they would be live in all loops, and GCC would keep the sums in memory instead.
class Grids {
 public:
  Grids() = default;
  PQ_INLINE Grids(V scale, V offset, V bias) {
    std::memcpy(scale_, &scale, sizeof scale_);
    std::memcpy(offset_, &offset, sizeof offset_);
    std::memcpy(bias_, &bias, sizeof bias_);
  }

  PQ_INLINE V scale() const { return take(scale_); }
  PQ_INLINE V offset() const { return take(offset_); }
  PQ_INLINE V bias() const { return take(bias_); }
  Grid operator[](size_t l) const { return {scale_[l], offset_[l], bias_[l]}; }

 private:
  float scale_[TILE], offset_[TILE], bias_[TILE];
};

// Which terms a kind of codec has. Unweighted: every importance is 1.
template <Zero Z, bool Weighted>
struct Terms {
  static constexpr bool offset = Z == Zero::integer, bias = Z == Zero::bias, weighted = Weighted;
};

// Added to a number below 2^22, it leaves the nearest integer, ties to even, in the lowest bits. Of larger numbers the
// bits of the sum, read as a signed integer, are beyond those of every code.
constexpr float SHIFT = 0x1.8p23f;

PQ_INLINE V rounded(V x) { return (x + SHIFT) - SHIFT; }

// Grids as registers.
struct Wide {
  V scale, inverse, offset, bias;
  Signed first, last;  // the codes plus SHIFT, as bits
  float low;

  PQ_INLINE Wide(const Grids& g, float low_, float high)
      : scale(g.scale()),
        inverse(1.0f / scale),
        offset(g.offset()),
        bias(g.bias()),
        first(bits_of(low_)),
        last(bits_of(high)),
        low(low_) {}

  static PQ_INLINE Signed bits_of(float code) { return std::bit_cast<int32_t>(code + SHIFT) - Signed{}; }
};

// As integers: that leaves the units for floats to the sums.
PQ_INLINE V clamped(V shifted, Signed first, Signed last) {
  Signed bits = Signed(shifted);
  bits = bits > first ? bits : first;
  bits = bits < last ? bits : last;
  return V(bits) - SHIFT;
}

// The codes of x, less their offsets. With biases the lowest code is the offset of every group.
template <class T>
PQ_INLINE V levels(V x, const Wide& g) {
  const V exact = T::bias ? (x - g.bias) * g.inverse + g.low : T::offset ? x * g.inverse + g.offset : x * g.inverse;
  const V q = clamped(exact + SHIFT, g.first, g.last);
  return T::bias ? q - g.low : T::offset ? q - g.offset : q;
}

// The squared errors of `count` columns of eight groups, each added to a sum of its own.
template <class T, size_t count>
PQ_INLINE void add_errors_of(const float* w, const float* v, const Wide& g, V* sums) {
  V d[count];
  for (size_t j = 0; j < count; ++j) d[j] = levels<T>(take(w + j * TILE), g);
  for (size_t j = 0; j < count; ++j) d[j] = d[j] * g.scale;
  for (size_t j = 0; j < count; ++j) d[j] = (T::bias ? d[j] + g.bias : d[j]) - take(w + j * TILE);
  for (size_t j = 0; j < count; ++j) d[j] = T::weighted ? (d[j] * d[j]) * take(v + j * TILE) : d[j] * d[j];
  for (size_t j = 0; j < count; ++j) sums[j] += d[j];
}

// w, v: transposed weights and importance of the groups, [size][TILE]; also below.
template <class T>
PQ_INLINE V errors_of(const float* w, const float* v, size_t size, const Grids& grids, float low, float high) {
  const Wide g(grids, low, high);
  V acc[LANES];
  // Four sums side by side, step by step: more do not fit in registers, and each alone is one long chain of operations.
  constexpr size_t together = 4;
  for (size_t k = 0; k < LANES; k += together) {
    V sums[together] = {};
    size_t i = k;
    for (; i + together <= size; i += LANES) add_errors_of<T, together>(w + i * TILE, v + i * TILE, g, sums);
    for (size_t j = 0; i + j < size; ++j) add_errors_of<T, 1>(w + (i + j) * TILE, v + (i + j) * TILE, g, sums + j);
    for (size_t j = 0; j < together; ++j) acc[k + j] = sums[j];
  }
  return sum_of(acc);
}

PQ_INLINE Grids candidates(V bottom, V top, float ratio, const GridSearch& how, float low, float high) {
  const float symmetric = float(double(ratio) / double(high)), wide = float(double(ratio) / double(high - low));
  if (how.zero == Zero::none) return {stored_all(larger(top, -bottom) * symmetric, how.type, 1), V{}, V{}};
  const V scale = stored_all((top - bottom) * wide, how.type, 1);
  const V start = (top + bottom) * 0.5f - scale * ((high - low) * 0.5f);
  if (how.zero == Zero::bias) return {scale, all(low), stored_all(start, how.type, 0)};
  return {scale, smaller(larger(rounded(low - start / scale), all(low)), all(high)), V{}};
}

// MLX's own grid, as above.
PQ_INLINE Grids of_mlx(V bottom, V top, const GridSearch& how, float low, float high) {
  const V farthest = larger(top, -top), lowest = larger(bottom, -bottom);
  const V edge = lowest > farthest ? bottom : top, least = larger((top - bottom) / (high - low), all(1e-7f));
  const V step = lowest > farthest ? least : -least, steps = rounded(edge / step);
  const V scale = steps != 0 ? edge / (steps != 0 ? steps : all(1)) : step;
  return {stored_all(scale, how.type, 1), all(low), stored_all(steps != 0 ? edge : V{}, how.type, 0)};
}

template <class T>
PQ_INLINE Grids fitted_grids(const float* w, const float* v, size_t size, const GridSearch& how, float low, float high,
                             const Grids& grids) {
  const Wide g(grids, low, high);
  V all_v[LANES], all_q[LANES], all_w[LANES], all_qq[LANES], all_qw[LANES];
  for (size_t k = 0; k < LANES; ++k) {
    V sv{}, sq{}, sw{}, sqq{}, sqw{};
    for (size_t i = k; i < size; i += LANES) {
      const V x = take(w + i * TILE), q = levels<T>(x, g), factor = T::weighted ? take(v + i * TILE) : all(1);
      sqq += T::weighted ? (q * q) * factor : q * q;
      sqw += T::weighted ? (q * x) * factor : q * x;
      if (!T::bias) continue;  // only these two are used
      sv += factor;
      sq += T::weighted ? q * factor : q;
      sw += T::weighted ? x * factor : x;
    }
    all_v[k] = sv, all_q[k] = sq, all_w[k] = sw, all_qq[k] = sqq, all_qw[k] = sqw;
  }
  const V qq = sum_of(all_qq), qw = sum_of(all_qw);
  if (!T::bias) return {stored_all(qw / qq, how.type, 1), g.offset, g.bias};
  const V sv = sum_of(all_v), sq = sum_of(all_q), sw = sum_of(all_w);
  const V scale = stored_all((sv * qw - sq * sw) / (sv * qq - sq * sq), how.type, 1);
  return {scale, g.offset, stored_all((sw - scale * sq) / sv, how.type, 0)};
}

PQ_INLINE Grids better(const Grids& a, const Grids& b, Signed first) {
  return {first ? a.scale() : b.scale(), first ? a.offset() : b.offset(), first ? a.bias() : b.bias()};
}

// errors: errors_of<T> as a separate function, in which GCC keeps the sums in registers.
template <class T, auto errors>
PQ_INLINE Grids searched_tile(const float* w, const float* v, size_t size, const GridSearch& how, float low,
                              float high) {
  V bottom = all(how.zero == Zero::bias ? std::numeric_limits<float>::infinity() : 0), top = -bottom;
  for (size_t i = 0; i < size; ++i) {
    const V x = take(w + i * TILE);
    bottom = smaller(x, bottom);
    top = larger(x, top);
  }
  const size_t fits = how.clip_count + T::bias;
  Grids best;
  V least{}, error;
  for (size_t c = 0; c <= fits; ++c) {
    const Grids next = c < how.clip_count ? candidates(bottom, top, how.clips[c], how, low, high)
                       : c < fits         ? of_mlx(bottom, top, how, low, high)
                                          : fitted_grids<T>(w, v, size, how, low, high, best);
    errors(w, v, size, next, low, high, error);
    best = c == 0 ? next : better(next, best, error < least);
    least = c == 0 ? error : smaller(error, least);
  }
  return best;
}

#define PQ_SEARCH_TILE(name, zero, weighted)                                                                     \
  PQ_SIMD void name##_errors(const float* w, const float* v, size_t size, const Grids& g, float low, float high, \
                             V& out) {                                                                           \
    out = errors_of<Terms<zero, weighted>>(w, v, size, g, low, high);                                            \
  }                                                                                                              \
  PQ_SIMD void name(const float* w, const float* v, size_t size, const GridSearch& how, float low, float high,   \
                    Grids& best) {                                                                               \
    best = searched_tile<Terms<zero, weighted>, name##_errors>(w, v, size, how, low, high);                      \
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

// The tiles of TILE whole groups; returns the number of groups that are done.
size_t search_tiles(const float* w, const float* weights, size_t count, size_t groups, size_t size,
                    const GridSearch& how, float low, float high, int8_t* codes, float* scale, float* offset,
                    float* bias) {
  const bool weighted = std::any_of(weights, weights + groups * size, [](float k) { return k != 1.0f; });
  const TileSearch search = tile_search(how.zero, weighted);
  std::vector<float> x(size * TILE), v(size * TILE);
  size_t cell = 0;
  for (; cell + TILE <= count; cell += TILE) {
    transpose(w + cell * size, size, x.data());
    if (weighted && cell % groups + TILE <= groups)
      transpose(weights + cell % groups * size, size, v.data());
    else if (weighted)
      for (size_t l = 0; l < TILE; ++l)
        for (size_t i = 0; i < size; ++i) v[i * TILE + l] = weights[(cell + l) % groups * size + i];
    Grids best;
    search(x.data(), v.data(), size, how, low, high, best);
    for (size_t l = 0; l < TILE; ++l) {
      const Grid g = best[l];
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

bool grouped_quantize(const BlockKernel& source, const uint8_t* data, const float* weights, size_t rows, size_t groups,
                      size_t size, const GridSearch& how, int8_t* codes, float* scale, float* offset, float* bias,
                      ErrorSums* errors) {
  const size_t cols = groups * size, bytes = cols / size_t(source.weights) * size_t(source.bytes);
  // rows that fill stretches of add_errors and tiles of groups
  const size_t whole = std::lcm(512 / std::gcd(cols, size_t(512)), TILE / std::gcd(groups, TILE));
  const size_t step = std::max(whole, IN_CACHE / cols / whole * whole);
  thread_local std::vector<float> room;
  room.resize(2 * std::min(step, rows) * cols);
  for (size_t r = 0; r < rows; r += step) {
    const size_t n = std::min(step, rows - r);
    float *w = room.data(), *back = w + n * cols, *const biases = bias ? bias + r * groups : nullptr;
    source.dequantize(data + r * bytes, w, n * cols / size_t(source.weights));
    if (!errors && !std::all_of(w, back, [](float x) { return std::isfinite(x); })) return false;
    grouped_search(w, weights, n, groups, size, how, codes + r * cols, scale + r * groups, offset + r * groups, biases);
    if (!errors) continue;
    affine_decode(codes + r * cols, n * groups, size, scale + r * groups, offset + r * groups, biases, back);
    add_errors(w, back, n * cols, *errors);
    if (!std::isfinite(errors->aa + errors->bb)) return false;
  }
  return true;
}

}  // namespace polyquant
