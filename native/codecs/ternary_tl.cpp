// TL1 and TL2 of bitnet.cpp: nibbles in the order of its lookup-table kernels. src/polyquant/codecs/tl.py has the byte
// diagrams.
#include <array>
#include <cstring>

#include "base/half.hpp"
#include "base/simd.hpp"
#include "codecs/ternary.hpp"

namespace polyquant {
namespace {

struct Pair {
  int8_t code[4];  // a byte: two pairs
};
struct Triple {
  int8_t code[4];  // a nibble: three weights, the last entry unused
};

// Nibble 3 a + b + 4; 9 to 15 are undefined and read as zeros.
constexpr std::array<Pair, 256> pairs = [] {
  std::array<Pair, 256> t{};
  for (int byte = 0; byte < 256; ++byte)
    for (int half = 0; half < 2; ++half) {
      const int q = half ? byte & 15 : byte >> 4;
      t[size_t(byte)].code[2 * half] = int8_t(q > 8 ? 0 : q / 3 - 1);
      t[size_t(byte)].code[2 * half + 1] = int8_t(q > 8 ? 0 : q % 3 - 1);
    }
  return t;
}();

// Nibble |9 a + 3 b + c|; 14 and 15 are undefined and read as zeros.
constexpr std::array<Triple, 16> triples = [] {
  std::array<Triple, 16> t{};
  for (int q = 0; q < 14; ++q) {
    const int c = (q + 1) % 3 - 1, b = ((q - c) / 3 + 1) % 3 - 1, a = ((q - c) / 3 - b) / 3;
    t[size_t(q)] = {{int8_t(a), int8_t(b), int8_t(c), 0}};
  }
  return t;
}();

uint8_t pack_pairs(const int8_t* w) { return uint8_t((3 * w[0] + w[1] + 4) << 4 | (3 * w[2] + w[3] + 4)); }

// Rows of a block of 32 in the order of TL2's bytes: groups of eight, the middle two swapped.
constexpr size_t swapped(size_t i) { return i < 8 || i >= 24 ? i : i ^ 24; }

// Calls f(row, column) for every byte of TL1 in file order; a byte is four weights of one row.
template <class F>
PQ_INLINE void walk_tl1(size_t rows, size_t cols, Tile t, F f) {
  const size_t by = 256 / t.bm;
  for (size_t m = 0; m < rows; m += t.bm_outer)
    for (size_t k = 0; k < cols; k += t.bk)
      for (size_t i = 0; i < t.bm_outer; i += t.bm)
        for (size_t j = 0; j < t.bk; j += by)
          for (size_t r = 0; r < t.bm; r += 16)
            for (size_t c = 0; c < by; c += 4)
              for (size_t lane = 0; lane < 16; ++lane) f(m + i + r + lane, k + j + c);
}

// Calls f(row, column) for every group of 32 rows by `step` columns of TL2 in file order.
template <class F>
PQ_INLINE void walk_tl2(size_t rows, size_t from, size_t to, size_t outer, size_t bk, size_t step, F f) {
  for (size_t m = 0; m < rows; m += outer)
    for (size_t k = from; k < to; k += bk)
      for (size_t i = 0; i < outer; i += 32)
        for (size_t j = 0; j < bk; j += step) f(m + i, k + j);
}

}  // namespace

void unpack_tl1(const uint8_t* src, int8_t* codes, size_t rows, size_t cols, Tile tile) {
  walk_tl1(rows, cols, tile,
           [&](size_t row, size_t col) { std::memcpy(codes + row * cols + col, pairs[*src++].code, 4); });
}

void pack_tl1(const int8_t* codes, uint8_t* dst, size_t rows, size_t cols, Tile tile) {
  walk_tl1(rows, cols, tile, [&](size_t row, size_t col) { *dst++ = pack_pairs(codes + row * cols + col); });
}

void unpack_tl2(const uint8_t* src, int8_t* codes, size_t rows, size_t cols, size_t three, Tile t) {
  const uint8_t *index = src, *sign = src + rows * three / 6, *two = sign + rows * three / 24;
  // 24 columns at a time: four bytes of two triples, and eight sign bits, per row
  walk_tl2(rows, 0, three, t.bm_outer, t.bk, 24, [&](size_t row, size_t col) {
    for (size_t i = 0; i < 32; ++i) {
      const unsigned signs = load<uint16_t>(sign + 2 * (i & 15)) >> (i < 16);  // bit 14 - 2 triple
      int8_t* w = codes + (row + i) * cols + col;
      for (size_t triple = 0; triple < 8; ++triple, w += 3) {
        const uint8_t byte = index[triple / 2 * 32 + swapped(i)];
        const Triple q = triples[triple & 1 ? byte & 15 : byte >> 4];
        const int flip = signs >> (14 - 2 * triple) & 1 ? -1 : 1;
        for (int k = 0; k < 3; ++k) w[k] = int8_t(q.code[k] * flip);
      }
    }
    index += 4 * 32;
    sign += 32;
  });
  walk_tl2(rows, three, cols, t.bm_outer, 32, 4, [&](size_t row, size_t col) {
    for (size_t i = 0; i < 32; ++i) std::memcpy(codes + (row + i) * cols + col, pairs[two[swapped(i)]].code, 4);
    two += 32;
  });
}

void pack_tl2(const int8_t* codes, uint8_t* dst, size_t rows, size_t cols, size_t three, Tile t) {
  uint8_t *index = dst, *sign = dst + rows * three / 6, *two = sign + rows * three / 24;
  std::memset(dst, 0, rows * three / 24 * 5);
  walk_tl2(rows, 0, three, t.bm_outer, t.bk, 24, [&](size_t row, size_t col) {
    for (size_t i = 0; i < 32; ++i) {
      const int8_t* w = codes + (row + i) * cols + col;
      unsigned signs = load<uint16_t>(sign + 2 * (i & 15));
      for (size_t triple = 0; triple < 8; ++triple, w += 3) {
        const int q = 9 * w[0] + 3 * w[1] + w[2];
        index[triple / 2 * 32 + swapped(i)] |= uint8_t((q < 0 ? -q : q) << (triple & 1 ? 0 : 4));
        signs |= unsigned(q < 0) << (14 - 2 * triple) << (i < 16);
      }
      store(sign + 2 * (i & 15), uint16_t(signs));
    }
    index += 4 * 32;
    sign += 32;
  });
  walk_tl2(rows, three, cols, t.bm_outer, 32, 4, [&](size_t row, size_t col) {
    for (size_t i = 0; i < 32; ++i) two[swapped(i)] = pack_pairs(codes + (row + i) * cols + col);
    two += 32;
  });
}

}  // namespace polyquant
