// Codebook types. src/polyquant/codecs/ggml_iq.py has the byte diagrams. Each kernel makes 256 signed bytes from the
// codebook and the signs, then multiplies them in one loop that the compiler vectorizes.
#include <array>
#include <cmath>
#include <utility>

#include "base/half.hpp"
#include "codecs/blocks.hpp"
#include "codecs/iq_codebooks.hpp"

namespace polyquant {
namespace {

using namespace iq;

// 256 values as signed bytes, with a scale per 16. Filled first, multiplied afterwards: for 8 weights at a time, the
// compiler would convert bytes to floats one by one.
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
#pragma GCC unroll 1  // otherwise GCC unrolls first and fails to vectorize
      for (int j = 0; j < 16; ++j) dst[16 * k + j] = s * float(q[16 * k + j]);
    }
  }
};

// Bytewise negation where the mask has ones. Magnitudes are never 0, so the +1 does not carry into the next byte.
PQ_INLINE uint64_t with_signs(uint64_t magnitudes, uint64_t mask) {
  return (magnitudes ^ mask) + (mask & 0x0101010101010101u);
}

PQ_INLINE uint64_t pair(uint32_t low, uint32_t high) { return low | uint64_t(high) << 32; }

// iq1: 8 * (grid +- 1/8); minus is 0 or 1, without a branch, which would be mispredicted half of the time.
PQ_INLINE uint64_t shifted(unsigned index, unsigned minus) {
  return (grid1[index] + ((minus - uint64_t(1)) & 0x0202020202020202u)) ^ 0x8080808080808080u;
}

PQ_SIMD void dequantize_iq2_xxs(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 66, dst += 256) {
    const float d = load_half(src);
    Values v;
    for (int ib = 0; ib < 8; ++ib) {
      const uint8_t* index = src + 2 + 8 * ib;
      const uint32_t tail = load<uint32_t>(index + 4);
      for (int l = 0; l < 4; ++l)
        v.set(4 * ib + l, with_signs(grid2_xxs[index[l]], even_sign_mask[tail >> (7 * l) & 127]));
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
        v.set(4 * ib + l, with_signs(pair(grid3_xxs[index[2 * l]], grid3_xxs[index[2 * l + 1]]),
                                     even_sign_mask[tail >> (7 * l) & 127]));
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

// The bytes are eighths: the factor goes into the scale, exactly, because d is a half.
PQ_SIMD void dequantize_iq1_s(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 50, dst += 256) {
    const float d = load_half(src);
    Values v;
    for (int ib = 0; ib < 8; ++ib) {
      const uint8_t* index = src + 2 + 4 * ib;
      const unsigned high = load<uint16_t>(src + 34 + 2 * ib);
      for (int l = 0; l < 4; ++l) v.set(4 * ib + l, shifted(index[l] | (high >> (3 * l) & 7) << 8, high >> 15));
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
        v.set(4 * ib + l, shifted(index[l] | (high >> (4 * l) & 7) << 8, high >> (4 * l + 3) & 1));
      const unsigned s = load<uint16_t>(src + 48 + 2 * (ib / 2)) >> (6 * (ib & 1));
      v.set_scales(ib, d * float(2 * (s & 7) + 1) * 0.125f, d * float(2 * (s >> 3 & 7) + 1) * 0.125f);
    }
    v.write(dst);
  }
}

alignas(16) constexpr int8_t levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// 16 bytes: low nibbles are weights 0..15, high nibbles 16..31.
PQ_INLINE void look_up(const uint8_t* codes, int8_t* out) {
#if defined(__GNUC__) && !defined(__clang__)  // becomes a byte shuffle if the instruction set has one
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

// ---- Encoders of IQ4_NL and IQ4_XS: the search of the Python reference, with identical sums.

constexpr float starts[] = {-142, -134, -126, -118, -110, -102, 92, 100, 108, 116, 124, 132};
constexpr float shares[] = {-32, -31, -30, -29, -28};

PQ_INLINE float inverse_of(float x) { return x != 0 ? 1.0f / x : 0.0f; }

// Pairwise sum of halves; overwrites the array.
template <size_t N, class T>
PQ_INLINE T tree(T* x) {
  if constexpr (N == 1) {
    return x[0];
  } else {
#pragma GCC unroll 1  // as in Values::write
    for (size_t j = 0; j < N / 2; ++j) x[j] += x[j + N / 2];
    return tree<N / 2>(x);
  }
}

constexpr float between(int k) { return float(levels[k] + levels[k + 1]) / 2; }
constexpr float step(int k) { return float(levels[k + 1] - levels[k]); }

// The level nearest to each x * inverse: a sum of comparisons instead of a search, to process 32 at once.
template <size_t... k>
PQ_INLINE float level_of(float t, std::index_sequence<k...>) {
  float level = levels[0];
  ((level += t <= between(int(k)) ? 0.0f : step(int(k))), ...);
  return level;
}

template <size_t... k>
PQ_INLINE int code_of(float t, std::index_sequence<k...>) {
  return ((t <= between(int(k)) ? 0 : 1) + ...);
}

PQ_INLINE void nearest(const float* x, float inverse, float* level) {
  for (int j = 0; j < 32; ++j) level[j] = level_of(x[j] * inverse, std::make_index_sequence<15>());
}

PQ_INLINE void nearest_codes(const float* x, float inverse, uint8_t* packed) {
  int code[32];
  for (int j = 0; j < 32; ++j) code[j] = code_of(x[j] * inverse, std::make_index_sequence<15>());
  for (int j = 0; j < 16; ++j) packed[j] = uint8_t(code[j] | code[16 + j] << 4);
}

struct Fit {
  float scale, gain;
};

PQ_INLINE Fit fit(const float* y, const float* weight, float inverse) {
  float v[32], a[32], b[32];
  nearest(y, inverse, v);
  for (int j = 0; j < 32; ++j) {
    const float wv = weight[j] * v[j];
    a[j] = wv * y[j];
    b[j] = wv * v[j];
  }
  const float explained = tree<32>(a), square = tree<32>(b);
  const float scale = explained / (square > 0 ? square : 1.0f);
  return {scale, explained * scale};
}

// The first value of the largest magnitude, with its sign.
PQ_INLINE float largest(const float* x, int n) {
  float top = x[0];
  for (int j = 1; j < n; ++j) top = std::fabs(x[j]) > std::fabs(top) ? x[j] : top;
  return top;
}

PQ_INLINE float best_scale(const float* x, const float* weight) {
  const float top = largest(x, 32);
  float y[32];
  for (int j = 0; j < 32; ++j) y[j] = x[j] / (top != 0 ? top : 1.0f);
  Fit best{0, 0};
  for (const float start : starts) {
    const Fit found = fit(y, weight, start);
    if (found.gain > best.gain) best = found;
  }
  return fit(y, weight, inverse_of(best.scale)).scale * top;
}

PQ_INLINE uint16_t to_half(float d) { return float_to_half(d > 65504.0f ? 65504.0f : d < -65504.0f ? -65504.0f : d); }

constexpr auto ones = [] {
  std::array<float, 256> out{};
  for (float& x : out) x = 1;
  return out;
}();

PQ_SIMD void quantize_iq4_nl(const float* src, uint8_t* dst, size_t rows, size_t cols, const float* importance) {
  for (size_t row = 0; row < rows; ++row)
    for (size_t col = 0; col < cols; col += 32, src += 32, dst += 18) {
      const uint16_t d = to_half(best_scale(src, importance ? importance + col : ones.data()));
      store(dst, d);
      nearest_codes(src, inverse_of(half_to_float(d)), dst + 2);
    }
}

// The weighted squared error of 32 weights with a scale.
PQ_INLINE double error_of(const float* x, const float* weight, float scale) {
  float v[32];
  double e[32];
  nearest(x, inverse_of(scale), v);
  for (int j = 0; j < 32; ++j) {
    const double off = double(x[j]) - double(scale * v[j]);
    e[j] = double(weight[j]) * off * off;
  }
  return tree<32>(e);
}

PQ_INLINE void share_scales(const float* scales, float d, float (&s)[8]) {
  for (int ib = 0; ib < 8; ++ib)
    s[ib] = std::fmax(std::fmin(std::nearbyint(scales[ib] * inverse_of(d)), 31.0f), -32.0f);
}

PQ_SIMD void quantize_iq4_xs(const float* src, uint8_t* dst, size_t rows, size_t cols, const float* importance) {
  for (size_t row = 0; row < rows; ++row)
    for (size_t col = 0; col < cols; col += 256, src += 256, dst += 136) {
      const float* weight = importance ? importance + col : ones.data();
      float scales[8], s[8];
      for (int ib = 0; ib < 8; ++ib) scales[ib] = best_scale(src + 32 * ib, weight + 32 * ib);
      const float top = largest(scales, 8);
      uint16_t best = to_half(top / shares[0]);
      double least = HUGE_VAL;
      for (const float share : shares) {
        const uint16_t half = to_half(top / share);
        const float d = half_to_float(half);
        share_scales(scales, d, s);
        double e[8];
        for (int ib = 0; ib < 8; ++ib) e[ib] = error_of(src + 32 * ib, weight + 32 * ib, d * s[ib]);
        const double error = tree<8>(e);
        if (error < least) least = error, best = half;
      }
      const float d = half_to_float(best);
      share_scales(scales, d, s);
      unsigned high = 0;
      for (int ib = 0; ib < 8; ++ib) {
        const unsigned stored = unsigned(int(s[ib]) + 32);
        high |= (stored >> 4) << (2 * ib);
        uint8_t& low = dst[4 + ib / 2];
        low = uint8_t(ib & 1 ? low | (stored & 15) << 4 : stored & 15);
        nearest_codes(src + 32 * ib, inverse_of(d * s[ib]), dst + 8 + 16 * ib);
      }
      store(dst, best);
      store(dst + 2, uint16_t(high));
    }
}

constexpr BlockKernel table[] = {
    {"iq1_s", 256, 50, dequantize_iq1_s, nullptr},
    {"iq1_m", 256, 56, dequantize_iq1_m, nullptr},
    {"iq2_xxs", 256, 66, dequantize_iq2_xxs, nullptr},
    {"iq2_xs", 256, 74, dequantize_iq2_xs, nullptr},
    {"iq2_s", 256, 82, dequantize_iq2_s, nullptr},
    {"iq3_xxs", 256, 98, dequantize_iq3_xxs, nullptr},
    {"iq3_s", 256, 110, dequantize_iq3_s, nullptr},
    {"iq4_nl", 32, 18, dequantize_iq4_nl, quantize_iq4_nl},
    {"iq4_xs", 256, 136, dequantize_iq4_xs, quantize_iq4_xs},
};

}  // namespace

KernelTable iq_kernels() { return table; }

}  // namespace polyquant
