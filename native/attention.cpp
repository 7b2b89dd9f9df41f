// Causal attention over a cache of blocks of 32 positions, with the softmax on the way (Milakov & Gimelshein 2018; Dao et al. 2022).
//
// A piece is a kv head, some queries and some blocks. Its rows are the queries' heads that read this kv head: [R, size], and for each block
//   scores[R, 32] = rows[R, size] keys[size, 32]       largest, sum: of each row so far
//   weights = exp(scores - largest)                    out[R, size] = out * exp(earlier largest - largest) + weights[R, 32] values[32, size]
// Keys lie channel by channel, so both products are the same small matrix product with contiguous right sides.
#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include "blocks.hpp"
#include "decoder.hpp"
#include "half.hpp"
#include "lanes.hpp"
#include "threads.hpp"

namespace polyquant {
namespace {

constexpr size_t rows_at_once = 64;    // as many as keep rows, scores and sums near the core
constexpr size_t blocks_at_once = 16;  // of a long text, for one query

// c[R, 8 V] = a[R, k] b[k, 8 V], or added to it.
template <int R, int V>
PQ_INLINE void tile(const float* a, size_t lda, const float* b, size_t ldb, float* c, size_t ldc, size_t k, bool add) {
  F8 sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[r][v] = add ? load8(c + r * ldc + 8 * v) : all8(0.0f);
  for (size_t i = 0; i < k; ++i) {
    F8 right[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) right[v] = load8(b + i * ldb + 8 * v);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] += all8(a[r * lda + i]) * right[v];
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store8(c + r * ldc + 8 * v, sum[r][v]);
}

template <int V>
PQ_INLINE void columns(const float* a, size_t lda, const float* b, size_t ldb, float* c, size_t ldc, size_t rows, size_t k, bool add) {
  size_t r = 0;
  for (; r + 4 <= rows; r += 4) tile<4, V>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, k, add);
  for (; r < rows; ++r) tile<1, V>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, k, add);
}

// c[rows, n] = a[rows, k] b[k, n], or added to it.
PQ_INLINE void multiply(const float* a, size_t lda, const float* b, float* c, size_t rows, size_t k, size_t n, bool add) {
  size_t j = 0;
  for (; j + 16 <= n; j += 16) columns<2>(a, lda, b + j, n, c + j, n, rows, k, add);
  for (; j + 8 <= n; j += 8) columns<1>(a, lda, b + j, n, c + j, n, rows, k, add);
  for (; j < n; ++j)
    for (size_t r = 0; r < rows; ++r) {
      float sum = add ? c[r * n + j] : 0.0f;
      for (size_t i = 0; i < k; ++i) sum += a[r * lda + i] * b[i * n + j];
      c[r * n + j] = sum;
    }
}

PQ_FMA void widen_keys(const int8_t* codes, const float* step, const float* offset, float* out, size_t size) {
  for (size_t d = 0; d < size; ++d)
    for (size_t s = 0; s < cache_block; ++s) out[d * cache_block + s] = float(codes[d * cache_block + s]) * step[d] + offset[d];
}

PQ_FMA void widen_values(const int8_t* codes, const float* step, const float* offset, float* out, size_t size) {
  for (size_t s = 0; s < cache_block; ++s)
    for (size_t d = 0; d < size; ++d) out[s * size + d] = float(codes[s * size + d]) * step[d] + offset[d];
}

const BlockKernel& halves() {
  static const BlockKernel& kernel = *std::ranges::find(plain_kernels(), std::string_view("f16"), [](auto& k) { return std::string_view(k.name); });
  return kernel;
}

// A block of one kv head as floats: where it lies if it is stored so, else widened into scratch.
const float* floats_of(const Cache& c, size_t group, size_t block, bool values, size_t recent, float* scratch) {
  const size_t n = cache_block * c.size, at = (group * c.blocks + block) * n;
  const void* stored = values ? c.values : c.keys;
  switch (c.kept) {
    case Kept::f32: return static_cast<const float*>(stored) + at;
    case Kept::f16: halves().dequantize(static_cast<const uint8_t*>(stored) + 2 * at, scratch, n); return scratch;
    case Kept::i8: break;
  }
  if (block == recent) return c.recent + (2 * group + values) * n;
  const float* step = c.steps + ((group * c.blocks + block) * 4 + 2 * values) * c.size;
  (values ? widen_values : widen_keys)(static_cast<const int8_t*>(stored) + at, step, step + c.size, scratch, c.size);
  return scratch;
}

// `count` queries from `token` on, of a kv head, over the blocks [begin, end).
struct Piece {
  size_t group, token, count, begin, end;
};

// Of each row: the largest score, the sum of weights, and the weighted sum of values [size].
struct Sums {
  float *largest, *total, *out;
};

// Scores of one row -> weights; positions below `low` and from `high` on are not seen.
PQ_INLINE void weigh(float* scores, size_t low, size_t high, float& largest, float& total, float* out, size_t size) {
  for (size_t s = 0; s < low; ++s) scores[s] = -INFINITY;
  for (size_t s = high; s < cache_block; ++s) scores[s] = -INFINITY;
  F8 x[4], top = all8(largest);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) x[i] = load8(scores + 8 * i), top = x[i] > top ? x[i] : top;
  float now = largest;
  for (int i = 0; i < 8; ++i) now = top[i] > now ? top[i] : now;
  if (now != largest) {
    const float fade = exp8(all8(largest - now))[0];
    total *= fade;
    largest = now;
    for (size_t d = 0; d < size; ++d) out[d] *= fade;
  }
  const F8 base = all8(now == -INFINITY ? 0.0f : now);  // nothing seen yet: all weights are zero
  F8 sum = all8(0.0f);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    x[i] = exp8(x[i] - base);
    sum += x[i];
    store8(scores + 8 * i, x[i]);
  }
  total += sum8(sum);
}

// scratch: rows [R, size], scores [R, 32], a block of keys and one of values.
PQ_FMA void attend_piece(const Cache& c, const Tokens& t, const Piece& p, float* scratch, const Sums& sums) {
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
    const size_t at = b * cache_block, high = std::min(cache_block, last + 1 - at);
    multiply(query, size, floats_of(c, p.group, b, false, last / cache_block, wide), scores, rows, size, cache_block, false);
    for (size_t r = 0; r < rows; ++r) {
      const size_t position = first + r / shared, begin = t.window && position >= t.window ? position + 1 - t.window : 0;
      const size_t seen = position < at ? 0 : std::min(cache_block, position + 1 - at), hidden = begin > at ? std::min(cache_block, begin - at) : 0;
      weigh(scores + r * cache_block, hidden, seen, sums.largest[r], sums.total[r], sums.out + r * size, size);
    }
    multiply(scores, cache_block, floats_of(c, p.group, b, true, last / cache_block, wide + n), sums.out, rows, high, size, true);
  }
}

// Joins the sums of all pieces over the same queries (part after part in memory), divides, and writes to the queries' place.
void finish(const Tokens& t, const Piece& p, const Sums& sums, size_t parts, size_t stride, size_t shared, size_t size) {
  const size_t rows = p.count * shared;
  for (size_t r = 0; r < rows; ++r) {
    float* to = t.out + ((p.token + r / shared) * t.heads + p.group * shared + r % shared) * size;
    float largest = -INFINITY, total = 0;
    for (size_t i = 0; i < parts; ++i) largest = std::max(largest, sums.largest[i * stride + r]);
    std::fill_n(to, size, 0.0f);
    for (size_t i = 0; i < parts; ++i) {
      const float *out = sums.out + i * stride + r * size, fade = parts == 1 ? 1.0f : std::exp(sums.largest[i * stride + r] - largest);
      total += sums.total[i * stride + r] * fade;
      for (size_t d = 0; d < size; ++d) to[d] += out[d] * fade;
    }
    for (size_t d = 0; d < size; ++d) to[d] /= total;
  }
}

void attend_stored(const Cache& c, const Tokens& t) {
  const size_t shared = t.heads / c.groups, size = c.size;
  const size_t most = std::clamp<size_t>(rows_at_once / shared, 1, cache_block), runs = (t.count + most - 1) / most;
  const size_t rows = std::min(most, t.count) * shared, need = rows * (size + 2);  // floats of a piece's sums
  const size_t oldest = t.window && t.start >= t.window ? (t.start + 1 - t.window) / cache_block : 0;
  const size_t blocks = (t.start + t.count + cache_block - 1) / cache_block - oldest;
  const size_t parts = runs > 1 ? 1 : (blocks + blocks_at_once - 1) / blocks_at_once;
  std::vector<float> shares(parts > 1 ? c.groups * parts * need : 0);
  const auto sums_at = [=](float* p) { return Sums{p, p + rows, p + 2 * rows}; };
  const auto piece_at = [&](size_t group, size_t run, size_t part) {
    const size_t token = run * most, count = std::min(most, t.count - token), first = t.start + token, last = first + count - 1;
    const size_t begin = t.window && first >= t.window ? (first + 1 - t.window) / cache_block : 0, end = last / cache_block + 1;
    if (parts == 1) return Piece{group, token, count, begin, end};
    return Piece{group, token, count, begin + part * blocks_at_once, std::min(end, begin + (part + 1) * blocks_at_once)};
  };
  parallel_for(c.groups * runs * parts, [&](size_t chunk) {
    // The last queries see most: they go first, so that no thread is left with a long one.
    const Piece p = piece_at(chunk % c.groups, runs - 1 - chunk / c.groups / parts, chunk / c.groups % parts);
    thread_local std::vector<float> scratch;
    const size_t own = rows * (size + cache_block) + 2 * cache_block * size;
    if (scratch.size() < own + need) scratch.resize(own + need);
    const Sums sums = sums_at(parts > 1 ? shares.data() + (p.group * parts + chunk / c.groups % parts) * need : scratch.data() + own);
    attend_piece(c, t, p, scratch.data(), sums);
    if (parts == 1) finish(t, p, sums, 1, need, shared, size);
  });
  for (size_t g = 0; parts > 1 && g < c.groups; ++g)
    finish(t, piece_at(g, 0, 0), sums_at(shares.data() + g * parts * need), parts, need, shared, size);
}

// k, v of one token into the blocks of kv head g, as floats or halves.
template <class T, T (*narrow)(float)>
void store_token(const Cache& c, const float* k, const float* v, size_t g, size_t position) {
  const size_t at = (g * c.blocks + position / cache_block) * cache_block * c.size, s = position % cache_block;
  T *keys = static_cast<T*>(c.keys) + at, *values = static_cast<T*>(c.values) + at + s * c.size;
  for (size_t d = 0; d < c.size; ++d) keys[d * cache_block + s] = narrow(k[d]);
  for (size_t d = 0; d < c.size; ++d) values[d] = narrow(v[d]);
}

float same(float x) { return x; }
uint16_t half(float x) { return float_to_half(x); }

// One channel of a full block [32], `stride` floats apart -> codes, step and offset; a channel that holds NaN or infinity becomes NaN.
void quantize_channel(const float* x, size_t stride, int8_t* codes, float& step, float& offset) {
  float low = x[0], high = x[0];
  bool finite = true;
  for (size_t s = 0; s < cache_block; ++s) {
    const float value = x[s * stride];
    low = std::min(low, value), high = std::max(high, value), finite &= std::isfinite(value);
  }
  step = (high - low) / 255.0f;
  finite &= std::isfinite(step);
  if (!finite) step = NAN;
  offset = low + 128.0f * step;
  const bool flat = !(step > 0);
  for (size_t s = 0; s < cache_block; ++s)
    codes[s * stride] = flat ? int8_t(-128) : int8_t(std::min(std::nearbyint((x[s * stride] - low) / step), 255.0f) - 128.0f);
}

void quantize_recent(const Cache& c, size_t g, size_t block) {
  const size_t n = cache_block * c.size, at = (g * c.blocks + block) * n;
  const float* recent = c.recent + 2 * g * n;
  float* steps = c.steps + (g * c.blocks + block) * 4 * c.size;
  int8_t *keys = static_cast<int8_t*>(c.keys) + at, *values = static_cast<int8_t*>(c.values) + at;
  for (size_t d = 0; d < c.size; ++d) {
    quantize_channel(recent + d * cache_block, 1, keys + d * cache_block, steps[d], steps[c.size + d]);
    quantize_channel(recent + n + d, c.size, values + d, steps[2 * c.size + d], steps[3 * c.size + d]);
  }
}

// The queries of one block of positions after the other: each sees its own block in float and the earlier ones in int8.
void attend_int8(const Cache& c, const Tokens& t) {
  const Cache recent{Kept::f32, c.groups, 1, c.size, nullptr, nullptr, nullptr, nullptr};
  for (size_t done = 0; done < t.count;) {
    const size_t start = t.start + done, count = std::min(t.count - done, cache_block - start % cache_block);
    Tokens some = t;
    some.q += done * t.q_stride, some.k += done * t.k_stride, some.v += done * t.v_stride, some.out += done * t.heads * c.size;
    some.start = start, some.count = count;
    for (size_t i = 0; i < count; ++i)
      for (size_t g = 0; g < c.groups; ++g) {
        Cache own = recent;
        own.keys = c.recent + 2 * g * cache_block * c.size, own.values = c.recent + (2 * g + 1) * cache_block * c.size;
        store_token<float, same>(own, some.k + i * t.k_stride + g * c.size, some.v + i * t.v_stride + g * c.size, 0, (start + i) % cache_block);
      }
    attend_stored(c, some);
    done += count;
    if ((start + count) % cache_block == 0) parallel_for(c.groups, [&](size_t g) { quantize_recent(c, g, start / cache_block); });
  }
}

}  // namespace

void attend(const Cache& cache, const Tokens& tokens) {
  if (cache.kept == Kept::i8) return attend_int8(cache, tokens);
  const auto store = cache.kept == Kept::f32 ? store_token<float, same> : store_token<uint16_t, half>;
  for (size_t i = 0; i < tokens.count; ++i)
    for (size_t g = 0; g < cache.groups; ++g)
      store(cache, tokens.k + i * tokens.k_stride + g * cache.size, tokens.v + i * tokens.v_stride + g * cache.size, g, tokens.start + i);
  attend_stored(cache, tokens);
}

}  // namespace polyquant
