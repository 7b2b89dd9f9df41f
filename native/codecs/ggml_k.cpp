// K types, decoding: super-blocks of 256. src/polyquant/codecs/ggml_k.py has the byte diagrams.
// Products are computed in ggml's order, (d * sub-scale) first: any other order differs by one ulp.
#include "base/half.hpp"
#include "codecs/blocks.hpp"
#include "codecs/ggml_k.hpp"

namespace polyquant {
namespace {

// Header of Q4_K and Q5_K: d, dmin, then 12 bytes with 8 scales and 8 minima of 6 bits; the two high bits of entries
// 4..7 are
// above those of 0..3.
PQ_INLINE void scales_and_minima(const uint8_t* src, float* scale, float* min) {
  const float d = load_half(src), dmin = load_half(src + 2);
  const uint8_t* p = src + 4;
  for (int j = 0; j < 4; ++j) {
    scale[j] = d * float(p[j] & 63);
    min[j] = dmin * float(p[j + 4] & 63);
    scale[j + 4] = d * float((p[j + 8] & 15) | p[j] >> 6 << 4);
    min[j + 4] = dmin * float(p[j + 8] >> 4 | p[j + 4] >> 6 << 4);
  }
}

// Field f of `width` bytes comes before field f + 1; q |= field << to.
template <int Width, int Fields, int Bits>
PQ_INLINE void split(const uint8_t* __restrict src, uint8_t* __restrict q, int bytes, int to) {
  for (int g = 0; g < bytes; g += Width)
    for (int f = 0; f < Fields; ++f)
      for (int i = 0; i < Width; ++i)
        q[g * Fields + f * Width + i] |= uint8_t((src[g + i] >> (f * Bits) & ((1 << Bits) - 1)) << to);
}

// Codes -> weights of sub-blocks of W; `zero`: the stored code that means zero.
template <int W>
PQ_INLINE void spread(const uint8_t* __restrict q, int zero, const float* scale, const float* min,
                      float* __restrict dst) {
  for (int s = 0; s < 256 / W; ++s, q += W, dst += W) {
    const float a = scale[s], b = min ? min[s] : 0.0f;
    if (min) {
#pragma GCC unroll 1  // unrolled first, sixteen iterations would not be vectorized
      for (int j = 0; j < W; ++j) dst[j] = a * float(int(q[j])) - b;
    } else {
#pragma GCC unroll 1
      for (int j = 0; j < W; ++j) dst[j] = a * float(int(q[j]) - zero);
    }
  }
}

PQ_SIMD void dequantize_q2_k(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 84, dst += 256) {
    const float d = load_half(src + 80), dmin = load_half(src + 82);
    float scale[16], min[16];
    for (int s = 0; s < 16; ++s) scale[s] = d * float(src[s] & 15), min[s] = dmin * float(src[s] >> 4);
    alignas(64) uint8_t q[256] = {};
    split<32, 4, 2>(src + 16, q, 64, 0);
    spread<16>(q, 0, scale, min, dst);
  }
}

PQ_SIMD void dequantize_q3_k(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 110, dst += 256) {
    const float d = load_half(src + 108);
    uint8_t sub[16] = {};
    split<8, 2, 4>(src + 96, sub, 8, 0);
    split<4, 4, 2>(src + 104, sub, 4, 4);
    float scale[16];
    for (int s = 0; s < 16; ++s) scale[s] = d * float(int(sub[s]) - 32);
    alignas(64) uint8_t q[256] = {};
    split<32, 4, 2>(src + 32, q, 64, 0);
    split<32, 8, 1>(src, q, 32, 2);
    spread<16>(q, 4, scale, nullptr, dst);
  }
}

PQ_SIMD void dequantize_q4_k(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 144, dst += 256) {
    float scale[8], min[8];
    scales_and_minima(src, scale, min);
    alignas(64) uint8_t q[256] = {};
    split<32, 2, 4>(src + 16, q, 128, 0);
    spread<32>(q, 0, scale, min, dst);
  }
}

PQ_SIMD void dequantize_q5_k(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 176, dst += 256) {
    float scale[8], min[8];
    scales_and_minima(src, scale, min);
    alignas(64) uint8_t q[256] = {};
    split<32, 2, 4>(src + 48, q, 128, 0);
    split<32, 8, 1>(src + 16, q, 32, 4);
    spread<32>(q, 0, scale, min, dst);
  }
}

PQ_SIMD void dequantize_q6_k(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 210, dst += 256) {
    const float d = load_half(src + 208);
    const auto* sub = reinterpret_cast<const int8_t*>(src + 192);
    float scale[16];
    for (int s = 0; s < 16; ++s) scale[s] = d * float(sub[s]);
    alignas(64) uint8_t q[256] = {};
    split<64, 2, 4>(src, q, 128, 0);
    split<32, 4, 2>(src + 128, q, 64, 4);
    spread<16>(q, 32, scale, nullptr, dst);
  }
}

PQ_SIMD void dequantize_q8_k(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 292, dst += 256) {
    const float d = load<float>(src);
    const auto* q = reinterpret_cast<const int8_t*>(src + 4);
    for (int j = 0; j < 256; ++j) dst[j] = d * float(q[j]);
  }
}

constexpr BlockKernel table[] = {
    {"q2_k", 256, 84, dequantize_q2_k, quantize_q2_k},  {"q3_k", 256, 110, dequantize_q3_k, quantize_q3_k},
    {"q4_k", 256, 144, dequantize_q4_k, quantize_q4_k}, {"q5_k", 256, 176, dequantize_q5_k, quantize_q5_k},
    {"q6_k", 256, 210, dequantize_q6_k, quantize_q6_k}, {"q8_k", 256, 292, dequantize_q8_k, quantize_q8_k},
};

}  // namespace

KernelTable k_kernels() { return table; }

}  // namespace polyquant
