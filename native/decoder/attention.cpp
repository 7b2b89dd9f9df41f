// Causal attention over a cache of blocks of 32 positions, with online softmax (Milakov & Gimelshein 2018; Dao et al.
// 2022).
//
// A piece is a kv head, some queries and some blocks. Its rows are the query heads that read this kv head: [R, size].
// For
// each block
//   scores[R, 32] = rows[R, size] keys[size, 32]       largest, sum: running values of each row
//   weights = exp(scores - largest)
//   out[R, size] = out * exp(previous largest - largest) + weights[R, 32] values[32, size]
// Keys are stored channel by channel, so both products are the same small matrix product with contiguous right
// operands.
#include <algorithm>
#include <cmath>
#include <vector>

#include "base/half.hpp"
#include "base/threads.hpp"
#include "decoder/set.hpp"

namespace polyquant {
namespace {

constexpr size_t rows_at_once = 64;    // rows, scores and sums fit the inner caches
constexpr size_t blocks_at_once = 16;  // of a long sequence, for one query

// Combines the sums of all pieces of the same queries (contiguous in memory), divides, and writes the result.
void finish(const Tokens& t, const Piece& p, const Sums& sums, size_t parts, size_t stride, size_t shared,
            size_t size) {
  const size_t rows = p.count * shared;
  for (size_t r = 0; r < rows; ++r) {
    float* to = t.out + ((p.token + r / shared) * t.heads + p.group * shared + r % shared) * size;
    float largest = t.sinks ? t.sinks[p.group * shared + r % shared] : -INFINITY;
    const float sink = largest;
    for (size_t i = 0; i < parts; ++i) largest = std::max(largest, sums.largest[i * stride + r]);
    float total = t.sinks ? std::exp(sink - largest) : 0.0f;
    std::fill_n(to, size, 0.0f);
    for (size_t i = 0; i < parts; ++i) {
      const float *out = sums.out + i * stride + r * size,
                  fade = parts == 1 && !t.sinks ? 1.0f : std::exp(sums.largest[i * stride + r] - largest);
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
  const size_t oldest = t.first_seen(t.start) / cache_block;
  const size_t blocks = (t.start + t.count + cache_block - 1) / cache_block - oldest;
  const size_t parts = runs > 1 ? 1 : (blocks + blocks_at_once - 1) / blocks_at_once;
  std::vector<float> shares(parts > 1 ? c.groups * parts * need : 0);
  const auto sums_at = [=](float* p) { return Sums{p, p + rows, p + 2 * rows}; };
  const auto piece_at = [&](size_t group, size_t run, size_t part) {
    const size_t token = run * most, count = std::min(most, t.count - token), first = t.start + token,
                 last = first + count - 1;
    const size_t begin = t.first_seen(first) / cache_block, end = last / cache_block + 1;
    if (parts == 1) return Piece{group, token, count, begin, end};
    return Piece{group, token, count, begin + part * blocks_at_once,
                 std::min(end, begin + (part + 1) * blocks_at_once)};
  };
  parallel_for(c.groups * runs * parts, [&](size_t chunk) {
    // The last queries attend to most positions: they go first, to balance the threads.
    const Piece p = piece_at(chunk % c.groups, runs - 1 - chunk / c.groups / parts, chunk / c.groups % parts);
    thread_local std::vector<float> scratch;
    const size_t own = rows * (size + blocks_together * cache_block) + cache_block * size;
    if (scratch.size() < own + need) scratch.resize(own + need);
    const Sums sums =
        sums_at(parts > 1 ? shares.data() + (p.group * parts + chunk / c.groups % parts) * need : scratch.data() + own);
    decoder_set().attend_piece(c, t, p, scratch.data(), sums);
    if (parts == 1) finish(t, p, sums, 1, need, shared, size);
  });
  for (size_t g = 0; parts > 1 && g < c.groups; ++g)
    finish(t, piece_at(g, 0, 0), sums_at(shares.data() + g * parts * need), parts, need, shared, size);
}

// Stores k, v of one token in the blocks of kv head g, as floats or halves.
template <class T, T (*narrow)(float)>
void store_token(const Cache& c, const float* k, const float* v, size_t g, size_t position) {
  const size_t at = (g * c.blocks + position / cache_block) * cache_block * c.size, s = position % cache_block;
  T *keys = static_cast<T*>(c.keys) + at, *values = static_cast<T*>(c.values) + at + s * c.size;
  for (size_t d = 0; d < c.size; ++d) keys[d * cache_block + s] = narrow(k[d]);
  for (size_t d = 0; d < c.size; ++d) values[d] = narrow(v[d]);
}

float same(float x) { return x; }
uint16_t half(float x) { return float_to_half(x); }

// Quantizes one channel of a full block [32], with a stride; a channel that holds NaN or infinity becomes NaN.
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
    codes[s * stride] =
        flat ? int8_t(-128) : int8_t(std::min(std::nearbyint((x[s * stride] - low) / step), 255.0f) - 128.0f);
}

// Computes the codes of a channel that is on a given grid.
void take_codes(const float* x, size_t stride, int8_t* codes, float given, float level, float& step, float& offset) {
  step = given;
  offset = -level * given;
  for (size_t s = 0; s < cache_block; ++s) {
    const float q = std::nearbyint(x[s * stride] / given + level);
    codes[s * stride] = int8_t(q == q ? std::clamp(q, -128.0f, 127.0f) : 0.0f);
  }
}

void quantize_recent(const Cache& c, size_t g, size_t block) {
  const size_t n = cache_block * c.size, at = (g * c.blocks + block) * n;
  const float* recent = c.recent + 2 * g * n;
  float* steps = c.steps + (g * c.blocks + block) * 4 * c.size;
  int8_t *keys = static_cast<int8_t*>(c.keys) + at, *values = static_cast<int8_t*>(c.values) + at;
  if (c.grid) {
    const float* grid = c.grid + g * 4 * c.size;
    for (size_t d = 0; d < c.size; ++d) {
      take_codes(recent + d * cache_block, 1, keys + d * cache_block, grid[d], grid[c.size + d], steps[d],
                 steps[c.size + d]);
      take_codes(recent + n + d, c.size, values + d, grid[2 * c.size + d], grid[3 * c.size + d], steps[2 * c.size + d],
                 steps[3 * c.size + d]);
    }
    return;
  }
  for (size_t d = 0; d < c.size; ++d) {
    quantize_channel(recent + d * cache_block, 1, keys + d * cache_block, steps[d], steps[c.size + d]);
    quantize_channel(recent + n + d, c.size, values + d, steps[2 * c.size + d], steps[3 * c.size + d]);
  }
}

// Processes the queries block by block: each attends to its own block in float and to earlier ones in int8.
void attend_int8(const Cache& c, const Tokens& t) {
  const Cache recent{Kept::f32, c.groups, 1, c.size, nullptr, nullptr, nullptr, nullptr};
  std::vector<float> level(c.grid ? 2 * c.size : 0);
  for (size_t done = 0; done < t.count;) {
    const size_t start = t.start + done, count = std::min(t.count - done, cache_block - start % cache_block);
    Tokens some = t;
    some.q += done * t.q_stride, some.k += done * t.k_stride, some.v += done * t.v_stride,
        some.out += done * t.heads * c.size;
    some.start = start, some.count = count;
    for (size_t i = 0; i < count; ++i)
      for (size_t g = 0; g < c.groups; ++g) {
        Cache own = recent;
        own.keys = c.recent + 2 * g * cache_block * c.size, own.values = c.recent + (2 * g + 1) * cache_block * c.size;
        const float *k = some.k + i * t.k_stride + g * c.size, *v = some.v + i * t.v_stride + g * c.size;
        if (c.grid) {
          const float* grid = c.grid + g * 4 * c.size;
          on_grid(k, c.size, grid, grid + c.size, level.data(), 1, c.size);
          on_grid(v, c.size, grid + 2 * c.size, grid + 3 * c.size, level.data() + c.size, 1, c.size);
          k = level.data(), v = level.data() + c.size;
        }
        store_token<float, same>(own, k, v, 0, (start + i) % cache_block);
      }
    attend_stored(c, some);
    done += count;
    if ((start + count) % cache_block == 0)
      parallel_for(c.groups, [&](size_t g) { quantize_recent(c, g, start / cache_block); });
  }
}

}  // namespace

void attend(const Cache& cache, const Tokens& tokens) {
  if (cache.kept == Kept::i8) return attend_int8(cache, tokens);
  const auto store = cache.kept == Kept::f32 ? store_token<float, same> : store_token<uint16_t, half>;
  for (size_t i = 0; i < tokens.count; ++i)
    for (size_t g = 0; g < cache.groups; ++g)
      store(cache, tokens.k + i * tokens.k_stride + g * cache.size, tokens.v + i * tokens.v_stride + g * cache.size, g,
            tokens.start + i);
  attend_stored(cache, tokens);
}

}  // namespace polyquant
