// The decoder's kernels for one instruction set: included by decoder/plain.cpp, decoder/avx2.cpp and
// decoder/avx512.cpp,
// each compiled with its own flags. Everything is in an unnamed namespace: no two sets share a function.
#include <algorithm>
#include <cmath>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "base/half.hpp"
#include "base/lanes.hpp"
#include "decoder/set.hpp"

namespace polyquant {
namespace {

// Sum of f(x) in double; f may process whole vectors.
template <class F>
PQ_INLINE double sum_wide(const float* x, size_t n, const F& f) {
  using Half = float __attribute__((vector_size(2 * kWide)));
  using Doubles = double __attribute__((vector_size(4 * kWide)));
  constexpr size_t part = kWide / 2;
  Doubles sums[4] = {};
  size_t i = 0;
  for (; i + 4 * part <= n; i += 4 * part)
#pragma GCC unroll 4
    for (size_t j = 0; j < 4; ++j) {
      Half v;
      std::memcpy(&v, x + i + j * part, sizeof v);
      sums[j] += f(__builtin_convertvector(v, Doubles));
    }
  const Doubles all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  double sum = 0;
  for (size_t j = 0; j < part; ++j) sum += all[j];
  for (; i < n; ++i) sum += f(double(x[i]));
  return sum;
}

void norm_row(const float* x, const float* weight, float* out, size_t n, double eps) {
  const double sum = sum_wide(x, n, [](auto v) { return v * v; });
  const float factor = float(1.0 / std::sqrt(sum / double(n) + eps));
  for (size_t i = 0; i < n; ++i) out[i] = (x[i] * factor) * weight[i];
}

// (x - mean) / sqrt(variance + eps) * weight + bias; bias may be null.
void layer_norm_row(const float* x, const float* weight, const float* bias, float* out, size_t n, double eps) {
  const double mean = sum_wide(x, n, [](auto v) { return v; }) / double(n);
  const double squares = sum_wide(x, n, [=](auto v) { return (v - mean) * (v - mean); });
  const float factor = float(1.0 / std::sqrt(squares / double(n) + eps)), middle = float(mean);
  for (size_t i = 0; i < n; ++i) out[i] = (x[i] - middle) * factor * weight[i];
  for (size_t i = 0; bias && i < n; ++i) out[i] += bias[i];
}

// Rotates one head.
void rotate_halves(const float* x, const float* cos, const float* sin, float* out, size_t pairs) {
  for (size_t i = 0; i < pairs; ++i) {
    const float a = x[i], b = x[i + pairs];
    out[i] = a * cos[i] - b * sin[i];
    out[i + pairs] = a * sin[i] + b * cos[i];
  }
}

void rotate_pairs(const float* x, const float* cos, const float* sin, float* out, size_t pairs) {
  for (size_t i = 0; i < pairs; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    out[2 * i] = a * cos[i] - b * sin[i];
    out[2 * i + 1] = a * sin[i] + b * cos[i];
  }
}

struct Silu {
  PQ_INLINE Wide operator()(Wide g) const { return g / (1.0f + exponential(-g)); }
};

// Preserves NaN.
struct Relu {
  PQ_INLINE Wide operator()(Wide g) const { return g < 0 ? Wide{} : g; }
};

struct Relu2 {
  PQ_INLINE Wide operator()(Wide g) const {
    const Wide positive = g < 0 ? Wide{} : g;
    return positive * positive;
  }
};

// g / 2 (1 + erf(g / sqrt 2)) = g (1 - erfc(z) / 2) for z = |g| / sqrt 2, or g erfc(z) / 2 if g < 0. erfc uses a fitted
// polynomial in 1 / (1 + z / 2) inside an exponential, with relative error below 1.2e-7 (Press et al., Numerical
// Recipes, erfcc).
struct Gelu {
  PQ_INLINE Wide operator()(Wide g) const {
    const Wide z = (g < 0 ? -g : g) * 0x1.6a09e6p-1f, t = 1.0f / (1.0f + 0.5f * z);
    Wide p = t * 0.17087277f - 0.82215223f;
    p = p * t + 1.48851587f;
    p = p * t - 1.13520398f;
    p = p * t + 0.27886807f;
    p = p * t - 0.18628806f;
    p = p * t + 0.09678418f;
    p = p * t + 0.37409196f;
    p = p * t + 1.00002368f;
    const Wide half = 0.5f * t * exponential(p * t - 1.26551223f - z * z);
    return g < 0 ? (g < -20.0f ? Wide{} : g * half) : g * (1.0f - half);
  }
};

// g / 2 (1 + tanh u) = g / (1 + exp(-2 u)), u = sqrt(2 / pi) (g + 0.044715 g^3)
struct GeluTanh {
  PQ_INLINE Wide operator()(Wide g) const {
    return g / (1.0f + exponential(-1.5957691216f * (g + 0.044715f * g * g * g)));
  }
};

// expm1(x) - x, by its series where the difference would cancel.
struct XieluAt {
  Xielu how;
  PQ_INLINE Wide operator()(Wide x) const {
    const Wide limit = all(how.eps), low = x < limit ? x : limit;
    const Wide series =
        low * low *
        (0.5f +
         low * (0x1.555556p-3f +
                low * (0x1.555556p-5f + low * (0x1.111112p-7f + low * (0x1.6c16c2p-10f + low * 0x1.a01a02p-13f)))));
    const Wide grown = x < -0.5f ? exponential(low) - 1.0f - x : series + (low - x);
    return (x > 0 ? how.positive * x * x : how.negative * grown) + how.beta * x;
  }
};

// out = f(g) * up, f(g) if up is null.
template <class F>
PQ_INLINE void each(const float* g, const float* up, float* out, size_t n, const F& f) {
  size_t i = 0;
  if (up)
    for (; i + kWide <= n; i += kWide) put(out + i, f(take(g + i)) * take(up + i));
  else
    for (; i + kWide <= n; i += kWide) put(out + i, f(take(g + i)));
  if (i < n) {
    float rest[3][kWide] = {};
    std::copy(g + i, g + n, rest[0]);
    if (up) std::copy(up + i, up + n, rest[1]);
    put(rest[2], up ? f(take(rest[0])) * take(rest[1]) : f(take(rest[0])));
    std::copy(rest[2], rest[2] + (n - i), out + i);
  }
}

template <class F>
void gated(const float* g, const float* up, float* out, size_t n) {
  each(g, up, out, n, F{});
}

void xielu_row(const float* x, float* out, size_t n, const Xielu& how) { each(x, nullptr, out, n, XieluAt{how}); }

// ---------------------------------------------------------------- attention: see decoder/attention.cpp

// c[R, kWide V] = a[R, k] b[k, kWide V], or accumulated.
template <int R, int V>
PQ_INLINE void tile(const float* a, size_t lda, const float* b, size_t ldb, float* c, size_t ldc, size_t k, bool add) {
  Wide sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[r][v] = add ? take(c + r * ldc + kWide * v) : Wide{};
  for (size_t i = 0; i < k; ++i) {
    Wide right[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) right[v] = take(b + i * ldb + kWide * v);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] += a[r * lda + i] * right[v];
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) put(c + r * ldc + kWide * v, sum[r][v]);
}

template <int V>
PQ_INLINE void columns(const float* a, size_t lda, const float* b, size_t ldb, float* c, size_t ldc, size_t rows,
                       size_t k, bool add) {
  size_t r = 0;
  for (; r + 4 <= rows; r += 4) tile<4, V>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, k, add);
  for (; r < rows; ++r) tile<1, V>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, k, add);
}

// c[rows, n] = a[rows, k] b[k, n], or accumulated; lda, ldb, ldc: row strides in floats.
PQ_INLINE void multiply(const float* a, size_t lda, const float* b, size_t ldb, float* c, size_t ldc, size_t rows,
                        size_t k, size_t n, bool add) {
  size_t j = 0;
  for (; j + 2 * kWide <= n; j += 2 * kWide) columns<2>(a, lda, b + j, ldb, c + j, ldc, rows, k, add);
  for (; j + kWide <= n; j += kWide) columns<1>(a, lda, b + j, ldb, c + j, ldc, rows, k, add);
  for (; j < n; ++j)
    for (size_t r = 0; r < rows; ++r) {
      float sum = add ? c[r * ldc + j] : 0.0f;
      for (size_t i = 0; i < k; ++i) sum += a[r * lda + i] * b[i * ldb + j];
      c[r * ldc + j] = sum;
    }
}

void widen_halves(const uint8_t* halves, float* out, size_t n) {
  size_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + 2 * i))));
#endif
  for (; i < n; ++i) out[i] = load_half(halves + 2 * i);
}

void widen_keys(const int8_t* codes, const float* step, const float* offset, float* out, size_t size) {
  for (size_t d = 0; d < size; ++d)
    for (size_t s = 0; s < cache_block; ++s)
      out[d * cache_block + s] = float(codes[d * cache_block + s]) * step[d] + offset[d];
}

void widen_values(const int8_t* codes, const float* step, const float* offset, float* out, size_t size) {
  for (size_t s = 0; s < cache_block; ++s)
    for (size_t d = 0; d < size; ++d) out[s * size + d] = float(codes[s * size + d]) * step[d] + offset[d];
}

// Returns a block of one kv head as floats: in place if stored so, otherwise widened into scratch.
const float* floats_of(const Cache& c, size_t group, size_t block, bool values, size_t recent, float* scratch) {
  const size_t n = cache_block * c.size, at = (group * c.blocks + block) * n;
  const void* stored = values ? c.values : c.keys;
  switch (c.kept) {
    case Kept::f32:
      return static_cast<const float*>(stored) + at;
    case Kept::f16:
      widen_halves(static_cast<const uint8_t*>(stored) + 2 * at, scratch, n);
      return scratch;
    case Kept::i8:
      break;
  }
  if (block == recent) return c.recent + (2 * group + values) * n;
  const float* step = c.steps + ((group * c.blocks + block) * 4 + 2 * values) * c.size;
  (values ? widen_values : widen_keys)(static_cast<const int8_t*>(stored) + at, step, step + c.size, scratch, c.size);
  return scratch;
}

// Converts the scores of one row to weights; of its `count` positions, only [low, high) are attended to.
PQ_INLINE void weigh(float* scores, size_t count, size_t low, size_t high, float& largest, float& total, float* out,
                     size_t size) {
  for (size_t s = 0; s < low; ++s) scores[s] = -INFINITY;
  for (size_t s = high; s < count; ++s) scores[s] = -INFINITY;
  Wide top = all(largest);
  for (size_t s = 0; s < count; s += kWide) {
    const Wide x = take(scores + s);
    top = x > top ? x : top;
  }
  const float now = largest_of(top);
  if (now != largest) {
    const float fade = std::exp(largest - now);
    total *= fade;
    largest = now;
    for (size_t d = 0; d < size; ++d) out[d] *= fade;
  }
  const float base = now == -INFINITY ? 0.0f : now;  // no position yet: all weights are zero
  Wide sum{};
  for (size_t s = 0; s < count; s += kWide) {
    const Wide weight = exponential(take(scores + s) - base);
    sum += weight;
    put(scores + s, weight);
  }
  total += sum_of(sum);
}

// cap tanh(x / cap), by the series of tanh near 0 and 1 - 2 / (e^2x + 1) elsewhere.
PQ_INLINE Wide capped(Wide score, float cap) {
  const Wide x = score / cap, s = x * x;
  const Wide series = x * (1.0f + s * (-0x1.555556p-2f + s * (0x1.111112p-3f + s * -0x1.ba1ba2p-5f)));
  const Wide whole = 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
  return cap * (s < 0.03f ? series : whole);
}

// Transforms the scores of one query head; position: of the first key, relative to the query.
PQ_INLINE void bend(const Tokens& t, size_t head, float position, float* scores, size_t count) {
  for (size_t s = 0; t.softcap && s < count; s += kWide) put(scores + s, capped(take(scores + s), t.softcap));
  for (size_t s = 0; t.slopes && s < count; ++s) scores[s] += t.slopes[head] * (position + float(s));
}

// scratch: rows [R, size], scores [R, 32 blocks_together], a block of keys or values.
void attend_piece(const Cache& c, const Tokens& t, const Piece& p, float* scratch, const Sums& sums) {
  constexpr size_t width = blocks_together * cache_block;
  const size_t shared = t.heads / c.groups, rows = p.count * shared, size = c.size;
  float *query = scratch, *scores = query + rows * size, *wide = scores + rows * width;
  for (size_t i = 0; i < p.count; ++i) {
    const float* from = t.q + (p.token + i) * t.q_stride + p.group * shared * size;
    for (size_t j = 0; j < shared * size; ++j) query[i * shared * size + j] = from[j] * t.scale;
  }
  std::fill_n(sums.largest, rows, -INFINITY);
  std::fill_n(sums.total, rows, 0.0f);
  std::fill_n(sums.out, rows * size, 0.0f);
  const size_t first = t.start + p.token, last = first + p.count - 1,
               recent = last / cache_block;  // positions of the queries, and their block
  const auto seen = [=](size_t b) { return std::min(cache_block, last + 1 - b * cache_block); };
  for (size_t b = p.begin; b < p.end; b += blocks_together) {
    const size_t at = b * cache_block, blocks = std::min(blocks_together, p.end - b);
    const size_t count = (blocks - 1) * cache_block + (seen(b + blocks - 1) + kWide - 1) / kWide * kWide;
    for (size_t i = 0; i < blocks; ++i)
      multiply(query, size, floats_of(c, p.group, b + i, false, recent, wide), cache_block, scores + i * cache_block,
               width, rows, size, std::min(cache_block, count - i * cache_block), false);
    for (size_t r = 0; r < rows; ++r) {
      const size_t position = first + r / shared, begin = t.first_seen(position);
      const size_t high = position < at ? 0 : std::min(count, position + 1 - at),
                   low = begin > at ? std::min(count, begin - at) : 0;
      if (t.softcap || t.slopes)
        bend(t, p.group * shared + r % shared, float(at) - float(position), scores + r * width, count);
      weigh(scores + r * width, count, low, high, sums.largest[r], sums.total[r], sums.out + r * size, size);
    }
    for (size_t i = 0; i < blocks; ++i)
      multiply(scores + i * cache_block, width, floats_of(c, p.group, b + i, true, recent, wide), size, sums.out, size,
               rows, seen(b + i), size, true);
  }
}

constexpr DecoderSet kSet{norm_row,
                          rotate_halves,
                          rotate_pairs,
                          layer_norm_row,
                          {gated<Silu>, gated<Relu2>, gated<Gelu>, gated<GeluTanh>, gated<Relu>},
                          xielu_row,
                          attend_piece};

}  // namespace
}  // namespace polyquant
