#include "codecs/affine.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/simd.hpp"

namespace polyquant {
namespace {

// Largest magnitude; NaN if there is one. Integers order like the floats, with NaN above infinity.
PQ_SIMD float top_of(const float* w, size_t size) {
  uint32_t top = 0;
  const uint32_t* bits = reinterpret_cast<const uint32_t*>(w);
  for (size_t i = 0; i < size; ++i) top = std::max(top, bits[i] & 0x7FFFFFFFu);
  float out;
  static_assert(sizeof out == sizeof top);
  __builtin_memcpy(&out, &top, sizeof out);
  return out;
}

// Maps floats to integers of the same order, so that the compiler may compute minima in any order. No NaN.
PQ_SIMD void span_of(const float* w, size_t size, float& low, float& high) {
  const int32_t* bits = reinterpret_cast<const int32_t*>(w);
  int32_t a = 0, b = 0;
  for (size_t i = 0; i < size; ++i) {
    const int32_t v = bits[i] ^ int32_t(uint32_t(bits[i] >> 31) >> 1);
    a = std::min(a, v);
    b = std::max(b, v);
  }
  a ^= int32_t(uint32_t(a >> 31) >> 1);
  __builtin_memcpy(&low, &a, sizeof low);
  __builtin_memcpy(&high, &b, sizeof high);
}

PQ_SIMD void encode(const float* w, size_t size, float scale, float offset, float low, float high, int8_t* codes) {
  for (size_t i = 0; i < size; ++i) {
    float q = std::rint(w[i] / scale + offset);
    q = q == q ? q : 0.0f;
    q = q < low ? low : q;
    q = q > high ? high : q;
    codes[i] = int8_t(int32_t(q));
  }
}

PQ_SIMD void decode(const int8_t* codes, size_t size, float scale, float offset, float* w) {
  for (size_t i = 0; i < size; ++i) w[i] = (float(codes[i]) - offset) * scale;
}

PQ_SIMD void decode_biased(const int8_t* codes, size_t size, float scale, float offset, float bias, float* w) {
  for (size_t i = 0; i < size; ++i) w[i] = (float(codes[i]) - offset) * scale + bias;
}

PQ_SIMD int32_t sum_of(const int8_t* codes, size_t n) {
  int32_t sum = 0;
  for (size_t i = 0; i < n; ++i) sum += codes[i];
  return sum;
}

}  // namespace

Levels levels_of(int bits, bool symmetric) {
  const float high = float((1 << (bits - 1)) - 1);
  return {symmetric ? -high : -high - 1, high, symmetric ? high : float((1 << bits) - 1), symmetric};
}

void affine_grid(const float* w, size_t groups, size_t size, Levels levels, float* scale, float* offset) {
  for (size_t g = 0; g < groups; ++g, w += size) {
    const float top = top_of(w, size);
    if (levels.symmetric || !std::isfinite(top)) {
      scale[g] = top == 0 ? 1.0f : top / levels.steps;
      offset[g] = 0;
      continue;
    }
    float low, high;
    span_of(w, size, low, high);
    scale[g] = high == low ? 1.0f : (high - low) / levels.steps;
    offset[g] = std::rint(-low / scale[g]) + levels.low;
  }
}

void affine_encode(const float* w, size_t groups, size_t size, Levels levels, const float* scale, const float* offset,
                   int8_t* codes) {
  for (size_t g = 0; g < groups; ++g)
    encode(w + g * size, size, scale[g], offset[g], levels.low, levels.high, codes + g * size);
}

void affine_decode(const int8_t* codes, size_t groups, size_t size, const float* scale, const float* offset,
                   const float* bias, float* w) {
  for (size_t g = 0; g < groups; ++g) {
    if (bias)
      decode_biased(codes + g * size, size, scale[g], offset[g], bias[g], w + g * size);
    else
      decode(codes + g * size, size, scale[g], offset[g], w + g * size);
  }
}

void row_sums(const int8_t* codes, size_t rows, size_t cols, int64_t* sums) {
  constexpr size_t step = size_t(1) << 20;  // small enough for an int32 sum
  for (size_t r = 0; r < rows; ++r) {
    sums[r] = 0;
    for (size_t i = 0; i < cols; i += step) sums[r] += sum_of(codes + r * cols + i, std::min(step, cols - i));
  }
}

bool affine_quantize(const BlockKernel& source, const uint8_t* data, size_t rows, size_t cols, size_t groups,
                     Levels levels, int8_t* codes, float* scale, float* offset, ErrorSums* errors) {
  thread_local std::vector<float> room;
  room.resize(2 * cols);
  float *row = room.data(), *back = row + cols;
  const size_t size = cols / groups;
  for (size_t r = 0; r < rows; ++r, codes += cols, scale += groups, offset += groups) {
    source.dequantize(data + r * cols * size_t(source.bytes), row, cols);
    affine_grid(row, groups, size, levels, scale, offset);
    for (size_t g = 0; g < groups; ++g)
      if (!std::isfinite(scale[g])) return false;
    affine_encode(row, groups, size, levels, scale, offset, codes);
    if (!errors) continue;
    affine_decode(codes, groups, size, scale, offset, nullptr, back);
    const ErrorSums e = error_sums(row, back, cols);
    *errors = {errors->aa + e.aa, errors->bb + e.bb, errors->ab + e.ab, errors->dd + e.dd,
               std::max(errors->worst, e.worst)};
  }
  return true;
}

}  // namespace polyquant
