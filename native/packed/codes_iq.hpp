// The codebook types as integer codes, like packed/codes.hpp: eight or four weights are looked up at a time. Indices,
// signs and scales of a unit are made in vectors; indices go through memory to the loads of the codebook. For few
// tokens with VNNI, 32 indices are looked up at once in registers.
#pragma once

#include "codecs/iq_codebooks.hpp"
#include "packed/codes.hpp"

namespace polyquant {
namespace {

using W16 = uint16_t __attribute__((vector_size(32)));
using L4 = uint64_t __attribute__((vector_size(32)));
using U8x = uint32_t __attribute__((vector_size(32)));

// 16 bytes as words, and four numbers of 8 or 16 bits as 64-bit elements.
PQ_INLINE W16 words16(const uint8_t* p) {
#if defined(__AVX2__)
  return W16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  using Bytes = uint8_t __attribute__((vector_size(16)));
  return __builtin_convertvector(load<Bytes>(p), W16);
#endif
}
PQ_INLINE L4 four_bytes(const uint8_t* p) {
#if defined(__AVX2__)
  return L4(_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(int(load<uint32_t>(p)))));
#else
  return L4{p[0], p[1], p[2], p[3]};
#endif
}
PQ_INLINE L4 four_words(const uint8_t* p) {
#if defined(__AVX2__)
  return L4(_mm256_cvtepu16_epi64(_mm_cvtsi64_si128(int64_t(load<uint64_t>(p)))));
#else
  return L4{load<uint16_t>(p), load<uint16_t>(p + 2), load<uint16_t>(p + 4), load<uint16_t>(p + 6)};
#endif
}

#if defined(__AVX2__)
// Twice the nibbles of eight bytes, plus one.
PQ_INLINE __m128i sixteen_odd(const uint8_t* p) {
  const uint64_t s = load<uint64_t>(p);
  constexpr uint64_t even = 0x1e1e1e1e1e1e1e1eu, one = 0x0101010101010101u;
  return _mm_unpacklo_epi8(_mm_cvtsi64_si128(int64_t((s << 1 & even) | one)),
                           _mm_cvtsi64_si128(int64_t((s >> 3 & even) | one)));
}
#endif

// Codes with a bit are negated.
PQ_INLINE B32 with_signs(const B32& codes, uint32_t bits) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __m256i x = __m256i(codes);
  return B32(_mm256_mask_sub_epi8(x, bits, _mm256_setzero_si256(), x));
#else
  const B32 minus = spread_bits(bits, 255);
  return (codes ^ minus) - minus;
#endif
}

// Four fields of seven signs from bit 0 on -> four bytes, whose top bit makes the number of signs even.
PQ_INLINE U8x even_signs(const U8x& x) {
  U8x s = (x & 0x7f) | (x & 0x3f80) << 1 | (x & 0x1fc000) << 2 | (x & 0xfe00000) << 3;
  U8x odd = s ^ s >> 4;
  odd ^= odd >> 2;
  odd ^= odd >> 1;
  return s | (odd & 0x01010101) << 7;
}

// Indices and signs of a unit: types make them by `look`, and `take` reads them.
struct alignas(32) Lookups {
  uint16_t index[64];
  uint32_t signs[8];

  PQ_INLINE void put(int at, const W16& x) { std::memcpy(index + at, &x, sizeof x); }

  // Group g by four indices of eight bytes, and by eight indices of four bytes.
  PQ_INLINE B32 eights(const auto& grid, int g) const {
    const uint16_t* i = index + 4 * g;
    return words(grid[i[0]], grid[i[1]], grid[i[2]], grid[i[3]]);
  }
  PQ_INLINE B32 fours(const auto& grid, int g) const { return by_fours(grid, index + 8 * g); }

  template <class Index>
  PQ_INLINE static B32 by_fours(const auto& grid, const Index* i) {
#if defined(__AVX2__)
    const auto at = [&](int k) { return _mm_loadu_si32(&grid[i[k]]); };
    const auto four = [&](int k) {
      return _mm_unpacklo_epi64(_mm_unpacklo_epi32(at(k), at(k + 1)), _mm_unpacklo_epi32(at(k + 2), at(k + 3)));
    };
    return B32(_mm256_inserti128_si256(_mm256_castsi128_si256(four(0)), four(4), 1));
#else
    const auto two = [&](int k) { return grid[i[2 * k]] | uint64_t(grid[i[2 * k + 1]]) << 32; };
    return words(two(0), two(1), two(2), two(3));
#endif
  }
};

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)

// Codebooks whose entries fit 16 bits are looked up in registers: 64 words at a time, of which masks choose one.
//
// Fields of eight weights are two bits wide: byte i and field 2 r + h of an entry have weight 4 r + 2 i + h, so that
// the registers of a unit have the order of those with four weights an entry, Order::pairs.
template <int count>
constexpr auto fields_of(const uint16_t* entries) {
  std::array<uint16_t, count> out{};
  for (int e = 0; e < count; ++e)
    for (int i = 0; i < 2; ++i)
      for (int j = 0; j < 4; ++j) {
        const int weight = j / 2 * 4 + 2 * i + j % 2;
        out[size_t(e)] |= uint16_t((entries[e] >> (2 * weight) & 3) << (8 * i + 2 * j));
      }
  return out;
}

// Digits of three bits as nibbles, which index `levels`.
template <int count>
constexpr auto nibbles_of(const uint16_t* entries, const int (&levels)[8]) {
  std::array<uint16_t, count> out{};
  for (int e = 0; e < count; ++e)
    for (int j = 0; j < 4; ++j) out[size_t(e)] |= uint16_t(levels[entries[e] >> (3 * j) & 7] << (4 * j));
  return out;
}

alignas(64) constexpr auto kFields1 = fields_of<2048>(iq::packed + iq::start1);
alignas(64) constexpr auto kFields2Xxs = fields_of<256>(iq::packed + iq::start2_xxs);
alignas(64) constexpr auto kFields2Xs = fields_of<512>(iq::packed + iq::start2_xs);
alignas(64) constexpr auto kFields2S = fields_of<1024>(iq::packed + iq::start2_s);
alignas(64) constexpr auto kNibbles3Xxs = nibbles_of<256>(iq::packed + iq::start3_xxs, {0, 1, 2, 3, 4, 5, 6, 7});
alignas(64) constexpr auto kNibbles3S = nibbles_of<512>(iq::packed + iq::start3_s, iq::odd3);

// table[index] of words: the lower six bits of each index, and a mask for each further bit.
template <size_t count>
PQ_INLINE __m512i look_up_words(const uint16_t* table, __m512i index, const __mmask32* bits) {
  if constexpr (count == 64) {
    return _mm512_permutex2var_epi16(_mm512_load_si512(table), index, _mm512_load_si512(table + 32));
  } else {
    constexpr size_t half = count / 2;
    return _mm512_mask_blend_epi16(bits[std::countr_zero(half) - 6], look_up_words<half>(table, index, bits),
                                   look_up_words<half>(table + half, index, bits));
  }
}

// The masks of index bits from the sixth on.
template <int count>
PQ_INLINE void test_bits(__m512i index, __mmask32* bits) {
  PQ_UNROLL
  for (int i = 0; i < count; ++i) bits[i] = _mm512_test_epi16_mask(index, _mm512_set1_epi16(short(64 << i)));
}

// Eight bytes of bits for 64 indices: those of indices 2 w, and 2 w + 1.
PQ_INLINE void bits_of_pairs(const uint8_t* p, __mmask32& even, __mmask32& odd) {
  const __m512i bytes = _mm512_shuffle_epi8(
      _mm512_set1_epi64(load<int64_t>(p)),
      _mm512_set_epi64(0x0707070707070707, 0x0606060606060606, 0x0505050505050505, 0x0404040404040404,
                       0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0));
  const __m512i first = _mm512_set1_epi64(0x0040001000040001);
  even = _mm512_test_epi16_mask(bytes, first), odd = _mm512_test_epi16_mask(bytes, _mm512_slli_epi16(first, 1));
}

// The lower byte of each word, twice.
PQ_INLINE __m512i lower_bytes_twice(__m512i words) {
  return _mm512_shuffle_epi8(
      words, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14)));
}
PQ_INLINE __m512i bytes_twice(const uint8_t* p) { return lower_bytes_twice(_mm512_cvtepu8_epi16(__m256i(load32(p)))); }

// Codebooks that fill too many registers: entries are loaded. Indices are stored for a whole row before the first
// entry is loaded, because loads that wait for the instructions that made their address would fill the queue of loads.
template <class T>
concept Indexed = requires(const uint8_t* b, uint16_t* index) { T::put_indices(b, index); };

// Eight words, each four times.
PQ_INLINE __m512i four_times(__m128i words) {
  const __m512i eighth = _mm512_cvtepi8_epi16(
      _mm256_set_epi64x(0x0707070706060606, 0x0505050504040404, 0x0303030302020202, 0x0101010100000000));
  return _mm512_permutexvar_epi16(eighth, _mm512_castsi128_si512(words));
}
PQ_INLINE __m512i words_four_times(const uint8_t* p) {
  return four_times(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// 32 indices of a byte of `low` and `bits` bits of a word of `high`, which has four, `apart` bits apart.
template <int bits, int apart>
PQ_INLINE void put_four_by_four(const uint8_t* low, __m512i high, uint16_t* index) {
  const __m512i shift = _mm512_set1_epi64(int64_t(apart) << 16 | int64_t(2 * apart) << 32 | int64_t(3 * apart) << 48);
  constexpr int first_where_second_or_third = 0xea;  // (a & b) | c
  const __m512i upper = _mm512_slli_epi16(_mm512_srlv_epi16(high, shift), 8);
  _mm512_storeu_si512(
      index, _mm512_ternarylogic_epi32(upper, _mm512_set1_epi16(short(((1 << bits) - 1) << 8)),
                                       _mm512_cvtepu8_epi16(__m256i(load32(low))), first_where_second_or_third));
}

// 32 entries. Indices are loaded four at a time.
PQ_INLINE __m512i load_entries(const uint16_t* table, const uint16_t* index) {
  const auto eight = [=](int i) PQ_FLAT {
    const auto at = [=](uint64_t four, int j) PQ_FLAT { return table[four >> (16 * j) & 0xffff]; };
    uint64_t low, high;
    std::memcpy(&low, index + 8 * i, 8), std::memcpy(&high, index + 8 * i + 4, 8);
    __m128i x = _mm_cvtsi32_si128(at(low, 0));
    x = _mm_insert_epi16(x, at(low, 1), 1), x = _mm_insert_epi16(x, at(low, 2), 2);
    x = _mm_insert_epi16(x, at(low, 3), 3), x = _mm_insert_epi16(x, at(high, 0), 4);
    x = _mm_insert_epi16(x, at(high, 1), 5), x = _mm_insert_epi16(x, at(high, 2), 6);
    return _mm_insert_epi16(x, at(high, 3), 7);
  };
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set_m128i(eight(1), eight(0))),
                            _mm256_set_m128i(eight(3), eight(2)), 1);
}

// 64 indices of four weights each; `ninth`: the masks of their ninth bits, of even and of odd indices.
template <size_t count>
PQ_INLINE void look_up_fours(const uint16_t* table, const uint8_t* p, const __mmask32 (&ninth)[2],
                             __m512i (&codes)[4]) {
  const __m512i x = _mm512_loadu_si512(p);
  PQ_UNROLL
  for (int r = 0; r < 2; ++r) {
    const __m512i index = r ? _mm512_srli_epi16(x, 8) : _mm512_and_si512(x, _mm512_set1_epi16(255));
    __mmask32 bits[3];
    test_bits<2>(index, bits);
    bits[2] = ninth[r];
    both_nibbles(look_up_words<count>(table, index, bits), codes + 2 * r);
  }
}

// [seven signs] -> eight of even number, twice.
alignas(64) constexpr auto kEvenTwice = [] {
  std::array<uint16_t, 128> out{};
  for (unsigned s = 0; s < 128; ++s) out[s] = uint16_t((s | unsigned(std::popcount(s) & 1) << 7) * 0x101);
  return out;
}();

// Words with seven signs each -> eight of even number, as lower_bytes_twice. Further bits may be anything.
PQ_INLINE __m512i even_bytes_twice(__m512i words) {
  __mmask32 bit;
  test_bits<1>(words, &bit);
  return look_up_words<128>(kEvenTwice.data(), words, &bit);
}

// 64-bit elements, of which four fields of seven bits are signs from bit 8 * byte on -> as even_bytes_twice.
template <int byte>
PQ_INLINE __m512i fields_twice(__m512i x) {
  constexpr int64_t first = 0x0302020101000100 + byte * 0x0101010101010101;
  const __m512i two_bytes =
      _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(_mm_set_epi64x(first + 0x0808080808080808, first)));
  return even_bytes_twice(_mm512_srlv_epi16(two_bytes, _mm512_set1_epi64(0x0005000600070000)));
}

// Signs of a unit, each byte twice -> masks of the negative codes in Order::pairs.
PQ_INLINE void put_signs(__m512i twice, __mmask64 (&minus)[4]) {
  PQ_UNROLL
  for (int j = 0; j < 4; ++j) {
    const int bit = 1 << (j / 2 * 4 + j % 2);
    minus[j] = _mm512_test_epi8_mask(twice, _mm512_set1_epi16(short(bit | bit << 10)));
  }
}

// 16 nibbles s -> (s + 1/2) * d / 4
PQ_INLINE UnitScales nibble_unit_scales(const uint8_t* p, float d) {
  const __m512 odd = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(sixteen_odd(p)));
  return {_mm512_mul_ps(odd, _mm512_set1_ps(d * 0.125f)), _mm512_setzero_ps()};
}

alignas(16) constexpr auto kLevels3 = [] {
  std::array<int8_t, 16> out{};
  for (size_t i = 0; i < 8; ++i) out[i] = int8_t(iq::magnitudes3[i]);
  return out;
}();

// Levels of both fields of a nibble: the lower, and the upper.
using FieldLevels = std::array<std::array<int8_t, 16>, 2>;
constexpr FieldLevels field_levels(const int (&levels)[3]) {
  FieldLevels out{};
  for (size_t i = 0; i < 16; ++i)
    for (size_t h = 0; h < 2; ++h) {
      const size_t digit = i >> (2 * h) & 3;
      out[h][i] = digit < 3 ? int8_t(levels[digit]) : int8_t(0);
    }
  return out;
}
alignas(16) constexpr FieldLevels kMagnitudes2 = field_levels(iq::magnitudes2);
alignas(16) constexpr FieldLevels kEighths1 = field_levels({0, 8, 16});

// Fields of two bits -> levels.
PQ_INLINE void put_field_levels(const FieldLevels& levels, __m512i fields, __m512i (&codes)[4]) {
  __m512i nibbles[2];
  both_nibbles(fields, nibbles);
  PQ_UNROLL
  for (int j = 0; j < 4; ++j) codes[j] = look_up64<0>(levels[size_t(j % 2)].data(), nibbles[j / 2]);
}

#endif

struct Iq2XxsCodes {
  static constexpr int block = 256, bytes = 66, sub = 32, top = 0, least = -43;
  static constexpr bool offset = false, wide = false, paired = false, whole = false;

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  static constexpr Order order = Order::pairs;
  PQ_INLINE static void magnitudes(const uint8_t* b, __m512i (&codes)[4], __mmask64 (&minus)[4]) {
    const __m512i x = _mm512_loadu_si512(b + 2);  // of each group: four indices, then signs and the scale
    const __m512i index = _mm512_cvtepu8_epi16(_mm512_cvtepi64_epi32(x));
    __mmask32 bits[2];
    test_bits<2>(index, bits);
    put_field_levels(kMagnitudes2, look_up_words<256>(kFields2Xxs.data(), index, bits), codes);
    put_signs(fields_twice<4>(x), minus);
  }

#endif

  PQ_INLINE static U8x tails(const uint8_t* b) {
#if defined(__AVX2__)
    const __m256 x = _mm256_castsi256_ps(__m256i(load32(b + 2))), y = _mm256_castsi256_ps(__m256i(load32(b + 34)));
    return U8x(_mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xdd)), 0xd8));
#else
    U8x out;
    for (int g = 0; g < 8; ++g) out[g] = load<uint32_t>(b + 6 + 8 * g);
    return out;
#endif
  }
  PQ_INLINE static Scales scales(const uint8_t* b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    const auto fours = I8x(_mm512_cvtepi64_epi32(_mm512_srli_epi64(_mm512_loadu_si512(b + 2), 60)));
#else
    const auto fours = I8x(tails(b) >> 28);
#endif
    return {(to_floats(fours) + 0.5f) * (half_at(b) * 0.25f), F8{}};
  }

  PQ_INLINE static void look(const uint8_t* b, Lookups& at) {
    const U8x even = even_signs(tails(b) & 0x0fffffff);
    std::memcpy(at.signs, &even, sizeof even);
  }
  PQ_INLINE static void take(const uint8_t* b, const Lookups& at, Codes& c) {
    PQ_UNROLL
    for (int g = 0; g < 8; ++g) {
      const uint8_t* i = b + 2 + 8 * g;
      c.set(g, with_signs(words(iq::grid2_xxs[i[0]], iq::grid2_xxs[i[1]], iq::grid2_xxs[i[2]], iq::grid2_xxs[i[3]]),
                          at.signs[g]));
    }
    c.set_d(0, scales(b).d);
  }
};

// 16 nibbles s -> (s + 1/2) * d / 4
PQ_INLINE void nibble_scales(const uint8_t* p, float d, Codes& c) {
#if defined(__AVX2__)
  const __m128i all16 = sixteen_odd(p);
  const auto scales = [&](__m128i x) { return F8(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x))) * (d * 0.125f); };
  c.set_d(0, scales(all16));
  c.set_d(1, scales(_mm_unpackhi_epi64(all16, all16)));
#else
  const uint64_t s = load<uint64_t>(p);
  constexpr uint64_t nibble = 0x0f0f0f0f0f0f0f0fu;
  const float quarter = d * 0.25f;
  const F8 even = (floats8(s & nibble) + 0.5f) * quarter, odd = (floats8(s >> 4 & nibble) + 0.5f) * quarter;
  c.set_d(0, __builtin_shufflevector(even, odd, 0, 8, 1, 9, 2, 10, 3, 11));
  c.set_d(1, __builtin_shufflevector(even, odd, 4, 12, 5, 13, 6, 14, 7, 15));
#endif
}

struct Iq2XsCodes {
  static constexpr int block = 256, bytes = 74, sub = 16, top = 0, least = -43;
  static constexpr bool offset = false, wide = false, paired = false, whole = false;

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  static constexpr Order order = Order::pairs;
  PQ_INLINE static void magnitudes(const uint8_t* b, __m512i (&codes)[4], __mmask64 (&minus)[4]) {
    const __m512i x = _mm512_loadu_si512(b + 2);
    __mmask32 bits[3];
    test_bits<3>(x, bits);
    put_field_levels(kMagnitudes2, look_up_words<512>(kFields2Xs.data(), x, bits), codes);
    put_signs(even_bytes_twice(_mm512_srli_epi16(x, 9)), minus);
  }
  PQ_INLINE static UnitScales unit_scales(const uint8_t* b) { return nibble_unit_scales(b + 66, half_at(b)); }
#endif

  PQ_INLINE static void look(const uint8_t* b, Lookups& at) {
    PQ_UNROLL
    for (int h = 0; h < 2; ++h) {
      const W16 x = load<W16>(b + 2 + 32 * h);
      W16 s = x >> 9, odd = s ^ s >> 4;
      odd ^= odd >> 2;
      odd ^= odd >> 1;
      s |= (odd & 1) << 7;
      at.put(16 * h, x & 511);
#if defined(__AVX2__)
      const __m128i bytes =
          _mm_packus_epi16(_mm256_castsi256_si128(__m256i(s)), _mm256_extracti128_si256(__m256i(s), 1));
      _mm_store_si128(reinterpret_cast<__m128i*>(at.signs + 4 * h), bytes);
#else
      using Bytes = uint8_t __attribute__((vector_size(16)));
      const Bytes bytes = __builtin_convertvector(s, Bytes);
      std::memcpy(at.signs + 4 * h, &bytes, sizeof bytes);
#endif
    }
  }
  PQ_INLINE static void take(const uint8_t* b, const Lookups& at, Codes& c) {
    PQ_UNROLL
    for (int g = 0; g < 8; ++g) c.set(g, with_signs(at.eights(iq::grid2_xs, g), at.signs[g]));
    nibble_scales(b + 66, half_at(b), c);
  }
};

struct Iq2SCodes {
  static constexpr int block = 256, bytes = 82, sub = 16, top = 0, least = -43;
  static constexpr bool offset = false, wide = false, paired = false, whole = false;

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  static constexpr Order order = Order::pairs;
  PQ_INLINE static void put_indices(const uint8_t* b, uint16_t* index) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b + 66));
    put_four_by_four<2, 2>(b + 2, four_times(_mm_cvtepu8_epi16(bytes)), index);
  }
  PQ_INLINE static void magnitudes(const uint8_t* b, const uint16_t* index, __m512i (&codes)[4],
                                   __mmask64 (&minus)[4]) {
    put_field_levels(kMagnitudes2, load_entries(kFields2S.data(), index), codes);
    put_signs(bytes_twice(b + 34), minus);
  }
  PQ_INLINE static UnitScales unit_scales(const uint8_t* b) { return nibble_unit_scales(b + 74, half_at(b)); }
#endif

  PQ_INLINE static void look(const uint8_t* b, Lookups& at) {
    PQ_UNROLL
    for (int h = 0; h < 2; ++h) {  // two bits of a byte for each of four indices
      const L4 x = four_bytes(b + 66 + 4 * h);
      const L4 high = (x << 8 | x << 22 | x << 36 | x << 50) & 0x0300030003000300u;
      at.put(16 * h, words16(b + 2 + 16 * h) | W16(high));
    }
  }
  PQ_INLINE static void take(const uint8_t* b, const Lookups& at, Codes& c) {
    PQ_UNROLL
    for (int g = 0; g < 8; ++g) c.set(g, with_signs(at.eights(iq::grid2_s, g), load<uint32_t>(b + 34 + 4 * g)));
    nibble_scales(b + 74, half_at(b), c);
  }
};

struct Iq3XxsCodes {
  static constexpr int block = 256, bytes = 98, sub = 32, top = 0, least = -62;
  static constexpr bool offset = false, wide = false, paired = false, whole = false;

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  static constexpr Order order = Order::pairs;
  PQ_INLINE static void magnitudes(const uint8_t* b, __m512i (&codes)[4], __mmask64 (&minus)[4]) {
    look_up_fours<256>(kNibbles3Xxs.data(), b + 2, {}, codes);
    PQ_UNROLL
    for (int j = 0; j < 4; ++j) codes[j] = look_up64<0>(kLevels3.data(), codes[j]);
    put_signs(fields_twice<0>(_mm512_cvtepu32_epi64(__m256i(load32(b + 66)))), minus);
  }
#endif

  PQ_INLINE static Scales scales(const uint8_t* b) {
    return {(to_floats(I8x(load<U8x>(b + 66) >> 28)) + 0.5f) * (half_at(b) * 0.5f), F8{}};
  }

  PQ_INLINE static void look(const uint8_t* b, Lookups& at) {
    const U8x even = even_signs(load<U8x>(b + 66) & 0x0fffffff);
    std::memcpy(at.signs, &even, sizeof even);
  }
  PQ_INLINE static void take(const uint8_t* b, const Lookups& at, Codes& c) {
    PQ_UNROLL
    for (int g = 0; g < 8; ++g) c.set(g, with_signs(Lookups::by_fours(iq::grid3_xxs, b + 2 + 8 * g), at.signs[g]));
    c.set_d(0, scales(b).d);
  }
};

struct Iq3SCodes {
  static constexpr int block = 256, bytes = 110, sub = 32, top = 0, least = -15;
  static constexpr bool offset = false, wide = false, paired = false, whole = false;

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  static constexpr Order order = Order::pairs;
  PQ_INLINE static void magnitudes(const uint8_t* b, __m512i (&codes)[4], __mmask64 (&minus)[4]) {
    __mmask32 ninth[2];
    bits_of_pairs(b + 66, ninth[0], ninth[1]);
    look_up_fours<512>(kNibbles3S.data(), b + 2, ninth, codes);
    put_signs(bytes_twice(b + 74), minus);
  }
#endif

  PQ_INLINE static Scales scales(const uint8_t* b) {
    const I8x shift = {0, 4, 8, 12, 16, 20, 24, 28}, scales = I8x((U8x{} + load<uint32_t>(b + 106)) >> U8x(shift)) & 15;
    return {(to_floats(scales) * 2.0f + 1.0f) * half_at(b), F8{}};
  }

  PQ_INLINE static void look(const uint8_t* b, Lookups& at) {
    PQ_UNROLL
    for (int k = 0; k < 4; ++k) {  // a bit for each of 16 indices
      const W16 bit = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
      const W16 there = (W16{} + load<uint16_t>(b + 66 + 2 * k)) & bit;
      at.put(16 * k, words16(b + 2 + 16 * k) | (W16(there == bit) & 256));
    }
  }
  PQ_INLINE static void take(const uint8_t* b, const Lookups& at, Codes& c) {
    PQ_UNROLL
    for (int g = 0; g < 8; ++g) c.set(g, with_signs(at.fours(iq::grid3_s, g), load<uint32_t>(b + 74 + 4 * g)));
    c.set_d(0, scales(b).d);
  }
};

// 8 * (grid + delta) + 9 with a delta of -1/8 where `minus` has ones, otherwise of 1/8, from the codebook of the
// dequantizer.
PQ_INLINE B32 eighths(const B32& grid, const B32& minus) { return grid + (~minus & 2) - 119; }

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)

// Codes of 32 entries; plus: words whose delta is 1/8.
PQ_INLINE void put_eighths(const uint16_t* index, __mmask32 plus, __m512i (&codes)[4]) {
  put_field_levels(kEighths1, load_entries(kFields1.data(), index), codes);
  PQ_UNROLL
  for (int j = 0; j < 4; ++j) codes[j] = _mm512_mask_add_epi16(codes[j], plus, codes[j], _mm512_set1_epi16(0x202));
}

#endif

struct Iq1SCodes {
  static constexpr int block = 256, bytes = 50, sub = 32, top = 18, centre = 9;
  static constexpr bool offset = true, wide = false, paired = false, whole = false;

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  static constexpr Order order = Order::pairs;
  PQ_INLINE static void put_indices(const uint8_t* b, uint16_t* index) {
    put_four_by_four<3, 3>(b + 2, words_four_times(b + 34), index);
  }
  PQ_INLINE static void registers(const uint8_t* b, const uint16_t* index, __m512i (&codes)[4]) {
    put_eighths(index, ~_mm512_movepi16_mask(words_four_times(b + 34)), codes);
  }
#endif

  PQ_INLINE static Scales scales(const uint8_t* b) {
    I8x tails;  // of each group: 12 bits of indices, the scale and the sign
#if defined(__AVX2__)
    tails = I8x(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b + 34))));
#else
    for (int g = 0; g < 8; ++g) tails[g] = load<uint16_t>(b + 34 + 2 * g);
#endif
    const F8 d = (to_floats(tails >> 12 & 7) * 2.0f + 1.0f) * (half_at(b) * 0.125f);
    return {d, d * float(-centre)};
  }

  PQ_INLINE static void look(const uint8_t* b, Lookups& at) {
    PQ_UNROLL
    for (int h = 0; h < 2; ++h) {  // three bits of a word for each of four indices
      const L4 x = four_words(b + 34 + 8 * h);
      const L4 high = (x & 7) << 8 | (x & 0x38) << 21 | (x & 0x1c0) << 34 | (x & 0xe00) << 47;
      at.put(16 * h, words16(b + 2 + 16 * h) | W16(high));
    }
  }
  PQ_INLINE static void take(const uint8_t* b, const Lookups& at, Codes& c) {
    PQ_UNROLL
    for (int g = 0; g < 8; ++g) c.set(g, eighths(at.eights(iq::grid1, g), B32{} + uint8_t(-(b[35 + 2 * g] >> 7))));
    const Scales s = scales(b);
    c.set_d(0, s.d), c.set_m(0, s.m);
  }
};

struct Iq1MCodes {
  static constexpr int block = 256, bytes = 56, sub = 16, top = 18, centre = 9;
  static constexpr bool offset = true, wide = false, paired = false, whole = false;

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  static constexpr Order order = Order::pairs;
  PQ_INLINE static void put_indices(const uint8_t* b, uint16_t* index) {
    put_four_by_four<3, 4>(b, words_four_times(b + 32), index);
  }
  PQ_INLINE static void registers(const uint8_t* b, const uint16_t* index, __m512i (&codes)[4]) {
    const __m512i sign = _mm512_set1_epi64(int64_t(0x8000080000800008u));
    put_eighths(index, _mm512_testn_epi16_mask(words_four_times(b + 32), sign), codes);
  }
  // Four words of four scales each, of three bits
  PQ_INLINE static UnitScales unit_scales(const uint8_t* b) {
    const __m512i quarter = _mm512_cvtepi8_epi32(_mm_set_epi64x(0x0303030302020202, 0x0101010100000000)),
                  shift = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 3, 6, 9));
    const __m512i words =
        _mm512_castsi256_si512(_mm256_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(b + 48))));
    const __m512i scales =
        _mm512_and_si512(_mm512_srlv_epi32(_mm512_permutexvar_epi32(quarter, words), shift), _mm512_set1_epi32(7));
    const __m512 one = _mm512_set1_ps(eighth(load<uint64_t>(b + 48)));
    const __m512 d = _mm512_fmadd_ps(_mm512_cvtepi32_ps(scales), _mm512_add_ps(one, one), one);
    return {d, _mm512_mul_ps(d, _mm512_set1_ps(-centre))};
  }
#endif

  // The common scale, in the upper four bits of each word, divided by eight.
  PQ_INLINE static float eighth(uint64_t words) {
    const uint64_t nibbles = words >> 12 & 0x000f000f000f000fu, bytes = nibbles | nibbles >> 12;
    return half_of(uint16_t((bytes & 0xff) | (bytes >> 24 & 0xff00))) * 0.125f;
  }

  PQ_INLINE static void look(const uint8_t* b, Lookups& at) {
    PQ_UNROLL
    for (int h = 0; h < 2; ++h) {  // four bits of a word for each of four indices; the fourth is the sign
      const L4 x = four_words(b + 32 + 8 * h);
      const L4 high = (x & 7) << 8 | (x & 0x70) << 20 | (x & 0x700) << 32 | (x & 0x7000) << 44;
      at.put(16 * h, words16(b + 16 * h) | W16(high));
    }
  }
  PQ_INLINE static void take(const uint8_t* b, const Lookups& at, Codes& c) {
    PQ_UNROLL
    for (int g = 0; g < 8; ++g) {
      const L4 bit = {8, 0x80, 0x800, 0x8000}, minus = L4(((L4{} + load<uint16_t>(b + 32 + 2 * g)) & bit) == bit);
      c.set(g, eighths(at.eights(iq::grid1, g), B32(minus)));
    }
    const uint64_t words = load<uint64_t>(b + 48);  // of four scales each, of three bits
    const I8x shift = {0, 3, 6, 9, 16, 19, 22, 25};
    PQ_UNROLL
    for (int e = 0; e < 2; ++e) {
      const I8x scales = I8x((U8x{} + uint32_t(words >> (32 * e))) >> U8x(shift)) & 7;
      const F8 d = (to_floats(scales) * 2.0f + 1.0f) * eighth(words);
      c.set_d(e, d), c.set_m(e, d * float(-centre));
    }
  }
};

}  // namespace
}  // namespace polyquant
