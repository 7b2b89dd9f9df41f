// The codebooks that src/polyquant/codecs/iq_codebooks.py explains, one int8 per value: 8 values to a 64-bit entry, 4 to a 32-bit one.
// The first weight lies in the lowest byte.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <iterator>

namespace polyquant::iq {

inline constexpr uint16_t packed[] = {
#include "iq_codebooks.inc"  // written by CMakeLists.txt from iq_codebooks.bin
};
static_assert(sizeof packed == 2 * 4608);

// `Count` entries of the file from `Start`, whose digits of `Bits` bits name one of `levels`.
template <class Entry, int Start, int Count, int Bits, size_t Levels>
constexpr std::array<Entry, Count> expand(const int (&levels)[Levels]) {
  static_assert(Levels <= 1u << Bits && Start + Count <= int(std::size(packed)));
  std::array<Entry, Count> out{};
  for (int i = 0; i < Count; ++i)
    for (unsigned j = 0; j < sizeof(Entry); ++j) {
      const unsigned digit = packed[Start + i] >> (Bits * j) & ((1u << Bits) - 1);
      out[size_t(i)] |= Entry(uint8_t(levels[digit])) << (8 * j);  // a digit beyond the levels does not compile
    }
  return out;
}

constexpr int magnitudes2[] = {8, 25, 43};
constexpr int magnitudes3[] = {4, 12, 20, 28, 36, 44, 52, 62};
constexpr int odd3[] = {1, 3, 5, 7, 9, 11, 13, 15};
// iq1 as 8 * grid - 1 with its top bit turned: adding 2 (the shift upwards) carries into no neighbour.
constexpr int eighths1[] = {-9 ^ -0x80, -1 ^ -0x80, 7 ^ -0x80};

alignas(64) inline constexpr auto grid1 = expand<uint64_t, 0, 2048, 2>(eighths1);
alignas(64) inline constexpr auto grid2_xxs = expand<uint64_t, 2048, 256, 2>(magnitudes2);
alignas(64) inline constexpr auto grid2_xs = expand<uint64_t, 2304, 512, 2>(magnitudes2);
alignas(64) inline constexpr auto grid2_s = expand<uint64_t, 2816, 1024, 2>(magnitudes2);
alignas(64) inline constexpr auto grid3_xxs = expand<uint32_t, 3840, 256, 3>(magnitudes3);
alignas(64) inline constexpr auto grid3_s = expand<uint32_t, 4096, 512, 3>(odd3);

// [sign bits] -> a byte of ones for each minus.
alignas(64) inline constexpr auto sign_mask = [] {
  std::array<uint64_t, 256> out{};
  for (unsigned s = 0; s < 256; ++s)
    for (unsigned j = 0; j < 8; ++j) out[s] |= (s >> j & 1) ? uint64_t(0xff) << (8 * j) : 0;
  return out;
}();

// The same for 7 stored bits: the eighth makes the number of minus signs even.
alignas(64) inline constexpr auto even_sign_mask = [] {
  std::array<uint64_t, 128> out{};
  for (unsigned s = 0; s < 128; ++s) out[s] = sign_mask[s | unsigned(std::popcount(s) & 1) << 7];
  return out;
}();

}  // namespace polyquant::iq
