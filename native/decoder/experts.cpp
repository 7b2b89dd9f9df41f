#include "decoder/experts.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/lanes.hpp"
#include "base/threads.hpp"

namespace polyquant {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr size_t piece = size_t(1) << 15;  // minimum number of floats to wake a thread for

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

float ordered(float x) { return std::isnan(x) ? kNone : x; }

// The `count` largest of n, largest first; -infinity comes last, the lowest index first among equals.
void best(const float* values, size_t n, size_t count, int32_t* out) {
  for (size_t j = 0; j < count; ++j) {
    size_t found = n;
    for (size_t i = 0; i < n; ++i) {
      if (found < n && !(values[i] > values[found])) continue;
      if (std::find(out, out + j, int32_t(i)) == out + j) found = i;
    }
    out[j] = int32_t(found);
  }
}

// Scratch memory of one token.
struct Room {
  std::vector<float> scores, choice, groups;
  std::vector<int32_t> used;
};

void route_token(const float* logits, size_t n, const float* bias, const Routing& how, Room& room, int32_t* ids,
                 float* weights) {
  auto& [scores, choice, groups, used] = room;
  scores.resize(n), choice.resize(n), groups.resize(how.groups), used.resize(how.groups_used);
  for (size_t i = 0; i < n; ++i) choice[i] = ordered(logits[i]);
  const auto softmax = [&](const auto& at, size_t count, float* out) {
    float top = kNone;
    for (size_t i = 0; i < count; ++i) top = std::max(top, ordered(logits[at(i)]));
    double sum = 0;
    for (size_t i = 0; i < count; ++i) sum += std::exp(double(logits[at(i)]) - double(top));
    for (size_t i = 0; i < count; ++i) out[i] = float(std::exp(double(logits[at(i)]) - double(top)) / sum);
  };
  if (how.scores == Scores::softmax) softmax([](size_t i) { return i; }, n, scores.data());
  if (how.scores == Scores::sigmoid)
    for (size_t i = 0; i < n; ++i) scores[i] = float(sigmoid(logits[i]));
  if (how.scores == Scores::softmax_of_chosen) std::copy_n(logits, n, scores.data());

  // Scores increase with logits: without a bias, logits distinguish scores that rounding makes equal.
  const bool plain = !bias && !how.pairs;
  if (!plain)
    for (size_t i = 0; i < n; ++i) choice[i] = ordered(bias ? scores[i] + bias[i] : scores[i]);
  if (how.groups > 1) {
    const size_t size = n / how.groups;
    for (size_t g = 0; g < how.groups; ++g) {
      float first = kNone, second = kNone;
      for (size_t i = g * size; i < (g + 1) * size; ++i)
        if (choice[i] > first)
          second = first, first = choice[i];
        else
          second = std::max(second, choice[i]);
      groups[g] = ordered(how.pairs ? first + second : first);
    }
    best(groups.data(), how.groups, how.groups_used, used.data());
    for (size_t g = 0; g < how.groups; ++g)
      if (std::find(used.begin(), used.end(), int32_t(g)) == used.end())
        std::fill_n(choice.data() + g * size, size, kNone);
  }
  best(choice.data(), n, how.used, ids);
  if (how.scores == Scores::softmax_of_chosen)
    softmax([ids](size_t i) { return size_t(ids[i]); }, how.used, weights);
  else
    for (size_t j = 0; j < how.used; ++j) weights[j] = scores[size_t(ids[j])];
  double sum = 0;
  for (size_t j = 0; j < how.used; ++j) sum += double(weights[j]);
  const double least = sum < how.least ? how.least : sum;
  for (size_t j = 0; j < how.used; ++j)
    weights[j] = float((how.norm ? double(weights[j]) / (least + how.eps) : double(weights[j])) * how.scale);
}

template <class F>
void rows_in_parallel(size_t rows, size_t n, const F& work) {
  const size_t step = std::max<size_t>(1, piece / std::max<size_t>(1, n));
  parallel_for((rows + step - 1) / step, [&](size_t chunk) {
    for (size_t r = chunk * step; r < std::min(rows, (chunk + 1) * step); ++r) work(r);
  });
}

Wide clamped(Wide gate, Wide up, float alpha, float limit) {
  gate = gate > limit ? all(limit) : gate;
  up = up > limit ? all(limit) : up < -limit ? all(-limit) : up;
  return gate / (1.0f + exponential(gate * -alpha)) * (up + 1.0f);
}

}  // namespace

void route(const float* logits, size_t tokens, size_t experts, const float* bias, const Routing& how, int32_t* ids,
           float* weights) {
  constexpr size_t step = 16;
  parallel_for((tokens + step - 1) / step, [=, &how](size_t chunk) {
    thread_local Room room;
    for (size_t t = chunk * step; t < std::min(tokens, (chunk + 1) * step); ++t)
      route_token(logits + t * experts, experts, bias, how, room, ids + t * how.used, weights + t * how.used);
  });
}

PQ_SIMD static void combine_row(const float* y, const float* weights, float* out, size_t used, size_t n) {
  const float first = weights ? weights[0] : 1.0f;
  for (size_t i = 0; i < n; ++i) out[i] = first * y[i];
  for (size_t j = 1; j < used; ++j) {
    const float w = weights ? weights[j] : 1.0f;
    for (size_t i = 0; i < n; ++i) out[i] += w * y[j * n + i];
  }
}

void combine(const float* y, const float* weights, float* out, size_t tokens, size_t used, size_t n) {
  rows_in_parallel(tokens, used * n, [=](size_t t) {
    combine_row(y + t * used * n, weights ? weights + t * used : nullptr, out + t * n, used, n);
  });
}

void spread(const float* x, const float* weights, float* out, size_t tokens, size_t used, size_t n) {
  rows_in_parallel(tokens * used, n, [=](size_t a) {
    const float* from = x + a / used * n;
    for (size_t i = 0; i < n; ++i) out[a * n + i] = weights[a] * from[i];
  });
}

void add_expert_bias(float* y, size_t stride, const float* bias, size_t experts, const int32_t* ids, size_t assignments,
                     size_t n) {
  rows_in_parallel(assignments, n, [=](size_t a) {
    if (ids[a] < 0 || size_t(ids[a]) >= experts) return;
    const float* b = bias + size_t(ids[a]) * n;
    for (size_t i = 0; i < n; ++i) y[a * stride + i] += b[i];
  });
}

void add_gated(const float* y, const float* x, const float* gate, float* out, size_t rows, size_t n) {
  rows_in_parallel(rows, n, [=](size_t r) {
    const float share = float(sigmoid(gate[r]));
    for (size_t i = r * n; i < (r + 1) * n; ++i) out[i] = y[i] + share * x[i];
  });
}

void clamped_swiglu(Grid2 gate, Grid2 up, float* out, size_t rows, size_t n, float alpha, float limit) {
  rows_in_parallel(rows, n, [=](size_t r) {
    for (size_t i = 0; i < n; i += kWide) {
      float g[kWide] = {}, u[kWide] = {}, h[kWide];
      const size_t count = std::min(size_t(kWide), n - i);
      for (size_t l = 0; l < count; ++l) {
        g[l] = gate.data[int64_t(r) * gate.row + int64_t(i + l) * gate.column];
        u[l] = up.data[int64_t(r) * up.row + int64_t(i + l) * up.column];
      }
      put(h, clamped(take(g), take(u), alpha, limit));
      std::copy_n(h, count, out + r * n + i);
    }
  });
}

}  // namespace polyquant
