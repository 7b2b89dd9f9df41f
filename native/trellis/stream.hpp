// Bytes of a tile's circular bit stream. Included once per instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/simd.hpp"

namespace polyquant {
namespace {

PQ_INLINE uint64_t word64(const uint8_t* p) {
  uint64_t x;
  std::memcpy(&x, p, 8);
  return x;
}

// Eight bytes of a circular stream of 32 k bytes.
template <int k, int byte>
PQ_INLINE uint64_t bytes8(const uint8_t* tile) {
  if constexpr (byte + 8 <= 32 * k)
    return word64(tile + byte);
  else
    return word64(tile + 32 * k - 8) >> (8 * (byte + 8 - 32 * k)) | word64(tile) << (8 * (32 * k - byte));
}

}  // namespace
}  // namespace polyquant
