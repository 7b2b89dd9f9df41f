// Transposition of 32-bit words, eight by eight in registers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "base/simd.hpp"

namespace polyquant {
namespace {

using EightWords = uint32_t __attribute__((vector_size(32)));

// x[i][j] and x[j][i] change places: words, then blocks of two by two, then of four by four.
PQ_INLINE void transpose_eight(EightWords (&x)[8]) {
  for (int i = 0; i < 8; i += 2) {
    const EightWords a = x[i], b = x[i + 1];
    x[i] = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14);
    x[i + 1] = __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i : {0, 1, 4, 5}) {
    const EightWords a = x[i], b = x[i + 2];
    x[i] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
    x[i + 2] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  for (int i = 0; i < 4; ++i) {
    const EightWords a = x[i], b = x[i + 4];
    x[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
    x[i + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// in [rows, cols], a row every `pitch` words -> out [cols, rows], a row every `out_pitch` words.
PQ_INLINE void transpose(const uint32_t* in, size_t rows, size_t cols, size_t pitch, uint32_t* out, size_t out_pitch) {
  const size_t high = rows / 8 * 8, wide = cols / 8 * 8;
  for (size_t r = 0; r < high; r += 8)
    for (size_t c = 0; c < wide; c += 8) {
      EightWords x[8];
      for (size_t i = 0; i < 8; ++i) std::memcpy(&x[i], in + (r + i) * pitch + c, sizeof x[i]);
      transpose_eight(x);
      for (size_t i = 0; i < 8; ++i) std::memcpy(out + (c + i) * out_pitch + r, &x[i], sizeof x[i]);
    }
  for (size_t r = 0; r < rows; ++r)
    for (size_t c = r < high ? wide : 0; c < cols; ++c) out[c * out_pitch + r] = in[r * pitch + c];
}

}  // namespace
}  // namespace polyquant
