// Norm, rotary positions and gates of a decoder layer. Attention is in attention.cpp.
#include "decoder.hpp"

#include <algorithm>
#include <cmath>

#include "lanes.hpp"
#include "threads.hpp"

namespace polyquant {
namespace {

constexpr size_t piece = size_t(1) << 15;  // floats that are worth waking a thread for

PQ_FMA double sum_of_squares(const float* x, size_t n) {
  double lanes[16] = {};
  size_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (size_t j = 0; j < 16; ++j) lanes[j] += double(x[i + j]) * double(x[i + j]);
  for (; i < n; ++i) lanes[0] += double(x[i]) * double(x[i]);
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

PQ_FMA void scale_row(const float* x, const float* weight, float* out, size_t n, float factor) {
  for (size_t i = 0; i < n; ++i) out[i] = (x[i] * factor) * weight[i];
}

PQ_FMA void turn_halves(const float* x, const float* cos, const float* sin, float* out, size_t turned) {
  for (size_t i = 0; i < turned; ++i) {
    const float a = x[i], b = x[i + turned];
    out[i] = a * cos[i] - b * sin[i];
    out[i + turned] = a * sin[i] + b * cos[i];
  }
}

PQ_FMA void turn_pairs(const float* x, const float* cos, const float* sin, float* out, size_t turned) {
  for (size_t i = 0; i < turned; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    out[2 * i] = a * cos[i] - b * sin[i];
    out[2 * i + 1] = a * sin[i] + b * cos[i];
  }
}

PQ_INLINE F8 swiglu8(F8 g, F8 up) { return g / (all8(1.0f) + exp8(-g)) * up; }

PQ_FMA void swiglu(const float* g, const float* up, float* out, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) store8(out + i, swiglu8(load8(g + i), load8(up + i)));
  if (i < n) {
    float rest[3][8] = {};
    std::copy(g + i, g + n, rest[0]);
    std::copy(up + i, up + n, rest[1]);
    store8(rest[2], swiglu8(load8(rest[0]), load8(rest[1])));
    std::copy(rest[2], rest[2] + (n - i), out + i);
  }
}

PQ_FMA void relu2(const float* g, const float* up, float* out, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const float positive = g[i] < 0 ? 0.0f : g[i];  // NaN stays NaN
    out[i] = positive * positive * up[i];
  }
}

}  // namespace

void rms_norm(const float* x, size_t stride, const float* weight, float* out, size_t rows, size_t n, double eps) {
  const size_t step = std::max<size_t>(1, piece / std::max<size_t>(1, n));
  parallel_for((rows + step - 1) / step, [=](size_t chunk) {
    for (size_t r = chunk * step; r < std::min(rows, (chunk + 1) * step); ++r) {
      const float* row = x + r * stride;
      scale_row(row, weight, out + r * n, n, float(1.0 / std::sqrt(sum_of_squares(row, n) / double(n) + eps)));
    }
  });
}

void rotate(const float* x, const float* cos, const float* sin, float* out, const Turn& turn) {
  const auto head = turn.interleaved ? turn_pairs : turn_halves;
  const size_t width = turn.heads * turn.size, step = std::max<size_t>(1, piece / std::max<size_t>(1, width));
  parallel_for((turn.tokens + step - 1) / step, [=, &turn](size_t chunk) {
    for (size_t t = chunk * step; t < std::min(turn.tokens, (chunk + 1) * step); ++t)
      for (size_t h = 0; h < turn.heads; ++h) {
        const float* from = x + t * turn.stride + h * turn.size;
        float* to = out + t * width + h * turn.size;
        head(from, cos + t * turn.turned, sin + t * turn.turned, to, turn.turned);
        std::copy(from + 2 * turn.turned, from + turn.size, to + 2 * turn.turned);
      }
  });
}

void gate(Gate which, const float* gates, const float* up, float* out, size_t n) {
  const auto kernel = which == Gate::swiglu ? swiglu : relu2;
  parallel_for((n + piece - 1) / piece, [=](size_t chunk) {
    const size_t at = chunk * piece;
    kernel(gates + at, up + at, out + at, std::min(piece, n - at));
  });
}

}  // namespace polyquant
