// Bit streams and rotations.
#include "trellis/trellis.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/simd.hpp"
#include "base/threads.hpp"

namespace polyquant {

void trellis_pack(const uint8_t* codes, size_t count, unsigned bits, uint8_t* packed) {
  for (size_t i = 0; i < count; i += 8, packed += bits) {
    uint64_t word = 0;
    for (unsigned j = 0; j < 8; ++j) word |= uint64_t(codes[i + j] & ((1u << bits) - 1)) << (bits * j);
    for (unsigned b = 0; b < bits; ++b) packed[b] = uint8_t(word >> (8 * b));
  }
}

void trellis_unpack(const uint8_t* packed, size_t count, unsigned bits, uint8_t* codes) {
  for (size_t i = 0; i < count; i += 8, packed += bits) {
    uint64_t word = 0;
    for (unsigned b = 0; b < bits; ++b) word |= uint64_t(packed[b]) << (8 * b);
    for (unsigned j = 0; j < 8; ++j) codes[i + j] = uint8_t(word >> (bits * j) & ((1u << bits) - 1));
  }
}

namespace {

// Butterflies in the order of ops/hadamard.py, for identical rounding.
template <size_t block>
PQ_INLINE void rotate_block(float* x) {
  for (size_t half = 1; half < block; half *= 2)
    for (size_t i = 0; i < block; i += 2 * half)
      for (size_t j = i; j < i + half; ++j) {
        const float a = x[j], b = x[j + half];
        x[j] = a + b, x[j + half] = a - b;
      }
  const float scale = float(1 / std::sqrt(double(block)));
  for (size_t j = 0; j < block; ++j) x[j] *= scale;
}

template <size_t block>
PQ_SIMD void rotate_row(float* x, size_t cols) {
  for (size_t i = 0; i < cols; i += block) rotate_block<block>(x + i);
}

}  // namespace

void rotate_blocks(float* row, size_t cols, size_t block) {
  switch (block) {
    case 2:
      return rotate_row<2>(row, cols);
    case 4:
      return rotate_row<4>(row, cols);
    case 8:
      return rotate_row<8>(row, cols);
    case 16:
      return rotate_row<16>(row, cols);
    case 32:
      return rotate_row<32>(row, cols);
    case 64:
      return rotate_row<64>(row, cols);
    case 128:
      return rotate_row<128>(row, cols);
  }
}

void hadamard(float* x, size_t rows, size_t cols, size_t block) {
  const size_t together = std::max<size_t>(1, 16384 / cols);
  parallel_for((rows + together - 1) / together, [&](size_t c) {
    for (size_t r = c * together; r < std::min(rows, (c + 1) * together); ++r) rotate_blocks(x + r * cols, cols, block);
  });
}

}  // namespace polyquant
