// What a decoder layer does between its matrices, on float32 rows. Drawn in src/polyquant/ops/decoder.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace polyquant {

// x [rows, n], stride floats from row to row -> out [rows, n].
void rms_norm(const float* x, size_t stride, const float* weight, float* out, size_t rows, size_t n, double eps);

// The same for (x - mean) / sqrt(variance + eps) * weight + bias; bias may be null.
void layer_norm(const float* x, size_t stride, const float* weight, const float* bias, float* out, size_t rows, size_t n, double eps);

// x [tokens, heads, size], stride floats from token to token; cos, sin [tokens, turned] -> out [tokens, heads, size].
struct Turn {
  size_t tokens, heads, size, turned, stride;
  bool interleaved;
};
void rotate(const float* x, const float* cos, const float* sin, float* out, const Turn& turn);

// out = f(gates) * up, or f(gates) where up is null.
enum class Activation { silu, relu2, gelu, gelu_tanh, relu };
inline constexpr int activations = 5;
void gate(Activation which, const float* gates, const float* up, float* out, size_t n);

// x > 0: positive x^2 + beta x, else negative (e^min(x, eps) - 1 - x) + beta x
struct Xielu {
  float positive, negative, beta, eps;
};
void xielu(const float* x, float* out, size_t n, const Xielu& how);

// out [rows, n] = x + y * scale, each with its own stride from row to row; 0 for one row that serves all. out may be x.
void add(const float* x, size_t x_stride, const float* y, size_t y_stride, float* out, size_t out_stride, size_t rows, size_t n,
         float scale = 1.0f);

// Numbers that lie on given levels, (q - offset) * step with q = clamp(round(x / step + offset), -128, 127): x [rows, n], stride floats from row to
// row; step, offset [n] -> out [rows, n]. NaN stays.
void on_grid(const float* x, size_t stride, const float* step, const float* offset, float* out, size_t rows, size_t n);

inline constexpr size_t cache_block = 32;  // positions of a block of the cache

enum class Kept { f32, f16, i8 };

// keys [groups, blocks, size, 32], values [groups, blocks, 32, size] of that kind. int8 only: steps float32 [groups, blocks, 4, size] (step and
// offset of the keys' channels, then of the values'), recent float32 [groups, 2, 32 * size] (keys and values of the block under way).
// grid: null, or float32 [groups, 4, size], levels that are known beforehand, as for on_grid: what comes is rounded to them at once.
struct Cache {
  Kept kept;
  size_t groups, blocks, size;
  void* keys;
  void* values;
  float* steps;
  float* recent;
  const float* grid = nullptr;
};

// q [count, heads, size], k and v [count, groups, size] at positions start ...; strides: floats from token to token. What is done to scores, in this order:
// softcap tanh(score / softcap) unless it is 0; slopes[head] (key's position - query's) is added; sinks[head] is one more score, of no value. Null for none.
// A query sees the last `window` positions, and of these those from the last multiple of `chunk` on; 0 for all.
struct Tokens {
  const float *q, *k, *v;
  size_t q_stride, k_stride, v_stride, count, heads, start, window;
  float scale;
  float* out;
  float softcap = 0;
  const float* slopes = nullptr;
  const float* sinks = nullptr;
  size_t chunk = 0;

  // The first position that the query at `position` sees.
  size_t first_seen(size_t position) const {
    const size_t begin = chunk ? position - position % chunk : 0, last = window && position >= window ? position + 1 - window : 0;
    return begin > last ? begin : last;
  }
};

// Stores k, v and writes the attention of each query to out [count, heads, size]. Room for start + count positions; heads a multiple of groups.
void attend(const Cache& cache, const Tokens& tokens);

}  // namespace polyquant
