// Codes of rows that are bit streams: code i of a row is bits [b i, b i + b), lowest bits first, as compressed-tensors
// and MLX store them; scales and offsets are in tables. Included once per instruction set, after packed/kernels.hpp.
// `slack`: bytes that `take` reads beyond a unit. `shift`: subtracted from codes to fit int8. `halved`: codes are twice
// the numbers.
#pragma once

#include "packed/kernels.hpp"

namespace polyquant {
namespace {

#if defined(__AVX2__) || defined(PQ_NEON)

// 32 bytes of nibbles, 64 columns -> columns 0 ... 15 and 32 ... 47, and the others: as `paired` types are stored.
struct Nibbles {
  B32 low, high;
};
PQ_INLINE Nibbles in_order(const B32& even, const B32& odd) {
#if defined(__AVX2__)
  return {B32(_mm256_unpacklo_epi8(__m256i(even), __m256i(odd))),
          B32(_mm256_unpackhi_epi8(__m256i(even), __m256i(odd)))};
#else
  const uint8x16_t a = half_of<0>(even), b = half_of<0>(odd), c = half_of<1>(even), d = half_of<1>(odd);
  return {pair_of(vzip1q_u8(a, b), vzip1q_u8(c, d)), pair_of(vzip2q_u8(a, b), vzip2q_u8(c, d))};
#endif
}

#if defined(__AVX2__)

// A unit of nibbles -> of each 64 the even codes before the odd ones: nothing has to change places.
template <class F>
PQ_INLINE void put_apart(const uint8_t* b, Codes& c, const F& code) {
  PQ_UNROLL
  for (int g = 0; g < 8; g += 2) {
    const B32 x = load32(b + 16 * g);
    c.set(g, code(x & 15));
    c.set(g + 1, code(field<4>(x, 15)));
  }
}

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
// 16 bytes of each of sixteen lines, group g: byte j is columns 2 j, in its low nibble, and 2 j + 1.
template <class P, class F>
PQ_INLINE void put_adjacent(const SixteenLines& b, P& p, int g, const F& code) {
  __m512i low[4], high[4];
  b.load(low);
  PQ_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m512i even = code(field64(low[i], 0, 15)), odd = code(field64(low[i], 4, 15));
    low[i] = _mm512_unpacklo_epi8(even, odd), high[i] = _mm512_unpackhi_epi8(even, odd);
  }
  in_quads(low), in_quads(high);
  p.begin(g);
  PQ_UNROLL
  for (int j = 0; j < 4; ++j) p.put(g, j, low[j]), p.put(g, 4 + j, high[j]);
  p.done(g);
}
#endif

// 16 codes of 3, 5 or 6 bits from p, and 16 from q. Each is in two bytes, moved to a 16-bit lane; a multiplication
// moves it to the top.
template <int bits>
PQ_INLINE B32 odd_bits(const uint8_t* p, const uint8_t* q) {
  alignas(32) static constexpr auto kTables = [] {
    struct {
      int8_t even[32], odd[32];
      uint16_t raise_even[16], raise_odd[16];
    } t{};
    for (int i = 0; i < 32; ++i) {
      const int e = i % 16 / 2 * 2 * bits, o = e + bits;
      t.even[i] = int8_t(e / 8 + i % 2);
      t.odd[i] = int8_t(o / 8 + i % 2);
      t.raise_even[i / 2] = uint16_t(1 << (16 - bits - e % 8));
      t.raise_odd[i / 2] = uint16_t(1 << (16 - bits - o % 8));
    }
    return t;
  }();
  const auto table = [](const auto& x) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(&x)); };
  const __m256i x = __m256i(two16(p, q));
  const __m256i even = _mm256_mullo_epi16(_mm256_shuffle_epi8(x, table(kTables.even)), table(kTables.raise_even));
  const __m256i odd = _mm256_mullo_epi16(_mm256_shuffle_epi8(x, table(kTables.odd)), table(kTables.raise_odd));
  const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(odd, 8 - bits), _mm256_set1_epi16(short(0xff00)));
  return B32(_mm256_or_si256(_mm256_srli_epi16(even, 16 - bits), upper));
}

alignas(16) constexpr int8_t kQuarters[16] = {0, 1, 2, 3, 1, 0, 0, 0, 2, 0, 0, 0, 3};  // of codes, and of codes times 4

// 16 codes of 2 bits from byte `first` of 16, and 16 from byte `second`: a table takes the place of different shifts.
template <int first, int second>
PQ_INLINE B32 two_bits(const __m256i& bytes) {
  constexpr int a = first * 0x01010101, b = second * 0x01010101, one = 0x01010101;
  const __m256i which = _mm256_setr_epi32(a, a + one, a + 2 * one, a + 3 * one, b, b + one, b + 2 * one, b + 3 * one);
  const __m256i x = _mm256_and_si256(_mm256_shuffle_epi8(bytes, which), _mm256_set1_epi32(int(0xc0300c03u)));
  return look_up(kQuarters, B32(_mm256_or_si256(x, _mm256_srli_epi16(x, 4))) & 15);
}

#else

// 16 codes of 3, 5 or 6 bits from p, and 16 from q. Each is in two bytes, moved to a 16-bit lane and shifted down.
template <int bits>
PQ_INLINE B32 odd_bits(const uint8_t* p, const uint8_t* q) {
  alignas(16) static constexpr auto kTables = [] {
    struct {
      uint8_t place[16];
      int16_t down[8];
    } t{};
    for (int i = 0; i < 8; ++i) {
      const int at = i * bits;
      t.place[2 * i] = uint8_t(at / 8), t.place[2 * i + 1] = uint8_t(at / 8 + 1), t.down[i] = int16_t(-(at % 8));
    }
    return t;
  }();
  const uint8x16_t place = vld1q_u8(kTables.place);
  const int16x8_t down = vld1q_s16(kTables.down);
  const auto eight = [&](const uint8_t* from) PQ_FLAT {
    const uint8x16_t bytes = vcombine_u8(vld1_u8(from), vdup_n_u8(0));
    return vreinterpretq_u8_u16(vshlq_u16(vreinterpretq_u16_u8(vqtbl1q_u8(bytes, place)), down));
  };
  const auto sixteen = [&](const uint8_t* from) PQ_FLAT {
    return vandq_u8(vuzp1q_u8(eight(from), eight(from + bits)), vdupq_n_u8((1 << bits) - 1));
  };
  return pair_of(sixteen(p), sixteen(q));
}

// 16 codes of 2 bits from p, and 16 from q.
PQ_INLINE B32 two_bits(const uint8_t* p, const uint8_t* q) {
  const uint8x16_t which = vcombine_u8(vcreate_u8(0x0101010100000000u), vcreate_u8(0x0303030302020202u));
  const int8x16_t down = vreinterpretq_s8_u32(vdupq_n_u32(0xfafcfe00u));  // 0, -2, -4, -6
  const auto sixteen = [&](const uint8_t* from) PQ_FLAT {
    const uint8x16_t bytes = vreinterpretq_u8_u32(vdupq_n_u32(load<uint32_t>(from)));
    return vandq_u8(vshlq_u8(vqtbl1q_u8(bytes, which), down), vdupq_n_u8(3));
  };
  return pair_of(sixteen(p), sixteen(q));
}

#endif

#endif

template <int bits, int per>
struct GroupedCodes {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  static constexpr bool is_signed = false;
#else
  static constexpr bool is_signed = bits == 8;  // sums of two unsigned products may not fit 16 bits
#endif
  static constexpr int block = 8, bytes = bits, sub = per, top = is_signed ? 0 : (1 << bits) - 1;
  static constexpr size_t slack = bits == 3 || bits == 5 || bits == 6 ? 16 : 0;
  static constexpr float shift = is_signed ? 128 : 0;
  static constexpr bool offset = true, wide = false, paired = true, whole = false, halved = false;

#if defined(__AVX2__)
  // As `take`, in the order of Activations::apart.
  PQ_INLINE static void take_apart(const uint8_t* b, Codes& c)
    requires(bits == 4)
  {
    put_apart(b, c, [](const B32& x) { return x; });
  }
#endif

  PQ_INLINE static void take(const uint8_t* b, Codes& c) {
#if defined(__AVX2__) || defined(PQ_NEON)
    PQ_UNROLL
    for (int g = 0; g < 8; g += 2, b += 8 * bits) {
      // Groups of 16: the second and third change places.
      if constexpr (bits == 4) {
        const B32 x = load32(b);
        const Nibbles n = in_order(x & 15, field<4>(x, 15));
        c.set(g, n.low);
        c.set(g + 1, n.high);
#if defined(PQ_NEON)
      } else if constexpr (bits == 2) {
        c.set(g, two_bits(b, b + 8));
        c.set(g + 1, two_bits(b + 4, b + 12));
#else
      } else if constexpr (bits == 2) {
        const __m256i x = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b)));
        c.set(g, two_bits<0, 8>(x));
        c.set(g + 1, two_bits<4, 12>(x));
#endif
      } else if constexpr (bits == 8) {
        c.set(g, two16(b, b + 32) ^ uint8_t(shift));
        c.set(g + 1, two16(b + 16, b + 48) ^ uint8_t(shift));
      } else {
        c.set(g, odd_bits<bits>(b, b + 4 * bits));
        c.set(g + 1, odd_bits<bits>(b + 2 * bits, b + 6 * bits));
      }
    }
#else
    for (int j = 0; j < 256; ++j) {
      const int at = j * bits;
      const unsigned two = 8 % bits ? load<uint16_t>(b + at / 8) : b[at / 8];
      c.q[(j >> 4 & 1) != (j >> 5 & 1) ? j ^ 48 : j] = int8_t(int(two >> at % 8 & ((1 << bits) - 1)) - int(shift));
    }
#endif
  }

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  static constexpr Order order = per == 32 ? Order::adjacent : Order::alternate;
  PQ_INLINE static void registers(const uint8_t* b, __m512i (&codes)[4])
    requires(bits == 4)
  {
    const __m512i x = _mm512_loadu_si512(b), y = _mm512_loadu_si512(b + 64);
    if constexpr (per == 32) return put_all_nibbles(x, y, codes);
    both_nibbles(x, codes), both_nibbles(y, codes + 2);
  }

  template <class P>
  PQ_INLINE static void sixteen(const SixteenLines& b, P& p)
    requires(bits == 4)
  {
    for (int g = 0; g < 8; ++g) put_adjacent(b.from(size_t(16 * g)), p, g, same_codes);
  }
#endif
};

// E2M1 numbers: byte j of a row is columns 2 j, in its low nibble, and 2 j + 1. Codes are twice the numbers plus 12,
// the common zero point.
alignas(16) constexpr int8_t kRaisedE2m1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

template <int per>
struct GroupedFp4 {
  static constexpr int block = 8, bytes = 4, sub = per, top = 24;
  static constexpr size_t slack = 0;
  static constexpr float shift = 0;
  static constexpr bool offset = true, wide = false, paired = true, whole = false, halved = true;

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  static constexpr Order order = per == 32 ? Order::adjacent : Order::alternate;
  PQ_INLINE static void registers(const uint8_t* b, __m512i (&codes)[4]) {
    const __m512i x = _mm512_loadu_si512(b), y = _mm512_loadu_si512(b + 64);
    if constexpr (per == 32) return put_all_levels(kRaisedE2m1, x, y, codes);
    both_levels(kRaisedE2m1, x, codes), both_levels(kRaisedE2m1, y, codes + 2);
  }

  template <class P>
  PQ_INLINE static void sixteen(const SixteenLines& b, P& p) {
    for (int g = 0; g < 8; ++g)
      put_adjacent(b.from(size_t(16 * g)), p, g, [](__m512i x) { return look_up64<0>(kRaisedE2m1, x); });
  }
#endif

#if defined(__AVX2__)
  PQ_INLINE static void take_apart(const uint8_t* b, Codes& c) {
    put_apart(b, c, [](const B32& x) { return look_up(kRaisedE2m1, x); });
  }
#endif

  PQ_INLINE static void take(const uint8_t* b, Codes& c) {
#if defined(__AVX2__) || defined(PQ_NEON)
    PQ_UNROLL
    for (int g = 0; g < 8; g += 2) {
      const B32 x = load32(b + 16 * g);
      const Nibbles n = in_order(look_up(kRaisedE2m1, x & 15), look_up(kRaisedE2m1, field<4>(x, 15)));
      c.set(g, n.low);
      c.set(g + 1, n.high);
    }
#else
    GroupedCodes<4, per>::take(b, c);
    for (int j = 0; j < 256; ++j) c.q[j] = kRaisedE2m1[c.q[j]];
#endif
  }
};

}  // namespace
}  // namespace polyquant
