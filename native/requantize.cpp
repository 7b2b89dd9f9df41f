#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "blocks.hpp"
#include "metrics.hpp"

namespace polyquant {

constexpr size_t kInCache = 16 << 10;  // floats of a few rows, before and after

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

}  // namespace polyquant
