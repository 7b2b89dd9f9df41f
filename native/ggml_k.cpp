// K types, decoding: super-blocks of 256. The bytes are drawn in src/polyquant/codecs/ggml_k.py.
// Products are taken in ggml's order, (d * sub-scale) first: any other order differs by one ulp.
#include "blocks.hpp"
#include "half.hpp"

namespace polyquant {
namespace {

struct ScaleMin {
  uint8_t scale[8], min[8];
};

// 12 bytes hold 8 scales and 8 minima of 6 bits; the two high bits of numbers 4..7 sit above those of numbers 0..3.
PQ_INLINE ScaleMin unpack_scale_min(const uint8_t* p) {
  ScaleMin r;
  for (int j = 0; j < 4; ++j) {
    r.scale[j] = p[j] & 63;
    r.min[j] = p[j + 4] & 63;
    r.scale[j + 4] = uint8_t((p[j + 8] & 15) | (p[j] >> 6 << 4));
    r.min[j + 4] = uint8_t((p[j + 8] >> 4) | (p[j + 4] >> 6 << 4));
  }
  return r;
}

PQ_SIMD void dequantize_q2_k(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 84, dst += 256) {
    const float d = load_half(src + 80), dmin = load_half(src + 82);
    for (int s = 0; s < 16; ++s) {  // sub-block s: half s % 2 of bit pair s / 2 % 4 of the 32 bytes s / 8
      const uint8_t* q = src + 16 + s / 8 * 32 + s % 2 * 16;
      const int shift = s / 2 % 4 * 2;
      const float scale = d * float(src[s] & 15), min = dmin * float(src[s] >> 4);
      for (int j = 0; j < 16; ++j) dst[16 * s + j] = scale * float(q[j] >> shift & 3) - min;
    }
  }
}

PQ_SIMD void dequantize_q3_k(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 110, dst += 256) {
    const float d = load_half(src + 108);
    const uint8_t* packed = src + 96;
    for (int s = 0; s < 16; ++s) {
      const uint8_t* q = src + 32 + s / 8 * 32 + s % 2 * 16;
      const uint8_t* high = src + s % 2 * 16;
      const int shift = s / 2 % 4 * 2, bit = s / 2;
      const int sub = (packed[s % 8] >> (s / 8 * 4) & 15) | (packed[8 + s % 4] >> (s / 4 * 2) & 3) << 4;
      const float scale = d * float(sub - 32);
      for (int j = 0; j < 16; ++j) dst[16 * s + j] = scale * float((q[j] >> shift & 3) + (high[j] >> bit & 1) * 4 - 4);
    }
  }
}

PQ_SIMD void dequantize_q4_k(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 144, dst += 256) {
    const float d = load_half(src), dmin = load_half(src + 2);
    const ScaleMin sm = unpack_scale_min(src + 4);
    for (int s = 0; s < 8; ++s) {
      const uint8_t* q = src + 16 + s / 2 * 32;
      const int shift = s % 2 * 4;
      const float scale = d * float(sm.scale[s]), min = dmin * float(sm.min[s]);
      for (int j = 0; j < 32; ++j) dst[32 * s + j] = scale * float(q[j] >> shift & 15) - min;
    }
  }
}

PQ_SIMD void dequantize_q5_k(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 176, dst += 256) {
    const float d = load_half(src), dmin = load_half(src + 2);
    const ScaleMin sm = unpack_scale_min(src + 4);
    const uint8_t* high = src + 16;
    for (int s = 0; s < 8; ++s) {
      const uint8_t* q = src + 48 + s / 2 * 32;
      const int shift = s % 2 * 4;
      const float scale = d * float(sm.scale[s]), min = dmin * float(sm.min[s]);
      for (int j = 0; j < 32; ++j)
        dst[32 * s + j] = scale * float((q[j] >> shift & 15) + (high[j] >> s & 1) * 16) - min;
    }
  }
}

PQ_SIMD void dequantize_q6_k(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 210, dst += 256) {
    const float d = load_half(src + 208);
    const auto* sub = reinterpret_cast<const int8_t*>(src + 192);
    for (int s = 0; s < 16; ++s) {
      const int half = s / 8, quarter = s / 2 % 4;
      const uint8_t* low = src + half * 64 + quarter % 2 * 32 + s % 2 * 16;
      const uint8_t* high = src + 128 + half * 32 + s % 2 * 16;
      const int low_shift = quarter / 2 * 4, high_shift = quarter * 2;
      const float scale = d * float(sub[s]);
      for (int j = 0; j < 16; ++j)
        dst[16 * s + j] = scale * float((low[j] >> low_shift & 15) + (high[j] >> high_shift & 3) * 16 - 32);
    }
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
    {"q2_k", 256, 84, dequantize_q2_k, nullptr},  {"q3_k", 256, 110, dequantize_q3_k, nullptr},
    {"q4_k", 256, 144, dequantize_q4_k, nullptr}, {"q5_k", 256, 176, dequantize_q5_k, nullptr},
    {"q6_k", 256, 210, dequantize_q6_k, nullptr}, {"q8_k", 256, 292, dequantize_q8_k, nullptr},
};

}  // namespace

KernelTable k_kernels() { return table; }

}  // namespace polyquant
