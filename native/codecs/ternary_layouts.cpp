// Layouts of four 2-bit symbols per byte. src/polyquant/codecs/ternary.py has the byte diagrams.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <type_traits>

#include "base/half.hpp"
#include "base/simd.hpp"
#include "codecs/ternary.hpp"

namespace polyquant {
namespace {

// Converts all four symbols of a byte at once to the order -1, 0, +1; 3 becomes the symbol of 0.
template <bool ZeroFirst>
PQ_INLINE uint8_t to_plain(uint8_t x) {
  const uint8_t low = x & 0x55, high = (x >> 1) & 0x55;
  if constexpr (ZeroFirst) return uint8_t((low & ~high) << 1) | uint8_t(~(high ^ low) & 0x55);
  return uint8_t(x & ~(low << 1));
}

// The inverse; x holds no 3.
template <bool ZeroFirst>
PQ_INLINE uint8_t from_plain(uint8_t x) {
  const uint8_t low = x & 0x55, high = (x >> 1) & 0x55;
  if constexpr (ZeroFirst) return uint8_t((~(high | low) & 0x55) << 1) | high;
  return x;
}

template <bool HighFirst>
constexpr int shift_of(int lane) {
  return HighFirst ? 6 - 2 * lane : 2 * lane;
}

template <bool H, bool Z, class Put>
PQ_INLINE void unpack_block(const uint8_t* src, size_t width, Put put) {
  for (size_t p = 0; p < width; ++p) put(p, int8_t((to_plain<Z>(src[p]) >> shift_of<H>(0) & 3) - 1));
  for (size_t p = 0; p < width; ++p) put(width + p, int8_t((to_plain<Z>(src[p]) >> shift_of<H>(1) & 3) - 1));
  for (size_t p = 0; p < width; ++p) put(2 * width + p, int8_t((to_plain<Z>(src[p]) >> shift_of<H>(2) & 3) - 1));
  for (size_t p = 0; p < width; ++p) put(3 * width + p, int8_t((to_plain<Z>(src[p]) >> shift_of<H>(3) & 3) - 1));
}

template <size_t N>
using Width = std::integral_constant<size_t, N>;

// Only the combinations used by formats are compiled, each once per instruction set: high bits first with 0 = -1
// (bitnet.cpp:
// blocks of 32 and 16 kept in registers; any other width is a row), low bits first (Hugging Face: a quarter of the
// matrix),
// zero first (Trinity).
template <class Run>
PQ_INLINE void by_layout(Lanes l, Run run) {
  using std::bool_constant;
  if (l.zero_first)
    run(bool_constant<false>{}, bool_constant<true>{}, Width<1>{});
  else if (!l.high_first)
    run(bool_constant<false>{}, bool_constant<false>{}, l.width);
  else if (l.width == 32)
    run(bool_constant<true>{}, bool_constant<false>{}, Width<32>{});
  else if (l.width == 16)
    run(bool_constant<true>{}, bool_constant<false>{}, Width<16>{});
  else
    run(bool_constant<true>{}, bool_constant<false>{}, l.width);
}

template <class T, class Make>
PQ_INLINE void unpack_any(const uint8_t* src, T* dst, size_t bytes, Lanes l, Make make) {
  by_layout(l, [&](auto high_first, auto zero_first, auto width) {
    for (size_t b = 0; b < bytes; b += width, dst += 4 * width)
      unpack_block<high_first, zero_first>(src + b, width, [&](size_t i, int8_t code) { dst[i] = make(code); });
  });
}

template <bool H, bool Z>
PQ_INLINE uint8_t pack_block(const int8_t* codes, uint8_t* dst, size_t width) {
  uint8_t bad = 0;
  for (size_t p = 0; p < width; ++p) {
    const uint8_t a = uint8_t(codes[p] + 1), b = uint8_t(codes[width + p] + 1);
    const uint8_t c = uint8_t(codes[2 * width + p] + 1), d = uint8_t(codes[3 * width + p] + 1);
    bad |= uint8_t((a | b | c | d) & 0xfc) | uint8_t((a & a >> 1) | (b & b >> 1) | (c & c >> 1) | (d & d >> 1));
    dst[p] =
        from_plain<Z>(uint8_t(a << shift_of<H>(0) | b << shift_of<H>(1) | c << shift_of<H>(2) | d << shift_of<H>(3)));
  }
  return bad;
}

// x86 <-> ARM of bitnet.cpp: bytes p and 16 + p of a block of 128 hold the same weights as bytes p of two blocks of 64.
PQ_SIMD void x86_to_arm(const uint8_t* __restrict src, uint8_t* __restrict dst, size_t bytes) {
  for (size_t b = 0; b < bytes; b += 32, src += 32, dst += 32)
    for (int p = 0; p < 16; ++p) {
      const uint8_t x = to_plain<false>(src[p]), y = to_plain<false>(src[16 + p]);
      dst[p] = uint8_t((x & 0xc0) | (y & 0xc0) >> 2 | (x & 0x30) >> 2 | (y & 0x30) >> 4);
      dst[16 + p] = uint8_t((x & 0x0c) << 4 | (y & 0x0c) << 2 | (x & 0x03) << 2 | (y & 0x03));
    }
}

PQ_SIMD void arm_to_x86(const uint8_t* __restrict src, uint8_t* __restrict dst, size_t bytes) {
  for (size_t b = 0; b < bytes; b += 32, src += 32, dst += 32)
    for (int p = 0; p < 16; ++p) {
      const uint8_t x = to_plain<false>(src[p]), y = to_plain<false>(src[16 + p]);
      dst[p] = uint8_t((x & 0xc0) | (x & 0x0c) << 2 | (y & 0xc0) >> 4 | (y & 0x0c) >> 2);
      dst[16 + p] = uint8_t((x & 0x30) << 2 | (x & 0x03) << 4 | (y & 0x30) >> 2 | (y & 0x03));
    }
}

bool is_plain(Lanes l, size_t width) { return l.high_first && !l.zero_first && l.width == width; }

}  // namespace

PQ_SIMD void unpack_lanes(const uint8_t* src, int8_t* codes, size_t bytes, Lanes lanes) {
  unpack_any(src, codes, bytes, lanes, [](int8_t code) { return code; });
}

PQ_SIMD void dequantize_lanes(const uint8_t* src, float* dst, size_t bytes, Lanes lanes, float scale) {
  unpack_any(src, dst, bytes, lanes, [scale](int8_t code) { return float(code) * scale; });
}

PQ_SIMD bool pack_lanes(const int8_t* codes, uint8_t* dst, size_t bytes, Lanes l) {
  uint8_t bad = 0;
  by_layout(l, [&](auto high_first, auto zero_first, auto width) {
    for (size_t b = 0; b < bytes; b += width, codes += 4 * width)
      bad |= pack_block<high_first, zero_first>(codes, dst + b, width);
  });
  return bad == 0;
}

void relayout_lanes(const uint8_t* src, uint8_t* dst, size_t bytes, Lanes from, Lanes to, int8_t* scratch,
                    size_t chunk) {
  if (is_plain(from, 32) && is_plain(to, 16)) return x86_to_arm(src, dst, bytes);
  if (is_plain(from, 16) && is_plain(to, 32)) return arm_to_x86(src, dst, bytes);
  for (size_t b = 0; b < bytes; b += chunk) {
    const size_t part = std::min(chunk, bytes - b);
    unpack_lanes(src + b, scratch, part, from);
    pack_lanes(scratch, dst + b, part, to);
  }
}

PQ_SIMD void count_symbols(const uint8_t* src, size_t bytes, uint64_t counts[4]) {
  constexpr uint64_t lows = 0x5555555555555555u;
  uint64_t low = 0, high = 0, both = 0;
  for (size_t b = 0; b < bytes; b += 8) {
    uint64_t x = 0;
    std::memcpy(&x, src + b, std::min<size_t>(8, bytes - b));
    low += uint64_t(std::popcount(x & lows));
    high += uint64_t(std::popcount(x >> 1 & lows));
    both += uint64_t(std::popcount(x & x >> 1 & lows));
  }
  counts[1] = low - both;
  counts[2] = high - both;
  counts[3] = both;
  counts[0] = 4 * uint64_t(bytes) - low - high + both;
}

PQ_SIMD bool ternarize_tensor(const float* w, int8_t* codes, size_t n, bool exact, float floor, uint32_t* largest) {
  uint32_t top = 0;
  for (size_t i = 0; i < n; ++i) top = std::max(top, std::bit_cast<uint32_t>(w[i]) & 0x7fffffffu);
  *largest = top;
  if (top >= 0x7f800000u) return false;
  const uint32_t bar = std::bit_cast<uint32_t>(floor);
  uint32_t other = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(w[i]), magnitude = bits & 0x7fffffffu;
    codes[i] = int8_t(magnitude > bar ? 1 - 2 * int(bits >> 31) : 0);
    other |= uint32_t(magnitude != 0) & uint32_t(magnitude != top);
  }
  return !exact || other == 0;
}

}  // namespace polyquant
