#include "codecs/grouped_repack.hpp"

#include <algorithm>
#include <cstring>

#include "base/simd.hpp"
#include "base/threads.hpp"
#include "base/transposed.hpp"

namespace polyquant {
namespace {

// Tiles of 16 x 16 words: 16 cache lines in, 16 out.
constexpr size_t kTile = 16;

// Bits `mask` of `high` and the bits `shift` above them of `low` change places.
template <int shift>
PQ_INLINE void exchange(EightWords& low, EightWords& high, uint32_t mask) {
  const EightWords t = ((low >> shift) ^ high) & mask;
  high ^= t;
  low ^= t << shift;
}

// Nibble i of word p and nibble p of word i change places, in eight lanes.
PQ_INLINE void transpose_nibbles(EightWords (&w)[8]) {
  for (int i = 0; i < 8; i += 2) exchange<4>(w[i], w[i + 1], 0x0f0f0f0fu);
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) exchange<8>(w[i + j], w[i + j + 2], 0x00ff00ffu);
  for (int j = 0; j < 4; ++j) exchange<16>(w[j], w[j + 4], 0x0000ffffu);
}

constexpr size_t kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};

// Eight columns of words and up to 128 inputs: 64 outputs of 16 words.
PQ_SIMD void awq_tile(const uint32_t* words, size_t k, size_t columns, size_t first, size_t column, uint32_t* out) {
  const size_t n = std::min<size_t>(8, columns - column), last = std::min<size_t>(k, first + 8 * kTile);
  uint32_t tile[64][kTile];
  for (size_t i = first; i < last; i += 8) {
    EightWords w[8] = {};
    for (size_t r = 0; r < 8; ++r) std::memcpy(&w[r], words + (i + r) * columns + column, n * sizeof(uint32_t));
    transpose_nibbles(w);
    for (size_t p = 0; p < 8; ++p) {
      uint32_t lanes[8];
      std::memcpy(lanes, &w[p], sizeof lanes);
      for (size_t c = 0; c < 8; ++c) tile[8 * c + kOrder[p]][(i - first) / 8] = lanes[c];
    }
  }
  for (size_t r = 0; r < 8 * n; ++r)
    std::memcpy(out + (8 * column + r) * (k / 8) + first / 8, tile[r], (last - first) / 8 * sizeof(uint32_t));
}

PQ_SIMD void transpose_columns(const uint32_t* words, size_t rows, size_t cols, size_t first, uint32_t* out) {
  const size_t n = std::min(kTile, cols - first);
  for (size_t r = 0; r < rows; r += kTile)
    transpose(words + r * cols + first, std::min(kTile, rows - r), n, cols, out + first * rows + r, rows);
}

}  // namespace

void transpose_words(const uint32_t* words, size_t rows, size_t cols, uint32_t* out) {
  parallel_for((cols + kTile - 1) / kTile, [=](size_t c) { transpose_columns(words, rows, cols, c * kTile, out); });
}

void awq_rows(const uint32_t* words, size_t k, size_t columns, uint32_t* out) {
  parallel_for((columns + 7) / 8, [=](size_t c) {
    for (size_t i = 0; i < k; i += 8 * kTile) awq_tile(words, k, columns, i, 8 * c, out);
  });
}

}  // namespace polyquant
