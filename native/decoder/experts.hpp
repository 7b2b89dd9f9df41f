// Mixture of experts, except its matrices: routing and combination. The reference is src/polyquant/ops/experts.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace polyquant {

enum class Scores { softmax, sigmoid, softmax_of_chosen };

struct Routing {
  Scores scores;
  size_t used;
  bool norm;  // weights are divided by max(their sum, least) + eps
  double eps, least, scale;
  size_t groups, groups_used;
  bool pairs;  // a group's score is the sum of its two best, otherwise its best
};

// logits [tokens, experts], bias [experts] or null -> ids, weights [tokens, used]: best first, lower index first among
// equals.
// used <= experts; groups divide experts; the selected groups hold at least `used` experts.
void route(const float* logits, size_t tokens, size_t experts, const float* bias, const Routing& how, int32_t* ids,
           float* weights);

// A = tokens * used assignments. combine: out[t] = sum over j of weights[t, j] * y[t * used + j], weights null for
// ones;
// spread: out[t * used + j] = weights[t, j] * x[t].
void combine(const float* y, const float* weights, float* out, size_t tokens, size_t used, size_t n);
void spread(const float* x, const float* weights, float* out, size_t tokens, size_t used, size_t n);

// y[a] += bias[ids[a]], y [A, n] with a row stride in floats, bias [experts, n]; unchanged if ids[a] is out of range.
void add_expert_bias(float* y, size_t stride, const float* bias, size_t experts, const int32_t* ids, size_t assignments,
                     size_t n);

// out[t] = y[t] + sigmoid(gate[t]) * x[t]
void add_gated(const float* y, const float* x, const float* gate, float* out, size_t rows, size_t n);

// A two-dimensional array with any strides.
struct Grid2 {
  const float* data;
  int64_t row, column;
};
// (min(up, limit) >= -limit, + 1) * g * sigmoid(alpha * g), g = min(gate, limit) -> out [rows, n]
void clamped_swiglu(Grid2 gate, Grid2 up, float* out, size_t rows, size_t n, float alpha, float limit);

}  // namespace polyquant
