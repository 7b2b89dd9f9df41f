// Codebook types. The bytes are drawn in src/polyquant/codecs/ggml_iq.py.
// Each kernel makes 256 signed bytes from the codebook and the signs, then multiplies them in one loop that the compiler vectorizes.
#include "blocks.hpp"
#include "half.hpp"
#include "iq_codebooks.hpp"

namespace polyquant {
namespace {

using namespace iq;

// 256 values as signed bytes, a scale for each 16. Filled first and multiplied after: 8 weights at a time, the compiler would
// move bytes to floats one by one.
struct alignas(64) Values {
  int8_t q[256];
  float scale[16];

  PQ_INLINE void set(int at, uint64_t eight) { std::memcpy(q + 8 * at, &eight, 8); }

  PQ_INLINE void set_scales(int group, float low, float high) {
    scale[2 * group] = low;
    scale[2 * group + 1] = high;
  }

  PQ_INLINE void write(float* dst, int groups = 8) const {
    for (int k = 0; k < 2 * groups; ++k) {
      const float s = scale[k];
#pragma GCC unroll 1  // GCC would unroll first and then find nothing to vectorize
      for (int j = 0; j < 16; ++j) dst[16 * k + j] = s * float(q[16 * k + j]);
    }
  }
};

// Bytewise negation where the mask has ones. Magnitudes are never 0, so the +1 carries into no neighbour.
PQ_INLINE uint64_t with_signs(uint64_t magnitudes, uint64_t mask) {
  return (magnitudes ^ mask) + (mask & 0x0101010101010101u);
}

PQ_INLINE uint64_t pair(uint32_t low, uint32_t high) { return low | uint64_t(high) << 32; }

// iq1: 8 * (grid +- 1/8)
PQ_INLINE uint64_t shifted(unsigned index, bool minus) {
  return (grid1[index] + (minus ? 0 : 0x0202020202020202u)) ^ 0x8080808080808080u;
}

PQ_SIMD void dequantize_iq2_xxs(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 66, dst += 256) {
    const float d = load_half(src);
    Values v;
    for (int ib = 0; ib < 8; ++ib) {
      const uint8_t* index = src + 2 + 8 * ib;
      const uint32_t tail = load<uint32_t>(index + 4);
      for (int l = 0; l < 4; ++l) v.set(4 * ib + l, with_signs(grid2_xxs[index[l]], even_sign_mask[tail >> (7 * l) & 127]));
      const float scale = d * (0.5f + float(tail >> 28)) * 0.25f;
      v.set_scales(ib, scale, scale);
    }
    v.write(dst);
  }
}

PQ_SIMD void dequantize_iq2_xs(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 74, dst += 256) {
    const float d = load_half(src);
    Values v;
    for (int ib = 0; ib < 8; ++ib) {
      for (int l = 0; l < 4; ++l) {
        const unsigned q = load<uint16_t>(src + 2 + 8 * ib + 2 * l);
        v.set(4 * ib + l, with_signs(grid2_xs[q & 511], even_sign_mask[q >> 9]));
      }
      const int s = src[66 + ib];
      v.set_scales(ib, d * (0.5f + float(s & 15)) * 0.25f, d * (0.5f + float(s >> 4)) * 0.25f);
    }
    v.write(dst);
  }
}

PQ_SIMD void dequantize_iq2_s(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 82, dst += 256) {
    const float d = load_half(src);
    Values v;
    for (int ib = 0; ib < 8; ++ib) {
      const uint8_t* index = src + 2 + 4 * ib;
      const unsigned high = src[66 + ib];
      for (int l = 0; l < 4; ++l)
        v.set(4 * ib + l, with_signs(grid2_s[index[l] | (high >> (2 * l) & 3) << 8], sign_mask[index[32 + l]]));
      const int s = src[74 + ib];
      v.set_scales(ib, d * (0.5f + float(s & 15)) * 0.25f, d * (0.5f + float(s >> 4)) * 0.25f);
    }
    v.write(dst);
  }
}

PQ_SIMD void dequantize_iq3_xxs(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 98, dst += 256) {
    const float d = load_half(src);
    Values v;
    for (int ib = 0; ib < 8; ++ib) {
      const uint8_t* index = src + 2 + 8 * ib;
      const uint32_t tail = load<uint32_t>(src + 66 + 4 * ib);
      for (int l = 0; l < 4; ++l)
        v.set(4 * ib + l, with_signs(pair(grid3_xxs[index[2 * l]], grid3_xxs[index[2 * l + 1]]), even_sign_mask[tail >> (7 * l) & 127]));
      const float scale = d * (0.5f + float(tail >> 28)) * 0.5f;
      v.set_scales(ib, scale, scale);
    }
    v.write(dst);
  }
}

PQ_SIMD void dequantize_iq3_s(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 110, dst += 256) {
    const float d = load_half(src);
    Values v;
    for (int ib = 0; ib < 8; ++ib) {
      const uint8_t* index = src + 2 + 8 * ib;
      const unsigned high = src[66 + ib];
      for (int l = 0; l < 4; ++l) {
        const uint32_t low4 = grid3_s[index[2 * l] | (high >> (2 * l) & 1) << 8];
        const uint32_t high4 = grid3_s[index[2 * l + 1] | (high >> (2 * l + 1) & 1) << 8];
        v.set(4 * ib + l, with_signs(pair(low4, high4), sign_mask[src[74 + 4 * ib + l]]));
      }
      const float scale = d * float(1 + 2 * (src[106 + ib / 2] >> (4 * (ib & 1)) & 15));
      v.set_scales(ib, scale, scale);
    }
    v.write(dst);
  }
}

// The bytes are eighths: the scale takes the factor, which loses nothing, for d is a half.
PQ_SIMD void dequantize_iq1_s(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 50, dst += 256) {
    const float d = load_half(src);
    Values v;
    for (int ib = 0; ib < 8; ++ib) {
      const uint8_t* index = src + 2 + 4 * ib;
      const unsigned high = load<uint16_t>(src + 34 + 2 * ib);
      for (int l = 0; l < 4; ++l) v.set(4 * ib + l, shifted(index[l] | (high >> (3 * l) & 7) << 8, high & 0x8000));
      const float scale = d * float(2 * (high >> 12 & 7) + 1) * 0.125f;
      v.set_scales(ib, scale, scale);
    }
    v.write(dst);
  }
}

PQ_SIMD void dequantize_iq1_m(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 56, dst += 256) {
    unsigned bits = 0;
    for (int k = 0; k < 4; ++k) bits |= unsigned(src[49 + 2 * k] >> 4) << (4 * k);
    const float d = half_to_float(uint16_t(bits));
    Values v;
    for (int ib = 0; ib < 8; ++ib) {
      const uint8_t* index = src + 4 * ib;
      const unsigned high = load<uint16_t>(src + 32 + 2 * ib);
      for (int l = 0; l < 4; ++l)
        v.set(4 * ib + l, shifted(index[l] | (high >> (4 * l) & 7) << 8, high >> (4 * l) & 8));
      const unsigned s = load<uint16_t>(src + 48 + 2 * (ib / 2)) >> (6 * (ib & 1));
      v.set_scales(ib, d * float(2 * (s & 7) + 1) * 0.125f, d * float(2 * (s >> 3 & 7) + 1) * 0.125f);
    }
    v.write(dst);
  }
}

alignas(16) constexpr int8_t levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// 16 bytes: low nibbles are weights 0..15, high nibbles 16..31.
PQ_INLINE void look_up(const uint8_t* codes, int8_t* out) {
#if defined(__GNUC__) && !defined(__clang__)  // becomes one byte shuffle where the instruction set has it
  using V = uint8_t __attribute__((vector_size(16)));
  V table, q;
  std::memcpy(&table, levels, 16);
  std::memcpy(&q, codes, 16);
  const V low = __builtin_shuffle(table, q & 15), high = __builtin_shuffle(table, q >> 4);
  std::memcpy(out, &low, 16);
  std::memcpy(out + 16, &high, 16);
#else
  for (int j = 0; j < 16; ++j) {
    out[j] = levels[codes[j] & 15];
    out[16 + j] = levels[codes[j] >> 4];
  }
#endif
}

PQ_SIMD void dequantize_iq4_nl(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; i += 8, src += 8 * 18, dst += 256) {
    const int together = blocks - i < 8 ? int(blocks - i) : 8;
    Values v;
    for (int ib = 0; ib < together; ++ib) {
      look_up(src + 18 * ib + 2, v.q + 32 * ib);
      const float d = load_half(src + 18 * ib);
      v.set_scales(ib, d, d);
    }
    v.write(dst, together);
  }
}

PQ_SIMD void dequantize_iq4_xs(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 136, dst += 256) {
    const float d = load_half(src);
    const unsigned high = load<uint16_t>(src + 2);
    Values v;
    for (int ib = 0; ib < 8; ++ib) {
      const int s = (src[4 + ib / 2] >> (4 * (ib & 1)) & 15) | int(high >> (2 * ib) & 3) << 4;
      look_up(src + 8 + 16 * ib, v.q + 32 * ib);
      const float scale = d * float(s - 32);
      v.set_scales(ib, scale, scale);
    }
    v.write(dst);
  }
}

constexpr BlockKernel table[] = {
    {"iq1_s", 256, 50, dequantize_iq1_s, nullptr},     {"iq1_m", 256, 56, dequantize_iq1_m, nullptr},
    {"iq2_xxs", 256, 66, dequantize_iq2_xxs, nullptr}, {"iq2_xs", 256, 74, dequantize_iq2_xs, nullptr},
    {"iq2_s", 256, 82, dequantize_iq2_s, nullptr},     {"iq3_xxs", 256, 98, dequantize_iq3_xxs, nullptr},
    {"iq3_s", 256, 110, dequantize_iq3_s, nullptr},    {"iq4_nl", 32, 18, dequantize_iq4_nl, nullptr},
    {"iq4_xs", 256, 136, dequantize_iq4_xs, nullptr},
};

}  // namespace

KernelTable iq_kernels() { return table; }

}  // namespace polyquant
