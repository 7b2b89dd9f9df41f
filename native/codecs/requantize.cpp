#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "codecs/blocks.hpp"
#include "codecs/metrics.hpp"

namespace polyquant {

constexpr size_t kInCache = 16 << 10;  // floats of a few rows, before and after
constexpr size_t kFewWeights = 2048;   // of one side: the floats of both sides stay in the first cache

bool requantize(const BlockKernel& source, const BlockKernel& target, const uint8_t* data, size_t rows, size_t cols,
                const float* importance, uint8_t* out, ErrorSums* errors) {
  const size_t whole = 512 / std::gcd(cols, size_t(512));  // as many rows as fill stretches of add_errors
  const size_t step = std::max(whole, kInCache / cols / whole * whole);
  const size_t in_bytes = cols / size_t(source.weights) * size_t(source.bytes);
  const size_t out_bytes = cols / size_t(target.weights) * size_t(target.bytes);
  thread_local std::vector<float> room;
  room.resize(2 * std::min(step, rows) * cols);
  for (size_t r = 0; r < rows; r += step) {
    const size_t n = std::min(step, rows - r);
    float *weights = room.data(), *back = weights + n * cols;
    source.dequantize(data + r * in_bytes, weights, n * cols / size_t(source.weights));
    target.quantize(weights, out + r * out_bytes, n, cols, importance);
    if (!errors) {
      if (!std::all_of(weights, back, [](float x) { return std::isfinite(x); })) return false;
      continue;
    }
    target.dequantize(out + r * out_bytes, back, n * cols / size_t(target.weights));
    add_errors(weights, back, n * cols, *errors);
    if (!std::isfinite(errors->aa + errors->bb)) return false;
  }
  return true;
}

ErrorSums stored_errors(const BlockKernel& a, const BlockKernel& b, const uint8_t* data_a, const uint8_t* data_b,
                        size_t count) {
  const size_t whole = std::lcm(std::lcm(size_t(a.weights), size_t(b.weights)), size_t(512));
  const size_t step = std::max(whole, kFewWeights / whole * whole);
  thread_local std::vector<float> room;
  room.resize(2 * std::min(step, count));
  ErrorSums sums{};
  for (size_t i = 0; i < count; i += step) {
    const size_t n = std::min(step, count - i), blocks_a = n / size_t(a.weights), blocks_b = n / size_t(b.weights);
    float *x = room.data(), *y = x + n;
    a.dequantize(data_a, x, blocks_a);
    b.dequantize(data_b, y, blocks_b);
    add_errors(x, y, n, sums);
    data_a += blocks_a * size_t(a.bytes), data_b += blocks_b * size_t(b.bytes);
  }
  return sums;
}

void stored_unit_errors(const BlockKernel& a, const BlockKernel& b, const uint8_t* data_a, const uint8_t* data_b,
                        size_t units, size_t unit, float* out) {
  const size_t step = std::max<size_t>(1, kFewWeights / unit);
  thread_local std::vector<float> room;
  room.resize(2 * std::min(step, units) * unit);
  for (size_t u = 0; u < units; u += step) {
    const size_t n = std::min(step, units - u), blocks_a = n * unit / size_t(a.weights),
                 blocks_b = n * unit / size_t(b.weights);
    float *x = room.data(), *y = x + n * unit;
    a.dequantize(data_a, x, blocks_a);
    b.dequantize(data_b, y, blocks_b);
    unit_errors(x, y, n, unit, out + u, units);
    data_a += blocks_a * size_t(a.bytes), data_b += blocks_b * size_t(b.bytes);
  }
}

}  // namespace polyquant
