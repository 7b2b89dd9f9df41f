// Operations of a decoder layer between its matrices, on float32 rows. The reference is src/polyquant/ops/decoder.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace polyquant {

// x [rows, n], with a row stride in floats -> out [rows, n].
void rms_norm(const float* x, size_t stride, const float* weight, float* out, size_t rows, size_t n, double eps);

// As rms_norm, for (x - mean) / sqrt(variance + eps) * weight + bias; bias may be null.
void layer_norm(const float* x, size_t stride, const float* weight, const float* bias, float* out, size_t rows,
                size_t n, double eps);

// x [tokens, heads, size], with a token stride in floats; cos, sin [tokens, pairs] -> out [tokens, heads, size].
struct Rotation {
  size_t tokens, heads, size, pairs, stride;
  bool interleaved;
};
void rotate(const float* x, const float* cos, const float* sin, float* out, const Rotation& rotation);

// out = f(gates) * up, or f(gates) if up is null.
enum class Activation { silu, relu2, gelu, gelu_tanh, relu };
inline constexpr int activations = 5;
void gate(Activation which, const float* gates, const float* up, float* out, size_t n);

// x > 0: positive x^2 + beta x, else negative (e^min(x, eps) - 1 - x) + beta x
struct Xielu {
  float positive, negative, beta, eps;
};
void xielu(const float* x, float* out, size_t n, const Xielu& how);

// out [rows, n] = x + y * scale, each with its own row stride; 0 to broadcast a row. out may alias x.
void add(const float* x, size_t x_stride, const float* y, size_t y_stride, float* out, size_t out_stride, size_t rows,
         size_t n, float scale = 1.0f);

// Rounds to a grid: (q - offset) * step with q = clamp(round(x / step + offset), -128, 127). x [rows, n], with a row
// stride in floats; step, offset [n] -> out [rows, n]. NaN is preserved.
void on_grid(const float* x, size_t stride, const float* step, const float* offset, float* out, size_t rows, size_t n);

inline constexpr size_t cache_block = 32;  // positions per block of the cache

enum class Kept { f32, f16, i8 };

// keys [groups, blocks, size, 32], values [groups, blocks, 32, size] of that type. int8 only: steps float32
// [groups, blocks, 4, size] (step and offset of the key channels, then of the value channels), recent float32
// [groups, 2, 32 * size] (keys and values of the current block). grid: null, or float32 [groups, 4, size], a grid known
// in
// advance, as for on_grid: inputs are rounded to it immediately.
struct Cache {
  Kept kept;
  size_t groups, blocks, size;
  void* keys;
  void* values;
  float* steps;
  float* recent;
  const float* grid = nullptr;
};

// q [count, heads, size], k and v [count, groups, size] at positions start ...; strides: floats per token.
// Transformations of the scores, in this order: softcap tanh(score / softcap) unless it is 0; slopes[head] (key
// position -
// query position) is added; sinks[head] is an extra score without a value. Null for none.
// A query attends to the last `window` positions, and of these to those from the last multiple of `chunk` on; 0 for
// all.
struct Tokens {
  const float *q, *k, *v;
  size_t q_stride, k_stride, v_stride, count, heads, start, window;
  float scale;
  float* out;
  float softcap = 0;
  const float* slopes = nullptr;
  const float* sinks = nullptr;
  size_t chunk = 0;

  // The first position that the query at `position` attends to.
  size_t first_seen(size_t position) const {
    const size_t begin = chunk ? position - position % chunk : 0,
                 last = window && position >= window ? position + 1 - window : 0;
    return begin > last ? begin : last;
  }
};

// Stores k, v and writes the attention of each query to out [count, heads, size]. Requires room for start + count
// positions;
// heads a multiple of groups.
void attend(const Cache& cache, const Tokens& tokens);

}  // namespace polyquant
