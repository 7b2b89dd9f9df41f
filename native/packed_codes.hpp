// Each packed type as integer codes: w = d * q + m. Included once for each instruction set; the loops are written so that they vectorize.
// `top` is the largest code of an unsigned type (signed types have top 0); `sub` the weights that share d and m.
#include "half.hpp"
#include "iq_codebooks.hpp"

namespace polyquant {
namespace {

PQ_INLINE float half_at(const uint8_t* p) {
#if defined(__F16C__)
  return _cvtsh_ss(load<uint16_t>(p));
#else
  return load_half(p);
#endif
}

struct alignas(64) Codes {
  int8_t q[256];
  float d[16], m[16];
};

// ---------------------------------------------------------------- legacy types: blocks of 32

template <bool affine, bool fifth>
struct NibbleCodes {
  static constexpr int block = 32, high = affine ? 4 : 2, start = high + (fifth ? 4 : 0), bytes = start + 16, sub = 32, top = fifth ? 31 : 15;
  static constexpr bool offset = true;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float* m) {
    *d = half_at(b);
    *m = affine ? half_at(b + 2) : *d * -float((top + 1) / 2);
    PQ_LOOP
    for (int j = 0; j < 16; ++j) q[j] = b[start + j] & 15;
    PQ_LOOP
    for (int j = 0; j < 16; ++j) q[j + 16] = b[start + j] >> 4;
    if constexpr (fifth) {
      const uint32_t bits = load<uint32_t>(b + high);
      for (int j = 0; j < 32; ++j) q[j] |= int8_t(bits >> j << 4 & 16);
    }
  }
};

template <int head>
struct ByteCodes {
  static constexpr int block = 32, bytes = head + 32, sub = 32, top = 0;
  static constexpr bool offset = false;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float*) {
    *d = half_at(b);
    std::memcpy(q, b + head, 32);
  }
};

struct Q1_0Codes {
  static constexpr int block = 128, bytes = 18, sub = 32, top = 1;
  static constexpr bool offset = true;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float* m) {
    const float s = half_at(b);
    for (int g = 0; g < 4; ++g) {
      d[g] = 2 * s, m[g] = -s;
      const uint32_t bits = load<uint32_t>(b + 2 + 4 * g);
      for (int j = 0; j < 32; ++j) q[32 * g + j] = int8_t(bits >> j & 1);
    }
  }
};

struct Q2_0Codes {
  static constexpr int block = 64, bytes = 18, sub = 32, top = 3;
  static constexpr bool offset = true;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float* m) {
    const float s = half_at(b);
    d[0] = d[1] = s, m[0] = m[1] = -s;
    for (int g = 0; g < 16; g += 4) {
      const uint32_t bits = load<uint32_t>(b + 2 + g);
      for (int j = 0; j < 16; ++j) q[4 * g + j] = int8_t(bits >> (2 * j) & 3);
    }
  }
};

// ---------------------------------------------------------------- K types: blocks of 256

// Field f of `width` bytes comes before field f + 1; q |= field << to.
template <int width, int fields, int bits>
PQ_INLINE void spread(const uint8_t* __restrict src, int8_t* __restrict q, int bytes, int to, bool first) {
  for (int g = 0; g < bytes; g += width)
    for (int f = 0; f < fields; ++f)
      for (int i = 0; i < width; ++i) {
        const int8_t v = int8_t((src[g + i] >> (f * bits) & ((1 << bits) - 1)) << to);
        int8_t& out = q[g * fields + f * width + i];
        out = first ? v : int8_t(out | v);
      }
}

// Head of Q4_K and Q5_K: d, dmin, 8 scales and 8 minima of 6 bits in 12 bytes.
PQ_INLINE void scales_and_minima(const uint8_t* b, float* d, float* m) {
  const float scale = half_at(b), min = -half_at(b + 2);
  const uint32_t a = load<uint32_t>(b + 4), c = load<uint32_t>(b + 8), e = load<uint32_t>(b + 12);
  const uint64_t s = uint64_t(a & 0x3f3f3f3fu) | uint64_t((e & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u)) << 32;
  const uint64_t o = uint64_t(c & 0x3f3f3f3fu) | uint64_t((e >> 4 & 0x0f0f0f0fu) | (c >> 2 & 0x30303030u)) << 32;
  uint8_t sb[8], ob[8];
  std::memcpy(sb, &s, 8);
  std::memcpy(ob, &o, 8);
  for (int j = 0; j < 8; ++j) d[j] = scale * float(sb[j]), m[j] = min * float(ob[j]);
}

struct Q2_KCodes {
  static constexpr int block = 256, bytes = 84, sub = 16, top = 3;
  static constexpr bool offset = true;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float* m) {
    const float scale = half_at(b + 80), min = -half_at(b + 82);
    for (int s = 0; s < 16; ++s) d[s] = scale * float(b[s] & 15), m[s] = min * float(b[s] >> 4);
    spread<32, 4, 2>(b + 16, q, 64, 0, true);
  }
};

struct Q3_KCodes {
  static constexpr int block = 256, bytes = 110, sub = 16, top = 7;
  static constexpr bool offset = true;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float* m) {
    const float scale = half_at(b + 108);
    const uint64_t low = load<uint64_t>(b + 96);
    const uint32_t high = load<uint32_t>(b + 104);
    const uint64_t h0 = (high & 0x03030303u) | uint64_t(high >> 2 & 0x03030303u) << 32;
    const uint64_t h1 = (high >> 4 & 0x03030303u) | uint64_t(high >> 6 & 0x03030303u) << 32;
    const uint64_t s0 = (low & 0x0f0f0f0f0f0f0f0fu) | h0 << 4, s1 = (low >> 4 & 0x0f0f0f0f0f0f0f0fu) | h1 << 4;
    uint8_t s[16];
    std::memcpy(s, &s0, 8);
    std::memcpy(s + 8, &s1, 8);
    for (int j = 0; j < 16; ++j) d[j] = scale * float(int(s[j]) - 32), m[j] = -4 * d[j];
    spread<32, 4, 2>(b + 32, q, 64, 0, true);
    spread<32, 8, 1>(b, q, 32, 2, false);
  }
};

struct Q4_KCodes {
  static constexpr int block = 256, bytes = 144, sub = 32, top = 15;
  static constexpr bool offset = true;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float* m) {
    scales_and_minima(b, d, m);
    spread<32, 2, 4>(b + 16, q, 128, 0, true);
  }
};

struct Q5_KCodes {
  static constexpr int block = 256, bytes = 176, sub = 32, top = 31;
  static constexpr bool offset = true;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float* m) {
    scales_and_minima(b, d, m);
    spread<32, 2, 4>(b + 48, q, 128, 0, true);
    spread<32, 8, 1>(b + 16, q, 32, 4, false);
  }
};

struct Q6_KCodes {
  static constexpr int block = 256, bytes = 210, sub = 16, top = 63;
  static constexpr bool offset = true;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float* m) {
    const float scale = half_at(b + 208);
    for (int s = 0; s < 16; ++s) d[s] = scale * float(int8_t(b[192 + s])), m[s] = -32 * d[s];
    spread<64, 2, 4>(b, q, 128, 0, true);
    spread<32, 4, 2>(b + 128, q, 64, 4, false);
  }
};

struct Q8_KCodes {
  static constexpr int block = 256, bytes = 292, sub = 32, top = 0;
  static constexpr bool offset = false;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float*) {
    const float scale = load<float>(b);
    for (int s = 0; s < 8; ++s) d[s] = scale;
    std::memcpy(q, b + 4, 256);
  }
};

// ---------------------------------------------------------------- codebook types: eight signed bytes at a time

PQ_INLINE void put8(int8_t* q, int at, uint64_t eight) { std::memcpy(q + 8 * at, &eight, 8); }

// Bytewise negation where the mask has ones. Magnitudes are never 0, so the +1 carries into no neighbour.
PQ_INLINE uint64_t with_signs(uint64_t magnitudes, uint64_t mask) { return (magnitudes ^ mask) + (mask & 0x0101010101010101u); }

PQ_INLINE uint64_t both(uint32_t low, uint32_t high) { return low | uint64_t(high) << 32; }

struct Iq2XxsCodes {
  static constexpr int block = 256, bytes = 66, sub = 32, top = 0;
  static constexpr bool offset = false;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float*) {
    const float scale = half_at(b);
    for (int g = 0; g < 8; ++g) {
      const uint8_t* index = b + 2 + 8 * g;
      const uint32_t tail = load<uint32_t>(index + 4);
      for (int l = 0; l < 4; ++l) put8(q, 4 * g + l, with_signs(iq::grid2_xxs[index[l]], iq::even_sign_mask[tail >> (7 * l) & 127]));
      d[g] = scale * (0.5f + float(tail >> 28)) * 0.25f;
    }
  }
};

PQ_INLINE void nibble_scales(const uint8_t* s, float scale, float* d) {
  for (int g = 0; g < 8; ++g) {
    d[2 * g] = scale * (0.5f + float(s[g] & 15)) * 0.25f;
    d[2 * g + 1] = scale * (0.5f + float(s[g] >> 4)) * 0.25f;
  }
}

struct Iq2XsCodes {
  static constexpr int block = 256, bytes = 74, sub = 16, top = 0;
  static constexpr bool offset = false;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float*) {
    for (int g = 0; g < 32; ++g) {
      const unsigned v = load<uint16_t>(b + 2 + 2 * g);
      put8(q, g, with_signs(iq::grid2_xs[v & 511], iq::even_sign_mask[v >> 9]));
    }
    nibble_scales(b + 66, half_at(b), d);
  }
};

struct Iq2SCodes {
  static constexpr int block = 256, bytes = 82, sub = 16, top = 0;
  static constexpr bool offset = false;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float*) {
    for (int g = 0; g < 32; ++g)
      put8(q, g, with_signs(iq::grid2_s[b[2 + g] | (b[66 + g / 4] >> (2 * (g & 3)) & 3) << 8], iq::sign_mask[b[34 + g]]));
    nibble_scales(b + 74, half_at(b), d);
  }
};

struct Iq3XxsCodes {
  static constexpr int block = 256, bytes = 98, sub = 32, top = 0;
  static constexpr bool offset = false;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float*) {
    const float scale = half_at(b);
    for (int g = 0; g < 8; ++g) {
      const uint8_t* index = b + 2 + 8 * g;
      const uint32_t tail = load<uint32_t>(b + 66 + 4 * g);
      for (int l = 0; l < 4; ++l)
        put8(q, 4 * g + l, with_signs(both(iq::grid3_xxs[index[2 * l]], iq::grid3_xxs[index[2 * l + 1]]), iq::even_sign_mask[tail >> (7 * l) & 127]));
      d[g] = scale * (0.5f + float(tail >> 28)) * 0.5f;
    }
  }
};

struct Iq3SCodes {
  static constexpr int block = 256, bytes = 110, sub = 32, top = 0;
  static constexpr bool offset = false;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float*) {
    const float scale = half_at(b);
    for (int g = 0; g < 8; ++g) {
      const uint8_t* index = b + 2 + 8 * g;
      const unsigned high = b[66 + g];
      for (int l = 0; l < 4; ++l)
        put8(q, 4 * g + l,
             with_signs(both(iq::grid3_s[index[2 * l] | (high >> (2 * l) & 1) << 8], iq::grid3_s[index[2 * l + 1] | (high >> (2 * l + 1) & 1) << 8]),
                        iq::sign_mask[b[74 + 4 * g + l]]));
      d[g] = scale * float(1 + 2 * (b[106 + g / 2] >> (4 * (g & 1)) & 15));
    }
  }
};

// Eighths: 8 * (grid +- 1/8), as in the dequantizer.
PQ_INLINE uint64_t eighths(unsigned index, unsigned minus) {
  return (iq::grid1[index] + ((minus - uint64_t(1)) & 0x0202020202020202u)) ^ 0x8080808080808080u;
}

struct Iq1SCodes {
  static constexpr int block = 256, bytes = 50, sub = 32, top = 0;
  static constexpr bool offset = false;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float*) {
    const float scale = half_at(b);
    for (int g = 0; g < 8; ++g) {
      const uint8_t* index = b + 2 + 4 * g;
      const unsigned high = load<uint16_t>(b + 34 + 2 * g);
      for (int l = 0; l < 4; ++l) put8(q, 4 * g + l, eighths(index[l] | (high >> (3 * l) & 7) << 8, high >> 15));
      d[g] = scale * float(2 * (high >> 12 & 7) + 1) * 0.125f;
    }
  }
};

struct Iq1MCodes {
  static constexpr int block = 256, bytes = 56, sub = 16, top = 0;
  static constexpr bool offset = false;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float*) {
    unsigned bits = 0;
    for (int k = 0; k < 4; ++k) bits |= unsigned(b[49 + 2 * k] >> 4) << (4 * k);
    const float scale = half_to_float(uint16_t(bits));
    for (int g = 0; g < 8; ++g) {
      const uint8_t* index = b + 4 * g;
      const unsigned high = load<uint16_t>(b + 32 + 2 * g);
      for (int l = 0; l < 4; ++l) put8(q, 4 * g + l, eighths(index[l] | (high >> (4 * l) & 7) << 8, high >> (4 * l + 3) & 1));
      const unsigned s = load<uint16_t>(b + 48 + 2 * (g / 2)) >> (6 * (g & 1));
      d[2 * g] = scale * float(2 * (s & 7) + 1) * 0.125f;
      d[2 * g + 1] = scale * float(2 * (s >> 3 & 7) + 1) * 0.125f;
    }
  }
};

// ---------------------------------------------------------------- sixteen levels: a table look-up of nibbles

alignas(16) constexpr int8_t kLevels4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
alignas(16) constexpr int8_t kTwiceE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// n bytes: low nibbles are weights 0 ... n - 1, high nibbles n ... 2n - 1.
template <int n>
PQ_INLINE void look_up(const int8_t* levels, const uint8_t* codes, int8_t* q) {
#if defined(__AVX2__)
  const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(levels)), nibble = _mm_set1_epi8(15);
  if constexpr (n == 16) {
    const __m128i c = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm_shuffle_epi8(table, _mm_and_si128(c, nibble)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16), _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(c, 4), nibble)));
  } else {
    const __m128i c = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(q), _mm_shuffle_epi8(table, _mm_and_si128(c, nibble)));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(q + n), _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(c, 4), nibble)));
  }
#else
  for (int j = 0; j < n; ++j) q[j] = levels[codes[j] & 15], q[n + j] = levels[codes[j] >> 4];
#endif
}

struct Iq4NlCodes {
  static constexpr int block = 32, bytes = 18, sub = 32, top = 0;
  static constexpr bool offset = false;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float*) {
    *d = half_at(b);
    look_up<16>(kLevels4, b + 2, q);
  }
};

struct Iq4XsCodes {
  static constexpr int block = 256, bytes = 136, sub = 32, top = 0;
  static constexpr bool offset = false;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float*) {
    const float scale = half_at(b);
    const unsigned high = load<uint16_t>(b + 2);
    const uint32_t low = load<uint32_t>(b + 4);
    for (int g = 0; g < 8; ++g) d[g] = scale * float(int((low >> (4 * g) & 15) | (high >> (2 * g) & 3) << 4) - 32);
    for (int g = 0; g < 8; ++g) look_up<16>(kLevels4, b + 8 + 16 * g, q + 32 * g);
  }
};

struct Mxfp4Codes {
  static constexpr int block = 32, bytes = 17, sub = 32, top = 0;
  static constexpr bool offset = false;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float*) {
    // half of 2^(e - 127): the codes count halves
    *d = std::bit_cast<float>(b[0] < 2 ? 0x00200000u << b[0] : uint32_t(b[0] - 1) << 23);
    look_up<16>(kTwiceE2m1, b + 1, q);
  }
};

// Half of an unsigned E4M3 value; bytes 0x00 and 0x7f are 0 and the top bit is ignored, as in ggml.
PQ_INLINE float half_e4m3(uint8_t e) {
  const unsigned x = e & 0x7f, exponent = x >> 3, mantissa = x & 7;
  const float normal = std::bit_cast<float>(((exponent + 119) << 23) | mantissa << 20);  // 2^(exponent - 8) * (1 + mantissa / 8)
  const float value = exponent ? normal : float(mantissa) * 0x1p-10f;
  return x == 0x7f ? 0.0f : value;
}

struct Nvfp4Codes {
  static constexpr int block = 64, bytes = 36, sub = 16, top = 0;
  static constexpr bool offset = false;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float*) {
    for (int g = 0; g < 4; ++g) {
      d[g] = half_e4m3(b[g]);
      look_up<8>(kTwiceE2m1, b + 4 + 8 * g, q + 16 * g);
    }
  }
};

// ---------------------------------------------------------------- ternary types: codes 0, 1, 2

template <int count>
PQ_INLINE void ternary_scale(float s, float* d, float* m) {
  for (int g = 0; g < count; ++g) d[g] = s, m[g] = -s;
}

template <int width, int digits>
PQ_INLINE void take_digits(const uint8_t* bytes, int8_t* q) {
  for (int n = 0, power = 1; n < digits; ++n, power *= 3)
    PQ_LOOP
    for (int i = 0; i < width; ++i) q[n * width + i] = int8_t((uint16_t(uint8_t(bytes[i] * power)) * 3) >> 8);
}

struct Tq1Codes {
  static constexpr int block = 256, bytes = 54, sub = 32, top = 2;
  static constexpr bool offset = true;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float* m) {
    ternary_scale<8>(half_at(b + 52), d, m);
    take_digits<32, 5>(b, q);
    take_digits<16, 5>(b + 32, q + 160);
    take_digits<4, 4>(b + 48, q + 240);
  }
};

struct Tq2Codes {
  static constexpr int block = 256, bytes = 66, sub = 32, top = 3;
  static constexpr bool offset = true;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float* m) {
    ternary_scale<8>(half_at(b + 64), d, m);
    spread<32, 4, 2>(b, q, 64, 0, true);
  }
};

// I2_S: four symbols a byte, the first in the highest bits; symbol 3 reads as 0 (codec ternary.py).
template <int width>
struct I2SCodes {
  static constexpr int block = 4 * width, bytes = width, sub = 32, top = 2;
  static constexpr bool offset = true;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float* m) {
    ternary_scale<block / 32>(1.0f, d, m);
    for (int f = 0; f < 4; ++f)
      for (int i = 0; i < width; ++i) {
        const uint8_t symbol = b[i] >> (6 - 2 * f) & 3;
        q[f * width + i] = int8_t(symbol == 3 ? 1 : symbol);
      }
  }
};

// One of four rows that share their bytes: row `lane` in bits 2 * lane, or the other way round.
template <bool high_first>
struct QuadCodes {
  static constexpr int block = 32, bytes = 32, sub = 32, top = 2;
  static constexpr bool offset = true;
  PQ_INLINE static void take(const uint8_t* b, int lane, int8_t* q, float* d, float* m) {
    *d = 1, *m = -1;
    const int shift = high_first ? 6 - 2 * lane : 2 * lane;
    for (int i = 0; i < 32; ++i) {
      const uint8_t symbol = b[i] >> shift & 3;
      q[i] = int8_t(symbol == 3 ? 1 : symbol);
    }
  }
};

// Trinity: four neighbours a byte, lowest bits first; symbols 0, 1, 2, 3 are 0, +1, -1, 0.
template <int head>
struct TrinityCodes {
  static constexpr int block = 32, bytes = head + 8, sub = 32, top = 2;
  static constexpr bool offset = true;
  PQ_INLINE static void take(const uint8_t* b, int, int8_t* q, float* d, float* m) {
    *d = head ? half_at(b) : 1.0f;
    *m = -*d;
    for (int i = 0; i < 8; ++i)
      for (int f = 0; f < 4; ++f) q[4 * i + f] = int8_t(0x49 >> (2 * (b[head + i] >> (2 * f) & 3)) & 3);  // 1, 2, 0, 1
  }
};

}  // namespace
}  // namespace polyquant
