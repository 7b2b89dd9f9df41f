// Shared by the libFuzzer targets: an input as numbers and arrays.
//
// Every buffer is allocated with exactly the size that the bindings require, so that one byte too many is found.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "codecs/blocks.hpp"

namespace polyquant::fuzz {

// Takes numbers from the front of an input, and bytes (repeated as needed) from the rest.
struct Input {
  const uint8_t* data;
  size_t size, at = 0;

  size_t number(size_t below) { return size_t(at < size ? data[at++] : 0) % below; }

  std::vector<uint8_t> bytes(size_t n) {
    std::vector<uint8_t> out(n);
    size_t filled = at < size ? std::min(n, size - at) : n;
    if (at < size && n) std::memcpy(out.data(), data + at, filled);
    for (size_t more; filled < n; filled += more) {  // doubles the filled part: a few copies fill a large buffer
      more = std::min(filled, n - filled);
      std::memcpy(out.data() + filled, out.data(), more);
    }
    return out;
  }

  size_t between(size_t least, size_t most) { return least + number(most - least + 1); }

  // Any bits: NaN, infinities, denormals; half of the inputs get moderate values.
  std::vector<float> floats(size_t n) {
    const bool moderate = number(2);
    const std::vector<uint8_t> raw = bytes(4 * n);
    std::vector<float> out(n);
    if (n) std::memcpy(out.data(), raw.data(), 4 * n);
    if (moderate)
      for (size_t i = 0; i < n; ++i) out[i] = float(raw[i]) / 16 - 8;
    return out;
  }
};

std::vector<BlockKernel> all_kernels();  // kernels.cpp

void attention(Input in);  // layers.cpp
void decoder(Input in);
void experts(Input in);
void exact(Input in);   // exact.cpp
void affine(Input in);  // matrices.cpp
void grouped(Input in);
void transposed(Input in);
void trellis(Input in);

}  // namespace polyquant::fuzz
