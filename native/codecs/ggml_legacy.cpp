// ggml's first types: small blocks with fp16 scales. src/polyquant/codecs/ggml_legacy.py has the byte diagrams.
#include "base/half.hpp"
#include "base/round.hpp"
#include "codecs/blocks.hpp"
#include "codecs/weighted_search.hpp"

namespace polyquant {
namespace {

// ---------------------------------------------------------------- 4 and 5 bits: low nibbles, high nibbles, then bit 4

template <bool fifth>
PQ_INLINE void pack_codes(const uint8_t* q, uint8_t* high, uint8_t* nibbles) {
  PQ_LOOP
  for (int j = 0; j < 16; ++j) nibbles[j] = uint8_t((q[j] & 15) | (q[j + 16] << 4));
  if constexpr (fifth) {
    uint32_t bits = 0;
    for (int j = 0; j < 32; ++j) bits |= uint32_t(q[j] >> 4) << j;
    store(high, bits);
  }
}

// [d] [m if affine] [high bits if fifth] [nibbles]
template <bool affine, bool fifth>
struct Nibbles {
  static constexpr int high = affine ? 4 : 2;
  static constexpr int nibbles = high + (fifth ? 4 : 0);
  static constexpr int bytes = nibbles + 16;
  static constexpr int levels = fifth ? 32 : 16;
};

template <bool affine, bool fifth>
PQ_INLINE void dequantize_nibbles(const uint8_t* __restrict src, float* __restrict dst, size_t blocks) {
  using B = Nibbles<affine, fifth>;
  for (size_t i = 0; i < blocks; ++i, src += B::bytes, dst += 32) {
    const uint8_t* __restrict q = src + B::nibbles;
    const uint32_t bits = fifth ? load<uint32_t>(src + B::high) : 0;
    const float d = load_half(src), m = affine ? load_half(src + 2) : 0;
    const int zero = affine ? 0 : B::levels / 2;
    PQ_LOOP
    for (int j = 0; j < 16; ++j) {
      const float v = float(int((q[j] & 15) | (bits >> j << 4 & 16)) - zero) * d;
      dst[j] = affine ? v + m : v;
    }
    PQ_LOOP
    for (int j = 0; j < 16; ++j) {
      const float v = float(int((q[j] >> 4) | (bits >> (j + 16) << 4 & 16)) - zero) * d;
      dst[j + 16] = affine ? v + m : v;
    }
  }
}

// The scales of some blocks side by side: divisions and conversions of one after the other would take most of the time.
constexpr size_t TOGETHER = 8;

struct Scales {
  float d[TOGETHER] = {}, id[TOGETHER];
  uint16_t stored[TOGETHER];

  PQ_INLINE void divide(float by) {
    PQ_LOOP for (size_t b = 0; b < TOGETHER; ++b) {
      d[b] /= by;
      id[b] = inverse(d[b]);
      stored[b] = float_to_half(d[b]);
    }
  }
};

// Calls some(source, target, blocks) for TOGETHER blocks, and for the rest.
template <size_t bytes, class F>
PQ_INLINE void in_turn(const float* src, uint8_t* dst, size_t blocks, const F& some) {
  for (; blocks >= TOGETHER; blocks -= TOGETHER, src += 32 * TOGETHER, dst += bytes * TOGETHER)
    some(src, dst, TOGETHER);
  some(src, dst, blocks);
}

template <bool affine, bool fifth>
PQ_INLINE void quantize_nibbles(const float* src, uint8_t* dst, size_t count) {
  using B = Nibbles<affine, fifth>;
  Scales s;
  float least[TOGETHER];
  for (size_t b = 0; b < count; ++b) {
    if constexpr (affine) {
      const Range r = range<32>(src + 32 * b);
      s.d[b] = r.max - r.min, least[b] = r.min;
    } else {
      s.d[b] = first_extreme<32>(src + 32 * b);
    }
  }
  s.divide(affine ? B::levels - 1 : -(B::levels / 2));
  for (size_t b = 0; b < count; ++b, src += 32, dst += B::bytes) {
    uint8_t q[32];
    store(dst, s.stored[b]);
    if constexpr (affine) store_half(dst + 2, least[b]);
    const float shift = affine ? 0.5f : B::levels / 2 + 0.5f, first = affine ? least[b] : 0.0f, id = s.id[b];
    PQ_LOOP
    for (int j = 0; j < 32; ++j)
      q[j] = uint8_t(int(clamp((affine ? src[j] - first : src[j]) * id + shift, 0, B::levels - 1)));
    pack_codes<fifth>(q, dst + B::high, dst + B::nibbles);
  }
}

template <bool affine, bool fifth>
PQ_INLINE void search_nibbles(const float* src, uint8_t* dst, size_t rows, size_t cols, const float* importance) {
  using B = Nibbles<affine, fifth>;
  SearchBlocks s;
  for (size_t row = 0; row < rows; ++row, src += cols) {
    float square = 0;
    for (size_t j = 0; j < cols; ++j) square += src[j] * src[j];
    for (size_t block = 0; block < cols / 32; block += search_lanes) {
      const size_t left = cols / 32 - block;
      const int here = left < search_lanes ? int(left) : search_lanes;
      load_search(s, src + 32 * block, importance + 32 * block, square / float(cols), here);
      if constexpr (affine)
        search_affine(s, B::levels - 1);
      else
        search_symmetric(s, B::levels / 2);
      for (int t = 0; t < here; ++t, dst += B::bytes) {
        uint8_t q[32];
        for (int j = 0; j < 32; ++j) q[j] = uint8_t(int(s.codes[j][t]));
        store_half(dst, s.scale[t]);
        if constexpr (affine) store_half(dst + 2, s.offset[t]);
        pack_codes<fifth>(q, dst + B::high, dst + B::nibbles);
      }
    }
  }
}

#define PQ_NIBBLES(name, affine, fifth)                                                                        \
  PQ_SIMD void dequantize_##name(const uint8_t* src, float* dst, size_t blocks) {                              \
    dequantize_nibbles<affine, fifth>(src, dst, blocks);                                                       \
  }                                                                                                            \
  PQ_SIMD void round_##name(const float* src, uint8_t* dst, size_t blocks) {                                   \
    in_turn<Nibbles<affine, fifth>::bytes>(src, dst, blocks, quantize_nibbles<affine, fifth>);                 \
  }                                                                                                            \
  PQ_SIMD void search_##name(const float* src, uint8_t* dst, size_t rows, size_t cols, const float* weights) { \
    search_nibbles<affine, fifth>(src, dst, rows, cols, weights);                                              \
  }                                                                                                            \
  void quantize_##name(const float* src, uint8_t* dst, size_t rows, size_t cols, const float* weights) {       \
    if (weights)                                                                                               \
      search_##name(src, dst, rows, cols, weights);                                                            \
    else                                                                                                       \
      round_##name(src, dst, rows * cols / 32);                                                                \
  }

PQ_NIBBLES(q4_0, false, false)
PQ_NIBBLES(q4_1, true, false)
PQ_NIBBLES(q5_0, false, true)
PQ_NIBBLES(q5_1, true, true)
#undef PQ_NIBBLES

// ---------------------------------------------------------------- 8 bits

template <int head>
PQ_INLINE void dequantize_bytes(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += head + 32, dst += 32) {
    const float d = load_half(src);
    const auto* q = reinterpret_cast<const int8_t*>(src + head);
    for (int j = 0; j < 32; ++j) dst[j] = float(q[j]) * d;
  }
}

PQ_SIMD void dequantize_q8_0(const uint8_t* src, float* dst, size_t blocks) { dequantize_bytes<2>(src, dst, blocks); }
PQ_SIMD void dequantize_q8_1(const uint8_t* src, float* dst, size_t blocks) { dequantize_bytes<4>(src, dst, blocks); }

PQ_INLINE void round_bytes(const float* src, float id, int8_t* q) {
  PQ_LOOP
  for (int j = 0; j < 32; ++j) q[j] = int8_t(round_half_away(clamp(src[j] * id, -127, 127)));
}

PQ_INLINE void some_q8_0(const float* src, uint8_t* dst, size_t count) {
  Scales s;
  for (size_t b = 0; b < count; ++b) s.d[b] = abs_max<32>(src + 32 * b);
  s.divide(127);
  for (size_t b = 0; b < count; ++b, src += 32, dst += 34) {
    int8_t q[32];
    store(dst, s.stored[b]);
    round_bytes(src, s.id[b], q);
    std::memcpy(dst + 2, q, 32);
  }
}

PQ_SIMD void quantize_q8_0(const float* src, uint8_t* dst, size_t rows, size_t cols, const float*) {
  in_turn<34>(src, dst, rows * cols / 32, some_q8_0);
}

PQ_SIMD void quantize_q8_1(const float* src, uint8_t* dst, size_t rows, size_t cols, const float*) {
  for (size_t i = 0; i < rows * cols / 32; ++i, src += 32, dst += 36) {
    int8_t q[32];
    const float d = abs_max<32>(src) / 127;
    round_bytes(src, inverse(d), q);
    int sum = 0;
    for (int j = 0; j < 32; ++j) sum += q[j];
    store_half(dst, d);
    store_half(dst + 2, float(sum) * d);
    std::memcpy(dst + 4, q, 32);
  }
}

// ---------------------------------------------------------------- 1 and 2 bits

PQ_SIMD void dequantize_q1_0(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 18, dst += 128) {
    const uint32_t d = std::bit_cast<uint32_t>(load_half(src));
    for (int b = 0; b < 16; b += 4) {
      const uint32_t minus = ~load<uint32_t>(src + 2 + b);
      for (int j = 0; j < 32; ++j) dst[8 * b + j] = std::bit_cast<float>(d ^ (minus >> j << 31));
    }
  }
}

PQ_SIMD void quantize_q1_0(const float* src, uint8_t* dst, size_t rows, size_t cols, const float*) {
  for (size_t i = 0; i < rows * cols / 128; ++i, src += 128, dst += 18) {
    float sum = 0;  // in ggml's order: another one would change the scale by an ulp
    PQ_LOOP
    for (int j = 0; j < 128; ++j) sum += std::fabs(src[j]);
    store_half(dst, sum / 128);
    for (int b = 0; b < 16; b += 4) {
      uint32_t bits = 0;
      for (int j = 0; j < 32; ++j) bits |= uint32_t(src[8 * b + j] >= 0) << j;
      store(dst + 2 + b, bits);
    }
  }
}

PQ_SIMD void dequantize_q2_0(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 18, dst += 64) {
    const float d = load_half(src);
    for (int b = 0; b < 16; b += 4) {
      const uint32_t bits = load<uint32_t>(src + 2 + b);
      PQ_LOOP
      for (int j = 0; j < 16; ++j) dst[4 * b + j] = float(int(bits >> (2 * j) & 3u) - 1) * d;
    }
  }
}

PQ_SIMD void quantize_q2_0(const float* src, uint8_t* dst, size_t rows, size_t cols, const float*) {
  for (size_t i = 0; i < rows * cols / 64; ++i, src += 64, dst += 18) {
    const float d = abs_max<64>(src), id = inverse(d);
    store_half(dst, d);
    for (int b = 0; b < 16; b += 4) {
      uint32_t bits = 0;
      PQ_LOOP
      for (int j = 0; j < 16; ++j) bits |= uint32_t(round_half_away(clamp(src[4 * b + j] * id, -1, 2)) + 1) << (2 * j);
      store(dst + 2 + b, bits);
    }
  }
}

constexpr BlockKernel table[] = {
    {"q4_0", 32, 18, dequantize_q4_0, quantize_q4_0},  {"q4_1", 32, 20, dequantize_q4_1, quantize_q4_1},
    {"q5_0", 32, 22, dequantize_q5_0, quantize_q5_0},  {"q5_1", 32, 24, dequantize_q5_1, quantize_q5_1},
    {"q8_0", 32, 34, dequantize_q8_0, quantize_q8_0},  {"q8_1", 32, 36, dequantize_q8_1, quantize_q8_1},
    {"q1_0", 128, 18, dequantize_q1_0, quantize_q1_0}, {"q2_0", 64, 18, dequantize_q2_0, quantize_q2_0},
};

}  // namespace

KernelTable legacy_kernels() { return table; }

}  // namespace polyquant
