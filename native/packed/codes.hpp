// Each packed type as integer codes: w = d * q + m. Included once per instruction set.
// `take` makes one unit, 256 weights, of 256 / block blocks. `top` is the largest code of an unsigned type (0 for
// signed
// types), `sub` the number of weights that share d and m. `wide`: 128 adjacent weights share d, and codes are so small
// that
// the sum of 128 pairs of products fits 16 bits. `paired`: of two groups of 32, codes 0 ... 15 of both come first, then
// 16 ... 31 of both, which is how nibbles are split without shuffling vector halves. `whole`: the scales of sub-blocks
// of 16
// are small integers, and m = -zero * d unless zero is 0. `centre`: m = -centre * d.
// `least`: codes of a signed type are in least ... -least. Codes and scales are stored 32 bytes at a time: a load that
// spans
// several smaller stores would wait until they have reached the cache.
#pragma once

#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are only passed between inlined functions
#endif

#include <utility>

#include "base/half.hpp"
#if defined(PQ_NEON)
#include <arm_neon.h>
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#include "base/sixteen_lines.hpp"
#endif

namespace polyquant {
namespace {

using B32 = uint8_t __attribute__((vector_size(32)));
using F8 = float __attribute__((vector_size(32)));

struct alignas(64) Codes {
  int8_t q[256];
  float d[16], m[16];

#if defined(__AVX2__)
  // Integer multipliers of d for sub-blocks of 16: the even ones in the lower half, the odd ones in the upper.
  __m256i whole;
  __m128i natural;  // the same in natural order, as bytes
  float unit;

  PQ_INLINE void set_whole(__m128i scales, float one) {
    const __m128i apart = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    whole = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(scales, apart));
    natural = scales;
    unit = one;
  }
#endif

  PQ_INLINE void set(int group, const B32& codes) { std::memcpy(q + 32 * group, &codes, 32); }
  PQ_INLINE void set_d(int eight, const F8& x) { std::memcpy(d + 8 * eight, &x, 32); }
  PQ_INLINE void set_m(int eight, const F8& x) { std::memcpy(m + 8 * eight, &x, 32); }
};

PQ_INLINE B32 load32(const uint8_t* p) { return load<B32>(p); }

#if defined(PQ_NEON)
struct Pair {
  uint8x16_t half[2];
};
template <int i>
PQ_INLINE uint8x16_t half_of(const B32& x) {
  return std::bit_cast<Pair>(x).half[i];
}
PQ_INLINE B32 pair_of(uint8x16_t low, uint8x16_t high) { return std::bit_cast<B32>(Pair{{low, high}}); }
#endif
PQ_INLINE F8 all(float x) { return F8{} + x; }

PQ_INLINE float half_of(uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#elif defined(PQ_NEON)
  return float(std::bit_cast<__fp16>(bits));
#else
  return half_to_float(bits);
#endif
}
PQ_INLINE float half_at(const uint8_t* p) { return half_of(load<uint16_t>(p)); }

#if defined(__AVX512BW__)
// Blocks whose first four have their first fields in 64 bytes.
constexpr bool is_short(int stride) { return stride % 2 == 0 && stride >= 16 && stride <= 20; }

// The fp16 fields at the start of eight such blocks: of 64 bytes from b and 64 from block 4.
template <int stride>
PQ_INLINE __m128i eight_halves(const uint8_t* b) {
  constexpr auto at = [](int i) { return short(i < 4 ? i * stride / 2 : 32 + (i - 4) * stride / 2); };
  const __m512i which = _mm512_castsi128_si512(_mm_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)));
  return _mm512_castsi512_si128(
      _mm512_permutex2var_epi16(_mm512_loadu_si512(b), which, _mm512_loadu_si512(b + 4 * stride)));
}
#endif

// The fp16 fields at the start of eight blocks.
template <int stride>
PQ_INLINE F8 halves8(const uint8_t* b) {
#if defined(__AVX512BW__)
  if constexpr (is_short(stride)) return F8(_mm256_cvtph_ps(eight_halves<stride>(b)));
#endif
#if defined(__F16C__)
  const auto h = [b](int i) { return short(load<uint16_t>(b + i * stride)); };
  return F8(_mm256_cvtph_ps(_mm_setr_epi16(h(0), h(1), h(2), h(3), h(4), h(5), h(6), h(7))));
#else
  F8 out;
  PQ_LOOP
  for (int i = 0; i < 8; ++i) out[i] = half_at(b + i * stride);
  return out;
#endif
}

// (x >> shift) & mask, bytewise; mask < 256 >> shift
template <int shift>
PQ_INLINE B32 field(const B32& x, uint8_t mask) {
#if defined(__AVX2__)  // the compiler would mask twice, once for the shift
  return B32(_mm256_and_si256(_mm256_srli_epi16(__m256i(x), shift), _mm256_set1_epi8(char(mask))));
#else
  return x >> shift & mask;
#endif
}

// x << shift if no bit leaves its byte
template <int shift>
PQ_INLINE B32 raised(const B32& x) {
#if defined(__AVX2__)
  return B32(_mm256_slli_epi16(__m256i(x), shift));
#else
  return x << shift;
#endif
}

// Like `field`, for a shift known to the compiler after unrolling: 0, 2, 4, 6.
PQ_INLINE B32 quarter(const B32& x, int i) {
  return i == 0 ? x & 3 : i == 1 ? field<2>(x, 3) : i == 2 ? field<4>(x, 3) : field<6>(x, 3);
}

using I8x = int32_t __attribute__((vector_size(32)));

PQ_INLINE I8x ints8(uint64_t bytes) {
#if defined(__AVX2__)
  return I8x(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(bytes))));
#elif defined(PQ_NEON)
  using Eight = uint8_t __attribute__((vector_size(8)));
  return __builtin_convertvector(std::bit_cast<Eight>(bytes), I8x);
#else
  I8x out;
  for (int i = 0; i < 8; ++i) out[i] = int32_t(bytes >> (8 * i) & 255);
  return out;
#endif
}

PQ_INLINE F8 to_floats(const I8x& x) {
#if defined(__AVX2__)
  return F8(_mm256_cvtepi32_ps(__m256i(x)));
#else
  return __builtin_convertvector(x, F8);
#endif
}

// Numbers of the format E4M3 without their signs, 0 to 0x7e. The bits of the smallest are not read as those of a float:
// it would be subnormal, and multiplying it takes a hundred cycles.
PQ_INLINE F8 e4m3_magnitudes(const I8x& x) {
  const I8x tiny = x < 8, normal = (x << 20) + (120 << 23);
  return F8((tiny & I8x(to_floats(x) * 0x1p-9f)) | (~tiny & normal));
}

// Eight bytes as floats.
PQ_INLINE F8 floats8(uint64_t bytes) { return to_floats(ints8(bytes)); }

PQ_INLINE F8 signed_floats8(uint64_t bytes) { return floats8(bytes ^ 0x8080808080808080u) - 128.0f; }

// 16 bytes and 16 bytes.
PQ_INLINE B32 two16(const uint8_t* p, const uint8_t* q) {
#if defined(__AVX2__)
  return B32(_mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(q), reinterpret_cast<const __m128i*>(p)));
#else
  B32 out;
  std::memcpy(&out, p, 16), std::memcpy(reinterpret_cast<uint8_t*>(&out) + 16, q, 16);
  return out;
#endif
}

// Bit j -> byte j: `value` or 0.
PQ_INLINE B32 spread_bits(uint32_t bits, uint8_t value) {
#if defined(__AVX2__)
  const __m256i which = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201));
  const __m256i there = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(int(bits)), which), bit);
  return B32(_mm256_and_si256(_mm256_cmpeq_epi8(there, bit), _mm256_set1_epi8(char(value))));
#elif defined(PQ_NEON)
  const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u));
  const auto sixteen = [&](uint32_t x) PQ_FLAT {
    const uint8x16_t which = vcombine_u8(vdup_n_u8(uint8_t(x)), vdup_n_u8(uint8_t(x >> 8)));
    return vandq_u8(vtstq_u8(which, bit), vdupq_n_u8(value));
  };
  return pair_of(sixteen(bits), sixteen(bits >> 16));
#else
  B32 out;
  for (int j = 0; j < 32; ++j) out[j] = bits >> j & 1 ? value : 0;
  return out;
#endif
}

// table[x] for x in 0 ... 15
PQ_INLINE B32 look_up(const int8_t* table, const B32& x) {
#if defined(__AVX2__)
  const __m256i both = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  return B32(_mm256_shuffle_epi8(both, __m256i(x)));
#elif defined(PQ_NEON)
  const uint8x16_t all = vld1q_u8(reinterpret_cast<const uint8_t*>(table));
  return pair_of(vqtbl1q_u8(all, half_of<0>(x)), vqtbl1q_u8(all, half_of<1>(x)));
#else
  B32 out;
  for (int j = 0; j < 32; ++j) out[j] = uint8_t(table[x[j]]);
  return out;
#endif
}

PQ_INLINE B32 words(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  const uint64_t four[4] = {a, b, c, d};
#if defined(__AVX2__)
  return B32(_mm256_setr_epi64x(int64_t(four[0]), int64_t(four[1]), int64_t(four[2]), int64_t(four[3])));
#else
  B32 out;
  std::memcpy(&out, four, 32);
  return out;
#endif
}

// d and m of the eight groups of 32 of a unit.
struct Scales {
  F8 d, m;
};

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)

// A unit of sixteen rows: four adjacent columns of every row side by side, and the scales of sub-blocks.
struct RowPanel {
  alignas(64) int8_t q[8][8][64];          // [group of 32][quad][row][4]
  alignas(64) float d[16][16], m[16][16];  // [sub-block][row]

  // Codes of columns 4 j ... 4 j + 3 of a group; signed ones are raised by 128. As of FewSums (packed/rows_vnni.hpp),
  // calls lie between `begin` and `done` of the group; groups that overlap have different slots.
  PQ_INLINE void put(int group, int j, __m512i codes, int /*slot*/ = 0) { _mm512_store_si512(q[group][j], codes); }
  PQ_INLINE void begin(int, int = 0) {}
  PQ_INLINE void done(int, int = 0) {}
};

// (x >> shift) & mask, bytewise; mask < 256 >> shift
PQ_INLINE __m512i field64(__m512i x, unsigned shift, int mask) {
  return _mm512_and_si512(shift ? _mm512_srli_epi16(x, shift) : x, _mm512_set1_epi8(char(mask)));
}

// table[x] + raise for x in 0 ... 15
template <int raise>
PQ_INLINE __m512i look_up64(const int8_t* table, __m512i x) {
  const __m512i all = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  return _mm512_shuffle_epi8(_mm512_add_epi8(all, _mm512_set1_epi8(char(raise))), x);
}

// The lower fp16 number of each element.
PQ_INLINE __m512 low_halves(__m512i x) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)); }

// 16 bytes of each line: low nibbles are quads 4 h ... of group g, high ones those of group g + 1.
// code(x, g, j): the codes of nibbles.
template <class P, class F>
PQ_INLINE void put_two_groups(const SixteenLines& b, P& p, int g, int h, const F& code) {
  __m512i x[4];
  b.load(x);
  in_quads(x);
  PQ_UNROLL
  for (int j = 0; j < 4; ++j) {
    p.put(g, 4 * h + j, code(field64(x[j], 0, 15), 0, j), 0);
    p.put(g + 1, 4 * h + j, code(field64(x[j], 4, 15), 1, j), 1);
  }
}

// 16 bytes of each line, group g: low nibbles are columns 0 ... 15, high ones 16 ... 31. code(x, j): those of quad j.
template <class P, class F>
PQ_INLINE void put_nibbles(const SixteenLines& b, P& p, int g, const F& code) {
  __m512i x[4];
  b.load(x);
  in_quads(x);
  p.begin(g);
  PQ_UNROLL
  for (int j = 0; j < 4; ++j) {
    p.put(g, j, code(field64(x[j], 0, 15), j));
    p.put(g, 4 + j, code(field64(x[j], 4, 15), 4 + j));
  }
  p.done(g);
}

// 64 bytes of each line: two bits of each 32 bytes are a group, four groups in all. code(x, g): the codes of group g.
template <class P, class F>
PQ_INLINE void put_fields(const SixteenLines& b, P& p, const F& code) {
  for (int h = 0; h < 2; ++h) {
    p.begin(4 * h);
    PQ_UNROLL
    for (int k = 0; k < 2; ++k) {
      __m512i x[4];
      b.from(size_t(32 * h + 16 * k)).load(x);
      in_quads(x);
      PQ_UNROLL
      for (int j = 0; j < 4; ++j) PQ_UNROLL
      for (int g = 0; g < 4; ++g) p.put(4 * h + g, 4 * k + j, code(x[j], g));
    }
    p.done(4 * h);
  }
}

// The fp16 fields at the start of eight blocks of each line -> `to`, by block.
template <int stride>
PQ_INLINE void put_halves(const SixteenLines& b, float (*to)[16]) {
  __m512i x[4];
  PQ_UNROLL
  for (size_t i = 0; i < 4; ++i) {
    const auto at = [&](size_t line) { return eight_halves<stride>(b.first + line * b.stride); };
    x[i] = _mm512_castsi128_si512(at(i));
    x[i] = _mm512_inserti32x4(x[i], at(4 + i), 1);
    x[i] = _mm512_inserti32x4(x[i], at(8 + i), 2);
    x[i] = _mm512_inserti32x4(x[i], at(12 + i), 3);
  }
  in_quads(x);
  PQ_UNROLL
  for (int i = 0; i < 4; ++i) {
    _mm512_store_ps(to[2 * i], low_halves(x[i]));
    _mm512_store_ps(to[2 * i + 1], low_halves(_mm512_srli_epi32(x[i], 16)));
  }
}

// The order of the columns of a unit in four registers of codes (packed/single_rows_vnni.hpp). All but the last four
// are named as they are before `interleave`, which gives two or four registers the same scales in the same lanes.
enum class Order {
  natural,
  halves,     // of 128 columns the first halves of four groups of 32, and the second ones
  nibbles,    // of 128 columns groups 0 and 2, and 1 and 3
  adjacent,   // of 128 columns the even ones, and the odd ones
  fields,     // groups g and g + 4
  ternary,    // the same
  alternate,  // of 128 columns the even ones, and the odd ones
  eights,     // of 128 columns the first eight of each sixteen, and the others
  pairs,      // of each eight columns 0 and 2, 1 and 3, 4 and 6, 5 and 7
};

constexpr bool interleaved(Order order) { return order < Order::ternary; }

// Of each sixteen bytes the lower eight of both, and the upper eight.
PQ_INLINE void interleave(__m512i& a, __m512i& b) {
  const __m512i lower = _mm512_unpacklo_epi64(a, b);
  b = _mm512_unpackhi_epi64(a, b), a = lower;
}
PQ_INLINE void interleave(__m512i (&x)[4]) {
  interleave(x[0], x[2]), interleave(x[1], x[3]);
  std::swap(x[1], x[2]);
}

// Scales d and offsets m of a unit, one per sub-block: in all lanes, or in the lower eight.
struct UnitScales {
  __m512 d, m;
};

PQ_INLINE void both_nibbles(__m512i x, __m512i* codes) { codes[0] = field64(x, 0, 15), codes[1] = field64(x, 4, 15); }

// Fields of two bits in Order::ternary.
PQ_INLINE void put_two_bits(const uint8_t* p, __m512i (&codes)[4]) {
  const __m512i x = _mm512_loadu_si512(p);
  PQ_UNROLL
  for (int i = 0; i < 4; ++i) codes[i] = field64(x, unsigned(2 * i), 3);
}

// Bit g of each of 32 bytes is a further bit of group g, with the value `value`. The halves of register i belong to
// groups group(i) and group(i) + apart.
template <int value, int apart, class F>
PQ_INLINE void add_bits(const uint8_t* p, __m512i (&codes)[4], const F& group) {
  const __m512i all = _mm512_broadcast_i64x4(__m256i(load32(p)));
  PQ_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int bit = 1 << group(i);
    const __m512i bits = _mm512_inserti64x4(_mm512_set1_epi8(char(bit)), _mm256_set1_epi8(char(bit << apart)), 1);
    codes[i] = _mm512_mask_add_epi8(codes[i], _mm512_test_epi8_mask(all, bits), codes[i], _mm512_set1_epi8(value));
  }
}

// The nibbles of a unit, and their levels.
PQ_INLINE void put_all_nibbles(__m512i a, __m512i b, __m512i (&codes)[4]) {
  interleave(a, b);
  both_nibbles(a, codes), both_nibbles(b, codes + 2);
  std::swap(codes[1], codes[2]);
}
PQ_INLINE void put_all_levels(const int8_t* table, __m512i a, __m512i b, __m512i (&codes)[4]) {
  put_all_nibbles(a, b, codes);
  PQ_UNROLL
  for (int i = 0; i < 4; ++i) codes[i] = look_up64<0>(table, codes[i]);
}

// The levels of both nibbles.
PQ_INLINE void both_levels(const int8_t* table, __m512i x, __m512i* codes) {
  both_nibbles(x, codes);
  codes[0] = look_up64<0>(table, codes[0]), codes[1] = look_up64<0>(table, codes[1]);
}

// Sixteen bytes each from four blocks.
PQ_INLINE __m512i four_blocks(const uint8_t* b, int stride) {
  const auto at = [=](int i) { return reinterpret_cast<const __m128i*>(b + i * stride); };
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu2_m128i(at(1), at(0))),
                            _mm256_loadu2_m128i(at(3), at(2)), 1);
}

constexpr auto same_codes = [](__m512i x, auto...) { return x; };

// The first byte of each of sixteen 32-bit elements, four times: indices for a bytewise shuffle.
PQ_INLINE __m512i first_bytes() {
  return _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
}

// Byte i of each element as a number.
PQ_INLINE __m512 byte_floats(__m512i x, int i) {
  return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(x, unsigned(8 * i)), _mm512_set1_epi32(255)));
}

#endif

// ---------------------------------------------------------------- legacy types: small blocks start with fp16 scales

template <bool affine, bool fifth>
struct NibbleCodes {
  static constexpr int block = 32, high = affine ? 4 : 2, start = high + (fifth ? 4 : 0), bytes = start + 16, sub = 32,
                       top = fifth ? 31 : 15, centre = affine ? 0 : (top + 1) / 2;
  static constexpr bool offset = true, wide = false, paired = true, whole = false;
  PQ_INLINE static Scales scales(const uint8_t* b) {
    const F8 d = halves8<bytes>(b);
    return {d, affine ? halves8<bytes>(b + 2) : d * -float((top + 1) / 2)};
  }

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  static constexpr Order order = Order::halves;
  PQ_INLINE static void registers(const uint8_t* b, __m512i (&codes)[4]) {
    if constexpr (!fifth)
      return put_all_nibbles(four_blocks(b + start, bytes), four_blocks(b + 4 * bytes + start, bytes), codes);
    PQ_UNROLL
    for (int h = 0; h < 4; h += 2, b += 4 * bytes) {
      both_nibbles(four_blocks(b + start, bytes), codes + h);
      if constexpr (fifth) {
        uint64_t low = 0, upper = 0;
        PQ_UNROLL
        for (int g = 0; g < 4; ++g) {
          const uint64_t bits = load<uint32_t>(b + g * bytes + high);
          low |= (bits & 0xffff) << (16 * g), upper |= bits >> 16 << (16 * g);
        }
        codes[h] = _mm512_mask_add_epi8(codes[h], low, codes[h], _mm512_set1_epi8(16));
        codes[h + 1] = _mm512_mask_add_epi8(codes[h + 1], upper, codes[h + 1], _mm512_set1_epi8(16));
      }
    }
    interleave(codes);
  }

  template <class P>
  PQ_INLINE static void sixteen(const SixteenLines& b, P& p) {
    const __m512i lines = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                             _mm512_set1_epi32(int(b.stride)));
    for (int g = 0; g < 8; ++g) {
      __m512i bits = lines;  // bit i of four bytes is that of column i
      if constexpr (fifth) bits = _mm512_i32gather_epi32(lines, b.first + g * bytes + high, 1);
      put_nibbles(b.from(size_t(g * bytes + start)), p, g, [&](__m512i codes, int j) {
        if constexpr (!fifth) return codes;
        const __m512i byte = _mm512_shuffle_epi8(bits, _mm512_add_epi32(first_bytes(), _mm512_set1_epi8(char(j / 2))));
        const __mmask64 there = _mm512_test_epi8_mask(byte, _mm512_set1_epi32(j % 2 ? int(0x80402010) : 0x08040201));
        return _mm512_mask_add_epi8(codes, there, codes, _mm512_set1_epi8(16));
      });
    }
  }

  PQ_INLINE static void sixteen_scales(const SixteenLines& b, RowPanel& p)
    requires(is_short(bytes))
  {
    put_halves<bytes>(b, p.d);
    if (affine) put_halves<bytes>(b.from(2), p.m);
  }
#endif

  PQ_INLINE static void take(const uint8_t* b, int, Codes& c) {
    const Scales s = scales(b);
    c.set_d(0, s.d);
    c.set_m(0, s.m);
    PQ_UNROLL
    for (int g = 0; g < 8; g += 2, b += 2 * bytes) {
      const B32 x = two16(b + start, b + bytes + start);
      B32 low = x & 15, upper = field<4>(x, 15);
      if constexpr (fifth) {
        const uint32_t h = load<uint32_t>(b + high), k = load<uint32_t>(b + bytes + high);
        low |= spread_bits((h & 0xffff) | k << 16, 16);
        upper |= spread_bits(h >> 16 | (k & 0xffff0000u), 16);
      }
      c.set(g, low);
      c.set(g + 1, upper);
    }
  }
};

template <int head>
struct ByteCodes {
  static constexpr int block = 32, bytes = head + 32, sub = 32, top = 0;
  static constexpr bool offset = false, wide = false, paired = false, whole = false;
  PQ_INLINE static Scales scales(const uint8_t* b) { return {halves8<bytes>(b), F8{}}; }

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  static constexpr Order order = Order::natural;
  PQ_INLINE static void registers(const uint8_t* b, __m512i (&codes)[4]) {
    b += head;
    PQ_UNROLL
    for (int i = 0; i < 4; ++i, b += 2 * bytes)
      codes[i] = _mm512_inserti64x4(_mm512_castsi256_si512(__m256i(load32(b))), __m256i(load32(b + bytes)), 1);
    interleave(codes);
  }

  template <class P>
  PQ_INLINE static void sixteen(const SixteenLines& b, P& p) {
    for (int g = 0; g < 8; ++g) {
      p.begin(g);
      PQ_UNROLL
      for (int k = 0; k < 2; ++k) {
        __m512i x[4];
        b.from(size_t(g * bytes + head + 16 * k)).load(x);
        in_quads(x);
        PQ_UNROLL
        for (int j = 0; j < 4; ++j) p.put(g, 4 * k + j, _mm512_xor_si512(x[j], _mm512_set1_epi8(-128)));
      }
      p.done(g);
    }
  }
#endif

  PQ_INLINE static void take(const uint8_t* b, int, Codes& c) {
    c.set_d(0, scales(b).d);
    PQ_UNROLL
    for (int g = 0; g < 8; ++g) c.set(g, load32(b + g * bytes + head));
  }
};

struct Q1_0Codes {
  static constexpr int block = 128, bytes = 18, sub = 32, top = 1;
  static constexpr bool offset = true, wide = false, paired = false, whole = false;
  PQ_INLINE static void take(const uint8_t* b, int, Codes& c) {
    const float x = half_at(b), y = half_at(b + 18);
    const F8 s = {x, x, x, x, y, y, y, y};
    c.set_d(0, s + s);
    c.set_m(0, -s);
    PQ_UNROLL
    for (int g = 0; g < 8; ++g) c.set(g, spread_bits(load<uint32_t>(b + g / 4 * 18 + 2 + g % 4 * 4), 1));
  }
};

// Four adjacent weights per byte, lowest bits first: eight bytes.
PQ_INLINE B32 quarters(const uint8_t* p) {
#if defined(__AVX2__)
  const __m256i which =
      _mm256_setr_epi64x(0x0101010100000000, 0x0303030302020202, 0x0505050504040404, 0x0707070706060606);
  const __m256i x =
      _mm256_shuffle_epi8(_mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), which);
  // Byte 4i + f must be shifted by 2f: two multiplications of 16-bit lanes move the bits of each to the top of a byte.
  const __m256i even = _mm256_and_si256(x, _mm256_set1_epi16(0x00ff));
  const __m256i low = _mm256_srli_epi16(_mm256_mullo_epi16(even, _mm256_set1_epi32(0x00040040)), 6);
  const __m256i odd = _mm256_srli_epi16(_mm256_mullo_epi16(even, _mm256_set1_epi32(0x00010010)), 6);
  const __m256i three = _mm256_set1_epi16(3);
  return B32(_mm256_or_si256(_mm256_and_si256(low, three), _mm256_slli_epi16(_mm256_and_si256(odd, three), 8)));
#elif defined(PQ_NEON)
  const int8x16_t down = vreinterpretq_s8_u32(vdupq_n_u32(0xfafcfe00u));  // 0, -2, -4, -6
  const uint8x16_t bytes = vcombine_u8(vld1_u8(p), vdup_n_u8(0));
  const auto sixteen = [&](uint64_t first, uint64_t second) PQ_FLAT {
    const uint8x16_t which = vcombine_u8(vcreate_u8(first), vcreate_u8(second));
    return vandq_u8(vshlq_u8(vqtbl1q_u8(bytes, which), down), vdupq_n_u8(3));
  };
  return pair_of(sixteen(0x0101010100000000, 0x0303030302020202), sixteen(0x0505050504040404, 0x0707070706060606));
#else
  B32 out;
  for (int j = 0; j < 32; ++j) out[j] = p[j / 4] >> (2 * (j & 3)) & 3;
  return out;
#endif
}

struct Q2_0Codes {
  static constexpr int block = 64, bytes = 18, sub = 32, top = 3, centre = 1;
  static constexpr bool offset = true, wide = false, paired = false, whole = false;
  PQ_INLINE static void take(const uint8_t* b, int, Codes& c) {
    const float w = half_at(b), x = half_at(b + 18), y = half_at(b + 36), z = half_at(b + 54);
    const F8 s = {w, w, x, x, y, y, z, z};
    c.set_d(0, s);
    c.set_m(0, -s);
    PQ_UNROLL
    for (int g = 0; g < 8; ++g) c.set(g, quarters(b + g / 2 * 18 + 2 + g % 2 * 8));
  }
};

// ---------------------------------------------------------------- K types: blocks of 256

// Header of Q4_K and Q5_K: d, dmin, 8 scales and 8 minima of 6 bits in 12 bytes.
PQ_INLINE Scales scales_and_minima(const uint8_t* b) {
  const uint32_t x = load<uint32_t>(b + 4), y = load<uint32_t>(b + 8), z = load<uint32_t>(b + 12);
  const uint64_t s = uint64_t(x & 0x3f3f3f3fu) | uint64_t((z & 0x0f0f0f0fu) | (x >> 2 & 0x30303030u)) << 32;
  const uint64_t o = uint64_t(y & 0x3f3f3f3fu) | uint64_t((z >> 4 & 0x0f0f0f0fu) | (y >> 2 & 0x30303030u)) << 32;
  return {floats8(s) * half_at(b), floats8(o) * -half_at(b + 2)};
}

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
// The same of sixteen lines.
PQ_INLINE void put_scales_and_minima(const SixteenLines& b, RowPanel& p) {
  __m512i x[4];
  b.load(x);
  in_quads(x);
  const __m512i minus = _mm512_set1_epi32(int(0x8000));  // of fp16
  const __m512 d = low_halves(x[0]), min = low_halves(_mm512_xor_si512(_mm512_srli_epi32(x[0], 16), minus));
  const auto six = [](__m512i y) { return _mm512_and_si512(y, _mm512_set1_epi32(0x3f3f3f3f)); };
  const auto four_and_two = [&](__m512i z, __m512i y) {
    return _mm512_or_si512(_mm512_and_si512(z, _mm512_set1_epi32(0x0f0f0f0f)),
                           _mm512_and_si512(_mm512_srli_epi32(y, 2), _mm512_set1_epi32(0x30303030)));
  };
  const __m512i s[2] = {six(x[1]), four_and_two(x[3], x[1])};
  const __m512i o[2] = {six(x[2]), four_and_two(_mm512_srli_epi32(x[3], 4), x[2])};
  PQ_UNROLL
  for (int i = 0; i < 8; ++i) {
    _mm512_store_ps(p.d[i], _mm512_mul_ps(byte_floats(s[i / 4], i % 4), d));
    _mm512_store_ps(p.m[i], _mm512_mul_ps(byte_floats(o[i / 4], i % 4), min));
  }
}
#endif

// Bit `from` of every byte, moved to bit `to`; both known to the compiler after unrolling.
PQ_INLINE B32 move_bit(const B32& x, int from, int to) {
#if defined(__AVX2__)
  const __m256i v = __m256i(x), moved = from > to ? _mm256_srli_epi16(v, from - to) : _mm256_slli_epi16(v, to - from);
  return B32(_mm256_and_si256(moved, _mm256_set1_epi8(char(1 << to))));
#else
  return (x >> from & 1) << to;
#endif
}

struct Q2_KCodes {
  static constexpr int block = 256, bytes = 84, zero = 0, sub = 16, top = 3;
  static constexpr bool offset = true, wide = false, paired = false, whole = true;

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  static constexpr Order order = Order::fields;
  PQ_INLINE static void registers(const uint8_t* b, __m512i (&codes)[4]) {
    put_two_bits(b + 16, codes);
    interleave(codes);
  }

  PQ_INLINE static UnitScales unit_scales(const uint8_t* b) {
    const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b)));
    const __m512 d = _mm512_cvtepi32_ps(_mm512_and_si512(x, _mm512_set1_epi32(15)));
    return {_mm512_mul_ps(d, _mm512_set1_ps(half_at(b + 80))),
            _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(x, 4)), _mm512_set1_ps(-half_at(b + 82)))};
  }
#endif

  PQ_INLINE static void take(const uint8_t* b, int, Codes& c) {
#if defined(__AVX2__)
    c.set_whole(_mm_and_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b)), _mm_set1_epi8(15)),
                half_at(b + 80));
#endif
    const float d = half_at(b + 80), min = -half_at(b + 82);
    constexpr uint64_t nibble = 0x0f0f0f0f0f0f0f0fu;
    for (int e = 0; e < 2; ++e) {
      const uint64_t s = load<uint64_t>(b + 8 * e);
      c.set_d(e, floats8(s & nibble) * d);
      c.set_m(e, floats8(s >> 4 & nibble) * min);
    }
    PQ_UNROLL
    for (int g = 0; g < 8; ++g) c.set(g, quarter(load32(b + 16 + g / 4 * 32), g & 3));
  }
};

struct Q3_KCodes {
  static constexpr int block = 256, bytes = 110, zero = 4, sub = 16, top = 7;
  static constexpr bool offset = true, wide = false, paired = false, whole = true;

  // Sixteen scales of six bits, raised by 32, as bytes.
  struct SixBits {
    uint64_t low, high;
#if defined(__AVX2__)
    PQ_INLINE __m128i centred() const {
      return _mm_sub_epi8(_mm_set_epi64x(int64_t(high), int64_t(low)), _mm_set1_epi8(32));
    }
#endif
  };
  PQ_INLINE static SixBits six_bit_scales(const uint8_t* b) {
    const uint64_t low = load<uint64_t>(b + 96);
    const uint32_t high = load<uint32_t>(b + 104);
    const uint64_t h0 = (high & 0x03030303u) | uint64_t(high >> 2 & 0x03030303u) << 32;
    const uint64_t h1 = (high >> 4 & 0x03030303u) | uint64_t(high >> 6 & 0x03030303u) << 32;
    constexpr uint64_t nibble = 0x0f0f0f0f0f0f0f0fu;
    return {(low & nibble) | h0 << 4, (low >> 4 & nibble) | h1 << 4};
  }

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  static constexpr Order order = Order::fields;
  PQ_INLINE static void registers(const uint8_t* b, __m512i (&codes)[4]) {
    put_two_bits(b + 32, codes);
    add_bits<4, 4>(b, codes, [](int i) { return i; });
    interleave(codes);
  }

  PQ_INLINE static UnitScales unit_scales(const uint8_t* b) {
    const __m512 s = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(six_bit_scales(b).centred()));
    const __m512 d = _mm512_mul_ps(s, _mm512_set1_ps(half_at(b + 108)));
    return {d, _mm512_mul_ps(d, _mm512_set1_ps(-4))};
  }
#endif

  PQ_INLINE static void take(const uint8_t* b, int, Codes& c) {
    const SixBits s = six_bit_scales(b);
#if defined(__AVX2__)
    c.set_whole(s.centred(), half_at(b + 108));
#endif
    const F8 x = (floats8(s.low) - 32.0f) * half_at(b + 108), y = (floats8(s.high) - 32.0f) * half_at(b + 108);
    c.set_d(0, x);
    c.set_d(1, y);
    c.set_m(0, x * -4.0f);
    c.set_m(1, y * -4.0f);
    const B32 mask = load32(b);
    PQ_UNROLL
    for (int g = 0; g < 8; ++g) c.set(g, quarter(load32(b + 32 + g / 4 * 32), g & 3) | move_bit(mask, g, 2));
  }
};

struct Q4_KCodes {
  static constexpr int block = 256, bytes = 144, sub = 32, top = 15;
  static constexpr bool offset = true, wide = false, paired = false, whole = false;
  PQ_INLINE static Scales scales(const uint8_t* b) { return scales_and_minima(b); }

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  static constexpr Order order = Order::nibbles;
  PQ_INLINE static void registers(const uint8_t* b, __m512i (&codes)[4]) {
    put_all_nibbles(_mm512_loadu_si512(b + 16), _mm512_loadu_si512(b + 80), codes);
  }

  template <class P>
  PQ_INLINE static void sixteen(const SixteenLines& b, P& p) {
    for (int g = 0; g < 8; g += 2) {
      p.begin(g, 0), p.begin(g + 1, 1);
      PQ_UNROLL
      for (int h = 0; h < 2; ++h) put_two_groups(b.from(size_t(16 + 16 * g + 16 * h)), p, g, h, same_codes);
      p.done(g, 0), p.done(g + 1, 1);
    }
  }

  PQ_INLINE static void sixteen_scales(const SixteenLines& b, RowPanel& p) { put_scales_and_minima(b, p); }
#endif

  PQ_INLINE static void take(const uint8_t* b, int, Codes& c) {
    const Scales s = scales(b);
    c.set_d(0, s.d);
    c.set_m(0, s.m);
    PQ_UNROLL
    for (int g = 0; g < 8; g += 2) {
      const B32 x = load32(b + 16 + 16 * g);
      c.set(g, x & 15);
      c.set(g + 1, field<4>(x, 15));
    }
  }
};

struct Q5_KCodes {
  static constexpr int block = 256, bytes = 176, sub = 32, top = 31;
  static constexpr bool offset = true, wide = false, paired = false, whole = false;
  PQ_INLINE static Scales scales(const uint8_t* b) { return scales_and_minima(b); }

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  static constexpr Order order = Order::nibbles;
  PQ_INLINE static void registers(const uint8_t* b, __m512i (&codes)[4]) {
    PQ_UNROLL
    for (int i = 0; i < 4; i += 2) both_nibbles(_mm512_loadu_si512(b + 48 + 32 * i), codes + i);
    add_bits<16, 2>(b + 16, codes, [](int i) { return i / 2 * 4 + i % 2; });
    interleave(codes);
  }

  template <class P>
  PQ_INLINE static void sixteen(const SixteenLines& b, P& p) {
    __m512i bits[2][4];  // bit g of each byte is the fifth bit of group g
    PQ_UNROLL
    for (int h = 0; h < 2; ++h) b.from(size_t(16 + 16 * h)).load(bits[h]), in_quads(bits[h]);
    for (int g = 0; g < 8; g += 2) {
      p.begin(g, 0), p.begin(g + 1, 1);
      PQ_UNROLL
      for (int h = 0; h < 2; ++h)
        put_two_groups(b.from(size_t(48 + 16 * g + 16 * h)), p, g, h, [&](__m512i codes, int upper, int j) {
          const __mmask64 there = _mm512_test_epi8_mask(bits[h][j], _mm512_set1_epi8(char(1 << (g + upper))));
          return _mm512_mask_add_epi8(codes, there, codes, _mm512_set1_epi8(16));
        });
      p.done(g, 0), p.done(g + 1, 1);
    }
  }

  PQ_INLINE static void sixteen_scales(const SixteenLines& b, RowPanel& p) { put_scales_and_minima(b, p); }
#endif

  PQ_INLINE static void take(const uint8_t* b, int, Codes& c) {
    const Scales s = scales(b);
    c.set_d(0, s.d);
    c.set_m(0, s.m);
    const B32 fifth = load32(b + 16);
    PQ_UNROLL
    for (int g = 0; g < 8; ++g)
      c.set(g, (g & 1 ? field<4>(load32(b + 48 + g / 2 * 32), 15) : load32(b + 48 + g / 2 * 32) & 15) |
                   move_bit(fifth, g, 4));
  }
};

struct Q6_KCodes {
  static constexpr int block = 256, bytes = 210, zero = 32, sub = 16, top = 63;
  static constexpr bool offset = true, wide = false, paired = false, whole = true;
  PQ_INLINE static Scales scales(const uint8_t* b, int e) {
    const F8 d = signed_floats8(load<uint64_t>(b + 192 + 8 * e)) * half_at(b + 208);
    return {d, d * -32.0f};
  }

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  static constexpr Order order = Order::natural;
  PQ_INLINE static void registers(const uint8_t* b, __m512i (&codes)[4]) {
    // The upper bits of two groups at a time, at bits 4 and 5.
    const __m512i left = _mm512_inserti64x4(_mm512_set1_epi16(4), _mm256_set1_epi16(2), 1),
                  right = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(2), 1);
    PQ_UNROLL
    for (int i = 0; i < 4; i += 2) {
      both_nibbles(_mm512_loadu_si512(b + 32 * i), codes + i);
      const __m512i top2 = _mm512_broadcast_i64x4(__m256i(load32(b + 128 + 16 * i)));
      constexpr int low_or_masked = 0xf8;  // a | (b & c)
      const __m512i mask = _mm512_set1_epi8(48);
      codes[i] = _mm512_ternarylogic_epi32(codes[i], _mm512_sllv_epi16(top2, left), mask, low_or_masked);
      codes[i + 1] = _mm512_ternarylogic_epi32(codes[i + 1], _mm512_srlv_epi16(top2, right), mask, low_or_masked);
    }
    interleave(codes);
  }

  PQ_INLINE static UnitScales unit_scales(const uint8_t* b) {
    const __m512i scales = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b + 192)));
    const __m512 d = _mm512_mul_ps(_mm512_cvtepi32_ps(scales), _mm512_set1_ps(half_at(b + 208)));
    return {d, _mm512_mul_ps(d, _mm512_set1_ps(-32))};
  }
#endif

  PQ_INLINE static void take(const uint8_t* b, int, Codes& c) {
#if defined(__AVX2__)
    c.set_whole(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b + 192)), half_at(b + 208));
#endif
    for (int e = 0; e < 2; ++e) {
      const Scales s = scales(b, e);
      c.set_d(e, s.d);
      c.set_m(e, s.m);
    }
    for (int h = 0; h < 2; ++h) {
      const B32 x = load32(b + 64 * h), y = load32(b + 64 * h + 32), top2 = load32(b + 128 + 32 * h);
      c.set(4 * h, (x & 15) | raised<4>(top2 & 3));
      c.set(4 * h + 1, (y & 15) | raised<2>(top2 & 12));
      c.set(4 * h + 2, field<4>(x, 15) | (top2 & 48));
      c.set(4 * h + 3, field<4>(y, 15) | field<2>(top2, 48));
    }
  }
};

struct Q8_KCodes {
  static constexpr int block = 256, bytes = 292, sub = 32, top = 0;
  static constexpr bool offset = false, wide = false, paired = false, whole = false;
  PQ_INLINE static void take(const uint8_t* b, int, Codes& c) {
    c.set_d(0, all(load<float>(b)));
    PQ_UNROLL
    for (int g = 0; g < 8; ++g) c.set(g, load32(b + 4 + 32 * g));
  }
};

// ---------------------------------------------------------------- sixteen levels: a table lookup of nibbles

alignas(16) constexpr int8_t kLevels4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
alignas(16) constexpr int8_t kTwiceE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct Iq4NlCodes {
  static constexpr int block = 32, bytes = 18, sub = 32, top = 0;
  static constexpr bool offset = false, wide = false, paired = true, whole = false;
  PQ_INLINE static Scales scales(const uint8_t* b) { return {halves8<18>(b), F8{}}; }

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  static constexpr Order order = Order::halves;
  PQ_INLINE static void registers(const uint8_t* b, __m512i (&codes)[4]) {
    put_all_levels(kLevels4, four_blocks(b + 2, 18), four_blocks(b + 74, 18), codes);
  }

  template <class P>
  PQ_INLINE static void sixteen(const SixteenLines& b, P& p) {
    for (int g = 0; g < 8; ++g)
      put_nibbles(b.from(size_t(18 * g + 2)), p, g, [](__m512i x, int) { return look_up64<128>(kLevels4, x); });
  }

  PQ_INLINE static void sixteen_scales(const SixteenLines& b, RowPanel& p) { put_halves<18>(b, p.d); }
#endif

  PQ_INLINE static void take(const uint8_t* b, int, Codes& c) {
    c.set_d(0, scales(b).d);
    PQ_UNROLL
    for (int g = 0; g < 8; g += 2) {
      const B32 x = two16(b + 18 * g + 2, b + 18 * g + 20);
      c.set(g, look_up(kLevels4, x & 15));
      c.set(g + 1, look_up(kLevels4, field<4>(x, 15)));
    }
  }
};

struct Iq4XsCodes {
  static constexpr int block = 256, bytes = 136, sub = 32, top = 0;
  static constexpr bool offset = false, wide = false, paired = true, whole = false;
  PQ_INLINE static Scales scales(const uint8_t* b) {
    const I8x eight = {0, 1, 2, 3, 4, 5, 6, 7}, low = I8x{} + int32_t(load<uint32_t>(b + 4)),
              high = I8x{} + load<uint16_t>(b + 2);
    const I8x whole_scales = (low >> (4 * eight) & 15) | (high >> (2 * eight) & 3) << 4;
    return {(to_floats(whole_scales) - 32.0f) * half_at(b), F8{}};
  }

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  static constexpr Order order = Order::halves;
  PQ_INLINE static void registers(const uint8_t* b, __m512i (&codes)[4]) {
    put_all_levels(kLevels4, _mm512_loadu_si512(b + 8), _mm512_loadu_si512(b + 72), codes);
  }

  template <class P>
  PQ_INLINE static void sixteen(const SixteenLines& b, P& p) {
    for (int g = 0; g < 8; ++g)
      put_nibbles(b.from(size_t(8 + 16 * g)), p, g, [](__m512i x, int) { return look_up64<128>(kLevels4, x); });
  }
#endif

  PQ_INLINE static void take(const uint8_t* b, int, Codes& c) {
    c.set_d(0, scales(b).d);
    PQ_UNROLL
    for (int g = 0; g < 8; g += 2) {
      const B32 x = load32(b + 8 + 16 * g);
      c.set(g, look_up(kLevels4, x & 15));
      c.set(g + 1, look_up(kLevels4, field<4>(x, 15)));
    }
  }
};

struct Mxfp4Codes {
  static constexpr int block = 32, bytes = 17, sub = 32, top = 0, least = -12;
  static constexpr bool offset = false, wide = false, paired = true, whole = false;
  PQ_INLINE static Scales scales(const uint8_t* b) {
    uint64_t exponents = 0;
    for (int g = 0; g < 8; ++g) exponents |= uint64_t(b[17 * g]) << (8 * g);
    const I8x e = ints8(exponents);  // half of 2^(e - 127): the codes count halves
    const I8x tiny = e < 2, subnormal = (e + 1) * 0x00200000, normal = (e - 1) << 23;
    return {F8((tiny & subnormal) | (~tiny & normal)), F8{}};
  }

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  static constexpr Order order = Order::halves;
  PQ_INLINE static void registers(const uint8_t* b, __m512i (&codes)[4]) {
    put_all_levels(kTwiceE2m1, four_blocks(b + 1, 17), four_blocks(b + 69, 17), codes);
  }

  template <class P>
  PQ_INLINE static void sixteen(const SixteenLines& b, P& p) {
    for (int g = 0; g < 8; ++g)
      put_nibbles(b.from(size_t(17 * g + 1)), p, g, [](__m512i x, int) { return look_up64<128>(kTwiceE2m1, x); });
  }
#endif

  PQ_INLINE static void take(const uint8_t* b, int, Codes& c) {
    c.set_d(0, scales(b).d);
    PQ_UNROLL
    for (int g = 0; g < 8; g += 2) {
      const B32 x = two16(b + 17 * g + 1, b + 17 * g + 18);
      c.set(g, look_up(kTwiceE2m1, x & 15));
      c.set(g + 1, look_up(kTwiceE2m1, field<4>(x, 15)));
    }
  }
};

PQ_INLINE uint64_t both(uint32_t low, uint32_t high) { return low | uint64_t(high) << 32; }

struct Nvfp4Codes {
  static constexpr int block = 64, bytes = 36, sub = 16, top = 0, least = -12;
  static constexpr bool offset = false, wide = false, paired = true, whole = false;

  // Halves of unsigned E4M3 values; 0x7f is 0 and the top bit is ignored, as in ggml.
  PQ_INLINE static F8 eight_scales(const uint8_t* b, int e) {
    const I8x x = ints8(both(load<uint32_t>(b + 72 * e), load<uint32_t>(b + 72 * e + 36))) & 0x7f;
    return e4m3_magnitudes(x & (x != 0x7f)) * 0.5f;
  }

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  static constexpr Order order = Order::eights;
  PQ_INLINE static void registers(const uint8_t* b, __m512i (&codes)[4]) {
    PQ_UNROLL
    for (int i = 0; i < 4; i += 2, b += 2 * bytes) {
      const __m512i x = _mm512_inserti64x4(_mm512_castsi256_si512(__m256i(load32(b + 4))), __m256i(load32(b + 40)), 1);
      both_levels(kTwiceE2m1, x, codes + i);
    }
  }

  PQ_INLINE static UnitScales unit_scales(const uint8_t* b) {
    const __m512 low = _mm512_castps256_ps512(__m256(eight_scales(b, 0)));
    const __m256d high = _mm256_castps_pd(__m256(eight_scales(b, 1)));
    return {_mm512_castpd_ps(_mm512_insertf64x4(_mm512_castps_pd(low), high, 1)), _mm512_setzero_ps()};
  }
#endif

  PQ_INLINE static void take(const uint8_t* b, int, Codes& c) {
    for (int e = 0; e < 2; ++e) c.set_d(e, eight_scales(b, e));
    PQ_UNROLL
    for (int g = 0; g < 8; g += 2) {  // 8 bytes per sub-block: its low nibbles, its high nibbles
      using Eight = uint64_t __attribute__((vector_size(32)));
      const B32 x = load32(b + 18 * g + 4);
      const Eight low = Eight(look_up(kTwiceE2m1, x & 15)), high = Eight(look_up(kTwiceE2m1, field<4>(x, 15)));
      c.set(g, B32(__builtin_shufflevector(low, high, 0, 4, 2, 6)));
      c.set(g + 1, B32(__builtin_shufflevector(low, high, 1, 5, 3, 7)));
    }
  }
};

// ---------------------------------------------------------------- ternary types: codes 0, 1, 2

PQ_INLINE void one_scale(float s, Codes& c) {
  c.set_d(0, all(s));
  c.set_m(0, all(-s));
}

// The next base-3 digit of every byte: each byte holds ceil(value * 256 / 243) after multiplication by the power of 3.
PQ_INLINE B32 digit(const B32& x) {
#if defined(__AVX2__)
  // floor(3 x / 256) = (x + x / 2) / 128 with the average instruction: avg(x, avg(x, 0)) rounds up, so subtract first.
  const __m256i v = __m256i(x), low = _mm256_set1_epi16(0x00ff), three = _mm256_set1_epi16(3);
  const __m256i even = _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_and_si256(v, low), three), 8);
  const __m256i odd = _mm256_andnot_si256(low, _mm256_mullo_epi16(_mm256_srli_epi16(v, 8), three));
  return B32(_mm256_or_si256(even, odd));
#elif defined(PQ_NEON)
  const auto sixteen = [](uint8x16_t v) PQ_FLAT {
    const uint8x8_t three = vdup_n_u8(3);
    return vcombine_u8(vshrn_n_u16(vmull_u8(vget_low_u8(v), three), 8),
                       vshrn_n_u16(vmull_u8(vget_high_u8(v), three), 8));
  };
  return pair_of(sixteen(half_of<0>(x)), sixteen(half_of<1>(x)));
#else
  B32 out;
  for (int j = 0; j < 32; ++j) out[j] = uint8_t(uint16_t(x[j]) * 3 >> 8);
  return out;
#endif
}

struct Tq1Codes {
  static constexpr int block = 256, bytes = 54, sub = 32, top = 2, centre = 1;
  static constexpr bool offset = true, wide = true, paired = false, whole = false;
  PQ_INLINE static void take(const uint8_t* b, int, Codes& c) {
    one_scale(half_at(b + 52), c);
    B32 x = load32(b);
    for (int g = 0; g < 5; ++g, x = x + x + x) c.set(g, digit(x));
    // 16 bytes of five digits, 4 bytes of four: rows of 32 consist of two steps of 16, then of four steps of 4
    const uint64_t low = load<uint64_t>(b + 32), high = load<uint64_t>(b + 40);
    const B32 powers = words(0x0101010101010101u, 0x0101010101010101u, 0x0303030303030303u, 0x0303030303030303u);
    const B32 y = words(low, high, low, high) * powers;
    c.set(5, digit(y));
    c.set(6, digit(y * 9));
    const B32 fifth = digit(y * 81);
    const uint32_t last = load<uint32_t>(b + 48);
    const uint64_t z = both(last, last);
    const B32 fours = words(z, z, z, z) * words(0x0303030301010101u, 0x1b1b1b1b09090909u, 0, 0);
    const B32 tail = digit(fours);
    c.set(7, words(word(fifth, 0), word(fifth, 1), word(tail, 0), word(tail, 1)));
  }

 private:
  PQ_INLINE static uint64_t word(const B32& x, int i) {
    using W4 = uint64_t __attribute__((vector_size(32)));
    return W4(x)[i];
  }
};

struct Tq2Codes {
  static constexpr int block = 256, bytes = 66, sub = 32, top = 3, centre = 1;
  static constexpr bool offset = true, wide = true, paired = false, whole = false;
  PQ_INLINE static Scales scales(const uint8_t* b) {
    const float d = half_at(b + 64);
    return {all(d), all(-d)};
  }

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  static constexpr Order order = Order::ternary;
  PQ_INLINE static void registers(const uint8_t* b, __m512i (&codes)[4]) { put_two_bits(b, codes); }

  template <class P>
  PQ_INLINE static void sixteen(const SixteenLines& b, P& p) {
    put_fields(b, p, [](__m512i x, int g) { return field64(x, unsigned(2 * g), 3); });
  }
#endif

  PQ_INLINE static void take(const uint8_t* b, int, Codes& c) {
    one_scale(half_at(b + 64), c);
    PQ_UNROLL
    for (int g = 0; g < 8; ++g) c.set(g, quarter(load32(b + g / 4 * 32), g & 3));
  }
};

// Symbols 0, 1, 2 are -1, 0, +1; 3 is never written and reads as 0 (codecs/ternary.py). The same two bits shifted left:
// 4, 8,
// 12.
alignas(16) constexpr int8_t kSymbols[16] = {0, 1, 2, 1, 1, 0, 0, 0, 2, 0, 0, 0, 1};
alignas(16) constexpr int8_t kTrinitySymbols[16] = {1, 2, 0, 1};  // 0, +1, -1, 0

// I2_S: four symbols per byte, the first in the highest bits.
struct I2SX86Codes {
  static constexpr int block = 128, bytes = 32, sub = 32, top = 2, centre = 1;
  static constexpr bool offset = true, wide = true, paired = false, whole = false;

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  PQ_INLINE static Scales scales(const uint8_t*) { return {all(1), all(-1)}; }
  static constexpr Order order = Order::ternary;
  PQ_INLINE static void registers(const uint8_t* b, __m512i (&codes)[4]) {
    const __m512i x = _mm512_loadu_si512(b);
    PQ_UNROLL
    for (int i = 0; i < 4; ++i) codes[i] = look_up64<0>(kSymbols, field64(x, unsigned(6 - 2 * i), 3));
  }

  template <class P>
  PQ_INLINE static void sixteen(const SixteenLines& b, P& p) {
    put_fields(b, p, [](__m512i x, int g) { return look_up64<0>(kSymbols, field64(x, unsigned(6 - 2 * g), 3)); });
  }
#endif

  PQ_INLINE static void take(const uint8_t* b, int, Codes& c) {
    one_scale(1, c);
    PQ_UNROLL
    for (int h = 0; h < 2; ++h) {
      const B32 low = load32(b + 32 * h), high = field<4>(low, 15);
      c.set(4 * h, look_up(kSymbols, high & 12));
      c.set(4 * h + 1, look_up(kSymbols, high & 3));
      c.set(4 * h + 2, look_up(kSymbols, low & 12));
      c.set(4 * h + 3, look_up(kSymbols, low & 3));
    }
  }
};

struct I2SArmCodes {
  static constexpr int block = 64, bytes = 16, sub = 32, top = 2, centre = 1;
  static constexpr bool offset = true, wide = true, paired = false, whole = false;
  PQ_INLINE static void take(const uint8_t* b, int, Codes& c) {
    one_scale(1, c);
    const B32 fields = words(0x0c0c0c0c0c0c0c0cu, 0x0c0c0c0c0c0c0c0cu, 0x0303030303030303u, 0x0303030303030303u);
    PQ_UNROLL
    for (int g = 0; g < 8; g += 2) {
      const uint64_t x = load<uint64_t>(b + 8 * g), y = load<uint64_t>(b + 8 * g + 8);
      const B32 low = words(x, y, x, y);  // 16 bytes twice: fields 0 and 1, then 2 and 3
      c.set(g, look_up(kSymbols, field<4>(low, 15) & fields));
      c.set(g + 1, look_up(kSymbols, low & fields));
    }
  }
};

// One of four rows that share their bytes: row `lane` in bits 2 * lane, or in reverse order.
template <bool high_first>
struct QuadCodes {
  static constexpr int block = 32, bytes = 32, sub = 32, top = 2, lanes = 4, centre = 1;
  static constexpr bool offset = true, wide = true, paired = false, whole = false;
  PQ_INLINE static void take(const uint8_t* b, int lane, Codes& c) {
    one_scale(1, c);
    switch (high_first ? 3 - lane : lane) {
      case 0:
        return fields<0>(b, c);
      case 1:
        return fields<2>(b, c);
      case 2:
        return fields<4>(b, c);
      default:
        return fields<6>(b, c);
    }
  }

 private:
  template <int shift>
  PQ_INLINE static void fields(const uint8_t* b, Codes& c) {
    PQ_UNROLL
    for (int g = 0; g < 8; ++g) c.set(g, look_up(kSymbols, field<shift>(load32(b + 32 * g), 3)));
  }
};

// Trinity: four adjacent weights per byte, lowest bits first.
template <int head>
struct TrinityCodes {
  static constexpr int block = 32, bytes = head + 8, sub = 32, top = 2, centre = 1;
  static constexpr bool offset = true, wide = head == 0, paired = false, whole = false;
  PQ_INLINE static void take(const uint8_t* b, int, Codes& c) {
    const F8 d = head ? halves8<bytes>(b) : all(1);
    c.set_d(0, d);
    c.set_m(0, -d);
    PQ_UNROLL
    for (int g = 0; g < 8; ++g) c.set(g, look_up(kTrinitySymbols, quarters(b + g * bytes + head)));
  }
};

}  // namespace
}  // namespace polyquant
