// The decoder's kernels of one instruction set: included by decoder_plain.cpp, decoder_avx2.cpp and decoder_avx512.cpp, which are compiled with
// the flags of theirs. Everything is in an unnamed namespace: no two sets share a function.
#include <algorithm>
#include <cmath>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "decoder_set.hpp"
#include "half.hpp"
#include "lanes.hpp"

namespace polyquant {
namespace {

void norm_row(const float* x, const float* weight, float* out, size_t n, double eps) {
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
      const Doubles wide = __builtin_convertvector(v, Doubles);
      sums[j] += wide * wide;
    }
  const Doubles all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  double sum = 0;
  for (size_t j = 0; j < part; ++j) sum += all[j];
  for (; i < n; ++i) sum += double(x[i]) * double(x[i]);
  const float factor = float(1.0 / std::sqrt(sum / double(n) + eps));
  for (i = 0; i < n; ++i) out[i] = (x[i] * factor) * weight[i];
}

// One head.
void turn_halves(const float* x, const float* cos, const float* sin, float* out, size_t turned) {
  for (size_t i = 0; i < turned; ++i) {
    const float a = x[i], b = x[i + turned];
    out[i] = a * cos[i] - b * sin[i];
    out[i + turned] = a * sin[i] + b * cos[i];
  }
}

void turn_pairs(const float* x, const float* cos, const float* sin, float* out, size_t turned) {
  for (size_t i = 0; i < turned; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    out[2 * i] = a * cos[i] - b * sin[i];
    out[2 * i + 1] = a * sin[i] + b * cos[i];
  }
}

PQ_INLINE Wide swish(Wide g, Wide up) { return g / (1.0f + exponential(-g)) * up; }

void swiglu(const float* g, const float* up, float* out, size_t n) {
  size_t i = 0;
  for (; i + kWide <= n; i += kWide) put(out + i, swish(take(g + i), take(up + i)));
  if (i < n) {
    float rest[3][kWide] = {};
    std::copy(g + i, g + n, rest[0]);
    std::copy(up + i, up + n, rest[1]);
    put(rest[2], swish(take(rest[0]), take(rest[1])));
    std::copy(rest[2], rest[2] + (n - i), out + i);
  }
}

void relu2(const float* g, const float* up, float* out, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const float positive = g[i] < 0 ? 0.0f : g[i];  // NaN stays NaN
    out[i] = positive * positive * up[i];
  }
}

// ---------------------------------------------------------------- attention: see attention.cpp

// c[R, kWide V] = a[R, k] b[k, kWide V], or added to it.
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
PQ_INLINE void columns(const float* a, size_t lda, const float* b, size_t ldb, float* c, size_t ldc, size_t rows, size_t k, bool add) {
  size_t r = 0;
  for (; r + 4 <= rows; r += 4) tile<4, V>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, k, add);
  for (; r < rows; ++r) tile<1, V>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, k, add);
}

// c[rows, n] = a[rows, k] b[k, n], or added to it; b and c have `step` floats a row.
PQ_INLINE void multiply(const float* a, size_t lda, const float* b, float* c, size_t step, size_t rows, size_t k, size_t n, bool add) {
  size_t j = 0;
  for (; j + 2 * kWide <= n; j += 2 * kWide) columns<2>(a, lda, b + j, step, c + j, step, rows, k, add);
  for (; j + kWide <= n; j += kWide) columns<1>(a, lda, b + j, step, c + j, step, rows, k, add);
  for (; j < n; ++j)
    for (size_t r = 0; r < rows; ++r) {
      float sum = add ? c[r * step + j] : 0.0f;
      for (size_t i = 0; i < k; ++i) sum += a[r * lda + i] * b[i * step + j];
      c[r * step + j] = sum;
    }
}

void widen_halves(const uint8_t* halves, float* out, size_t n) {
  size_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + 2 * i))));
#endif
  for (; i < n; ++i) out[i] = load_half(halves + 2 * i);
}

void widen_keys(const int8_t* codes, const float* step, const float* offset, float* out, size_t size) {
  for (size_t d = 0; d < size; ++d)
    for (size_t s = 0; s < cache_block; ++s) out[d * cache_block + s] = float(codes[d * cache_block + s]) * step[d] + offset[d];
}

void widen_values(const int8_t* codes, const float* step, const float* offset, float* out, size_t size) {
  for (size_t s = 0; s < cache_block; ++s)
    for (size_t d = 0; d < size; ++d) out[s * size + d] = float(codes[s * size + d]) * step[d] + offset[d];
}

// A block of one kv head as floats: where it lies if it is stored so, else widened into scratch.
const float* floats_of(const Cache& c, size_t group, size_t block, bool values, size_t recent, float* scratch) {
  const size_t n = cache_block * c.size, at = (group * c.blocks + block) * n;
  const void* stored = values ? c.values : c.keys;
  switch (c.kept) {
    case Kept::f32: return static_cast<const float*>(stored) + at;
    case Kept::f16: widen_halves(static_cast<const uint8_t*>(stored) + 2 * at, scratch, n); return scratch;
    case Kept::i8: break;
  }
  if (block == recent) return c.recent + (2 * group + values) * n;
  const float* step = c.steps + ((group * c.blocks + block) * 4 + 2 * values) * c.size;
  (values ? widen_values : widen_keys)(static_cast<const int8_t*>(stored) + at, step, step + c.size, scratch, c.size);
  return scratch;
}

// Scores of one row -> weights; positions below `low` and from `high` on are not seen.
PQ_INLINE void weigh(float* scores, size_t low, size_t high, float& largest, float& total, float* out, size_t size) {
  for (size_t s = 0; s < low; ++s) scores[s] = -INFINITY;
  for (size_t s = high; s < cache_block; ++s) scores[s] = -INFINITY;
  constexpr int parts = cache_block / kWide;
  Wide x[parts], top = all(largest);
#pragma GCC unroll 8
  for (int i = 0; i < parts; ++i) x[i] = take(scores + kWide * i), top = x[i] > top ? x[i] : top;
  const float now = largest_of(top);
  if (now != largest) {
    const float fade = std::exp(largest - now);
    total *= fade;
    largest = now;
    for (size_t d = 0; d < size; ++d) out[d] *= fade;
  }
  const float base = now == -INFINITY ? 0.0f : now;  // nothing seen yet: all weights are zero
  Wide sum{};
#pragma GCC unroll 8
  for (int i = 0; i < parts; ++i) {
    x[i] = exponential(x[i] - base);
    sum += x[i];
    put(scores + kWide * i, x[i]);
  }
  total += sum_of(sum);
}

// scratch: rows [R, size], scores [R, 32], a block of keys and one of values.
void attend_piece(const Cache& c, const Tokens& t, const Piece& p, float* scratch, const Sums& sums) {
  const size_t shared = t.heads / c.groups, rows = p.count * shared, size = c.size, n = cache_block * size;
  float *query = scratch, *scores = query + rows * size, *wide = scores + rows * cache_block;
  for (size_t i = 0; i < p.count; ++i) {
    const float* from = t.q + (p.token + i) * t.q_stride + p.group * shared * size;
    for (size_t j = 0; j < shared * size; ++j) query[i * shared * size + j] = from[j] * t.scale;
  }
  std::fill_n(sums.largest, rows, -INFINITY);
  std::fill_n(sums.total, rows, 0.0f);
  std::fill_n(sums.out, rows * size, 0.0f);
  const size_t first = t.start + p.token, last = first + p.count - 1;  // positions of the queries
  for (size_t b = p.begin; b < p.end; ++b) {
    const size_t at = b * cache_block, high = std::min(cache_block, last + 1 - at), whole = (high + kWide - 1) / kWide * kWide;
    multiply(query, size, floats_of(c, p.group, b, false, last / cache_block, wide), scores, cache_block, rows, size, whole, false);
    for (size_t r = 0; r < rows; ++r) {
      const size_t position = first + r / shared, begin = t.window && position >= t.window ? position + 1 - t.window : 0;
      const size_t seen = position < at ? 0 : std::min(cache_block, position + 1 - at), hidden = begin > at ? std::min(cache_block, begin - at) : 0;
      weigh(scores + r * cache_block, hidden, seen, sums.largest[r], sums.total[r], sums.out + r * size, size);
    }
    multiply(scores, cache_block, floats_of(c, p.group, b, true, last / cache_block, wide + n), sums.out, size, rows, high, size, true);
  }
}

constexpr DecoderSet kSet{norm_row, turn_halves, turn_pairs, swiglu, relu2, attend_piece};

}  // namespace
}  // namespace polyquant
