#include "codecs/float_streams.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/simd.hpp"

namespace polyquant {
namespace {

constexpr size_t kLanes = 16;  // partial sums of an error; the reference adds in the same order

PQ_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

PQ_INLINE float float_of(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

constexpr float power(int exponent) {
  float x = 1;
  for (; exponent > 0; --exponent) x *= 2;
  for (; exponent < 0; ++exponent) x /= 2;
  return x;
}

// The float nearest to x with M mantissa bits; `code` without a sign, `back` its magnitude.
template <int M, int kBias, uint32_t kTop>
PQ_INLINE void nearest(float x, uint32_t& code, float& back) {
  constexpr int kDrop = 23 - M;
  constexpr float kSteps = power(kBias - 1 + M), kSmall = power(1 - kBias), kMost = power(M);
  constexpr float kTopValue = power(int(kTop >> M) - kBias) * (1.0f + float(kTop & ((1u << M) - 1)) / float(1u << M));
  const uint32_t magnitude = bits_of(x) & 0x7FFFFFFFu;
  const uint32_t up = magnitude + ((1u << kDrop) / 2 - 1) + (magnitude >> kDrop & 1u);
  const int32_t normal = std::min(int32_t(up >> kDrop) - int32_t((127 - kBias) << M), int32_t(kTop));
  const float normal_back = std::min(float_of(up >> kDrop << kDrop), kTopValue);
  const float counted = std::min(float_of(magnitude) * kSteps, kMost);
  const float small = (counted + 8388608.0f) - 8388608.0f;  // ties to even
  const bool is_small = float_of(magnitude) < kSmall;
  code = uint32_t(is_small ? int32_t(small) : normal);
  back = is_small ? small * (1.0f / kSteps) : normal_back;
}

template <int M, int kBias, uint32_t kTop, int kBits>
PQ_INLINE void encode(const float* w, size_t size, float scale, uint8_t* codes) {
  for (size_t i = 0; i < size; ++i) {
    const float x = scale > 0 ? w[i] / scale : 0.0f * w[i];
    uint32_t code;
    float back;
    nearest<M, kBias, kTop>(x, code, back);
    codes[i] = uint8_t(code | bits_of(x) >> 31 << (kBits - 1));
  }
}

template <int M, int kBias, uint32_t kTop>
PQ_INLINE float weighted_error(float w, float scale, float weight) {
  const float x = scale > 0 ? w / scale : 0.0f;
  uint32_t code;
  float back;
  nearest<M, kBias, kTop>(x, code, back);
  const float error = back * scale - std::fabs(w);
  return error * error * weight;
}

template <int M, int kBias, uint32_t kTop>
PQ_INLINE float error(const float* w, size_t size, float scale, const float* weights) {
  float lanes[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    PQ_LOOP
    for (size_t j = 0; j < kLanes; ++j) lanes[j] += weighted_error<M, kBias, kTop>(w[i + j], scale, weights[i + j]);
  }
  for (size_t j = 0; i + j < size; ++j) lanes[j] += weighted_error<M, kBias, kTop>(w[i + j], scale, weights[i + j]);
  for (size_t half = kLanes / 2; half; half /= 2)
    for (size_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  return lanes[0];
}

PQ_SIMD void encode_e2m1(const float* w, size_t size, float scale, uint8_t* codes) {
  encode<1, 1, 0x7, 4>(w, size, scale, codes);
}
PQ_SIMD void encode_e4m3(const float* w, size_t size, float scale, uint8_t* codes) {
  encode<3, 7, 0x7E, 8>(w, size, scale, codes);
}
PQ_SIMD void encode_e5m2(const float* w, size_t size, float scale, uint8_t* codes) {
  encode<2, 15, 0x7B, 8>(w, size, scale, codes);
}
PQ_SIMD float error_e2m1(const float* w, size_t size, float scale, const float* weights) {
  return error<1, 1, 0x7>(w, size, scale, weights);
}
PQ_SIMD float error_e4m3(const float* w, size_t size, float scale, const float* weights) {
  return error<3, 7, 0x7E>(w, size, scale, weights);
}
PQ_SIMD float error_e5m2(const float* w, size_t size, float scale, const float* weights) {
  return error<2, 15, 0x7B>(w, size, scale, weights);
}

PQ_SIMD float top_of(const float* w, size_t size) {
  uint32_t top = 0;
  const uint32_t* bits = reinterpret_cast<const uint32_t*>(w);
  for (size_t i = 0; i < size; ++i) top = std::max(top, bits[i] & 0x7FFFFFFFu);
  return float_of(top);
}

PQ_SIMD void decode(const uint8_t* codes, size_t size, const float* table, float scale, float* w) {
  for (size_t i = 0; i < size; ++i) w[i] = table[codes[i]] * scale;
}

// Halves of a group: byte 2 i of the output has the low nibbles of bytes i and i + n, byte 2 i + 1 their high nibbles.
template <size_t n>
PQ_INLINE void interleave(const uint8_t* in, uint8_t* out) {
  PQ_LOOP
  for (size_t i = 0; i < n; ++i) {
    const uint8_t a = in[i], b = in[i + n];
    out[2 * i] = uint8_t((a & 15) | b << 4);
    out[2 * i + 1] = uint8_t(a >> 4 | (b & 0xF0));
  }
}

template <size_t n>
PQ_INLINE void separate(const uint8_t* in, uint8_t* out) {
  PQ_LOOP
  for (size_t i = 0; i < n; ++i) {
    const uint8_t a = in[2 * i], b = in[2 * i + 1];
    out[i] = uint8_t((a & 15) | b << 4);
    out[i + n] = uint8_t(a >> 4 | (b & 0xF0));
  }
}

template <size_t n>
PQ_INLINE void join_all(const uint8_t* pairs, const uint8_t* scales, size_t groups, size_t together, uint8_t* blocks) {
  for (size_t g = 0; g < groups; g += together) {
    for (size_t i = 0; i < together; ++i) *blocks++ = *scales++;
    for (size_t i = 0; i < together; ++i, pairs += 2 * n, blocks += 2 * n) interleave<n>(pairs, blocks);
  }
}

template <size_t n>
PQ_INLINE void split_all(const uint8_t* blocks, size_t groups, size_t together, uint8_t* pairs, uint8_t* scales) {
  for (size_t g = 0; g < groups; g += together) {
    for (size_t i = 0; i < together; ++i) *scales++ = *blocks++;
    for (size_t i = 0; i < together; ++i, pairs += 2 * n, blocks += 2 * n) separate<n>(blocks, pairs);
  }
}

PQ_SIMD void join_32(const uint8_t* pairs, const uint8_t* scales, size_t groups, size_t together, uint8_t* blocks) {
  join_all<8>(pairs, scales, groups, together, blocks);
}
PQ_SIMD void join_16(const uint8_t* pairs, const uint8_t* scales, size_t groups, size_t together, uint8_t* blocks) {
  join_all<4>(pairs, scales, groups, together, blocks);
}
PQ_SIMD void split_32(const uint8_t* blocks, size_t groups, size_t together, uint8_t* pairs, uint8_t* scales) {
  split_all<8>(blocks, groups, together, pairs, scales);
}
PQ_SIMD void split_16(const uint8_t* blocks, size_t groups, size_t together, uint8_t* pairs, uint8_t* scales) {
  split_all<4>(blocks, groups, together, pairs, scales);
}

}  // namespace

void decode_small(const uint8_t* codes, size_t rows, size_t cols, const float* table, const float* scale,
                  const BlockGrid& grid, float* w) {
  const size_t wide = grid.wide ? grid.wide : cols;
  for (size_t r = 0; r < rows; ++r) {
    const float* row = scale + (grid.high ? (grid.start + r) / grid.high : 0) * grid.scale_cols;
    for (size_t c = 0, g = 0; c < cols; c += wide, ++g)
      decode(codes + r * cols + c, std::min(wide, cols - c), table, row[g], w + r * cols + c);
  }
}

void amax_groups(const float* w, size_t rows, size_t cols, size_t group, float* out) {
  for (size_t r = 0; r < rows; ++r)
    for (size_t c = 0; c < cols; c += group) *out++ = top_of(w + r * cols + c, std::min(group, cols - c));
}

void encode_small(SmallFloat kind, const float* w, size_t rows, size_t cols, const float* scale, size_t group,
                  uint8_t* codes) {
  const auto run = kind == SmallFloat::e2m1 ? encode_e2m1 : kind == SmallFloat::e4m3 ? encode_e4m3 : encode_e5m2;
  for (size_t r = 0; r < rows; ++r)
    for (size_t c = 0; c < cols; c += group)
      run(w + r * cols + c, std::min(group, cols - c), *scale++, codes + r * cols + c);
}

void errors_small(SmallFloat kind, const float* w, size_t rows, size_t cols, const float* scale, size_t group,
                  size_t count, const float* weights, float* out) {
  const auto run = kind == SmallFloat::e2m1 ? error_e2m1 : kind == SmallFloat::e4m3 ? error_e4m3 : error_e5m2;
  for (size_t r = 0; r < rows; ++r)
    for (size_t c = 0; c < cols; c += group)
      for (size_t i = 0; i < count; ++i)
        *out++ = run(w + r * cols + c, std::min(group, cols - c), *scale++, weights + c);
}

void join_fp4(const uint8_t* pairs, const uint8_t* scales, size_t groups, size_t size, size_t together,
              uint8_t* blocks) {
  (size == 32 ? join_32 : join_16)(pairs, scales, groups, together, blocks);
}

void split_fp4(const uint8_t* blocks, size_t groups, size_t size, size_t together, uint8_t* pairs, uint8_t* scales) {
  (size == 32 ? split_32 : split_16)(blocks, groups, together, pairs, scales);
}

}  // namespace polyquant
