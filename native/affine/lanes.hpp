// Rounded inputs of many tokens, side by side. Included by the files for AVX-512.
#pragma once

#include <algorithm>
#include <cstring>

#include "affine/matrix.hpp"
#include "base/sixteen_lines.hpp"

namespace polyquant {
namespace {

// Inputs of kLaneWidth tokens from `first` on, after the last repeated, as WideInput::lanes: `flip` is added to each.
inline void put_tokens(const WideInput& x, size_t first, size_t cols, int flip, uint8_t* out) {
  const size_t count = std::min(kLaneWidth, x.tokens - first);
  for (size_t i = 0; i < lane_columns(cols); i += 16, out += 256) {
    SixteenLines lines{x.bytes + (i / kPanel * x.tokens + first) * kPanel + i % kPanel, kPanel};
    uint8_t copy[kLaneWidth * 16];
    if (count < kLaneWidth) {
      for (size_t t = 0; t < kLaneWidth; ++t)
        std::memcpy(copy + 16 * t, lines.first + std::min(t, count - 1) * kPanel, 16);
      lines = {copy, 16};
    }
    __m512i quads[4];
    lines.load(quads);
    in_quads(quads);
    for (int j = 0; j < 4; ++j)
      _mm512_store_si512(out + 64 * j, _mm512_add_epi8(quads[j], _mm512_set1_epi8(char(flip))));
  }
}

}  // namespace
}  // namespace polyquant
