// Sixteen lines of bytes as columns of 512-bit registers. Included by files for AVX-512.
#pragma once

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // of GCC 12, in its own intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/simd.hpp"

namespace polyquant {
namespace {

// Four registers, each of four rows of 16 bytes: lane l of register i is row 4 l + i. -> register j holds the four
// bytes from 4 j on of every row.
PQ_INLINE void in_quads(__m512i (&x)[4]) {
  const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
  const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
  x[0] = _mm512_unpacklo_epi64(a, c), x[1] = _mm512_unpackhi_epi64(a, c);
  x[2] = _mm512_unpacklo_epi64(b, d), x[3] = _mm512_unpackhi_epi64(b, d);
}

// Lane l of register i and lane i of register l change places.
PQ_INLINE void exchange_lanes(__m512i (&x)[4]) {
  const __m512i a = _mm512_shuffle_i32x4(x[0], x[1], 0x44), b = _mm512_shuffle_i32x4(x[0], x[1], 0xee);
  const __m512i c = _mm512_shuffle_i32x4(x[2], x[3], 0x44), d = _mm512_shuffle_i32x4(x[2], x[3], 0xee);
  x[0] = _mm512_shuffle_i32x4(a, c, 0x88), x[1] = _mm512_shuffle_i32x4(a, c, 0xdd);
  x[2] = _mm512_shuffle_i32x4(b, d, 0x88), x[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
}

// Sixteen lines, `stride` bytes apart: three registers and four pointers reach all.
struct SixteenLines {
  const uint8_t* first;
  size_t stride;

  PQ_INLINE SixteenLines from(size_t byte) const { return {first + byte, stride}; }

  // 16 bytes of each line, in the order that `in_quads` takes.
  PQ_INLINE void load(__m512i (&x)[4]) const {
    const size_t four = 4 * stride, twelve = 12 * stride;
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i) {
      const uint8_t* const line = first + i * stride;
      const auto at = [&](size_t n) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(line + n)); };
      const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(at(0)), at(four), 1),
                    high = _mm256_inserti128_si256(_mm256_castsi128_si256(at(2 * four)), at(twelve), 1);
      x[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
  }
};

// Lines of `size` bytes, of which `rows` lines and `count` bytes of each exist: copied, with zeros after them, if some
// do not, and if the lines are a multiple of 4096 bytes apart, because they do not fit L1 beside each other then. copy:
// 16 * size bytes.
template <size_t size>
PQ_INLINE SixteenLines complete_lines(SixteenLines lines, size_t rows, size_t count, uint8_t* copy) {
  if (rows < 16 || count < size) [[unlikely]] {
    std::memset(copy, 0, 16 * size);
    for (size_t r = 0; r < rows; ++r) std::memcpy(copy + r * size, lines.first + r * lines.stride, count);
  } else if (lines.stride % 4096 == 0) {
    for (size_t r = 0; r < 16; ++r) std::memcpy(copy + r * size, lines.first + r * lines.stride, size);
  } else {
    return lines;
  }
  return {copy, size};
}

}  // namespace
}  // namespace polyquant
