// Tiles of AMX: registers of 16 rows of 64 bytes. Tiles 0 ... 3 are sums, int32 [16 rows][16 tokens]; 4 and 5 weights,
// int8 [16 rows][depth]; 6 and 7 activations, int8 [depth / 4][16 tokens][4]. Included by the files for AMX.
//
// With POLYQUANT_EMULATE_AMX they are arrays in memory, for tests on processors without them.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/simd.hpp"

namespace polyquant {
namespace {

struct TileConfiguration {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  // depth: columns of weights that a product of tiles adds up, 32 or 64.
  explicit TileConfiguration(int depth) {
    for (int i = 0; i < 8; ++i) row_bytes[i] = 64, rows[i] = 16;
    row_bytes[4] = row_bytes[5] = uint16_t(depth);
    rows[6] = rows[7] = uint8_t(depth / 4);
  }
};

#if defined(POLYQUANT_EMULATE_AMX)

struct EmulatedTiles {
  TileConfiguration shape{64};
  uint8_t data[8][16][64];

  void load(int tile, const void* from, size_t stride) {
    for (size_t r = 0; r < shape.rows[tile]; ++r)
      std::memcpy(data[tile][r], static_cast<const uint8_t*>(from) + r * stride, shape.row_bytes[tile]);
  }
  void store(int tile, void* to, size_t stride) const {
    for (size_t r = 0; r < shape.rows[tile]; ++r)
      std::memcpy(static_cast<uint8_t*>(to) + r * stride, data[tile][r], shape.row_bytes[tile]);
  }
  void zero(int tile) { std::memset(data[tile], 0, sizeof data[tile]); }
  void dot(int sums, int a, int b) {
    for (size_t r = 0; r < 16; ++r)
      for (size_t t = 0; t < 16; ++t) {
        int32_t sum;
        std::memcpy(&sum, data[sums][r] + 4 * t, 4);
        for (size_t k = 0; k < shape.row_bytes[a]; ++k)
          sum += int8_t(data[a][r][k]) * int8_t(data[b][k / 4][4 * t + k % 4]);
        std::memcpy(data[sums][r] + 4 * t, &sum, 4);
      }
  }
};
inline thread_local EmulatedTiles emulated_tiles;

inline void configure_tiles(const TileConfiguration& shape) { emulated_tiles.shape = shape; }
inline void release_tiles() {}
template <int tile>
void tile_load(const void* from, size_t stride) {
  emulated_tiles.load(tile, from, stride);
}
template <int tile>
void tile_store(void* to, size_t stride) {
  emulated_tiles.store(tile, to, stride);
}
template <int tile>
void tile_zero() {
  emulated_tiles.zero(tile);
}
template <int sums, int a, int b>
void tile_dot() {
  emulated_tiles.dot(sums, a, b);
}

#else

PQ_INLINE void configure_tiles(const TileConfiguration& shape) {
  asm volatile("" : : "r"(&shape) : "memory");  // GCC takes it for a load of eight bytes
  _tile_loadconfig(&shape);
}
PQ_INLINE void release_tiles() { _tile_release(); }
// As assembly: the intrinsics of GCC want the number of a tile as a digit, and do not say that they read memory.
template <int tile>
PQ_INLINE void tile_load(const void* from, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "n"(tile) : "memory");
}
template <int tile>
PQ_INLINE void tile_store(void* to, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "n"(tile) : "memory");
}
template <int tile>
PQ_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "n"(tile));
}
// sums += a times b, of signed bytes
template <int sums, int a, int b>
PQ_INLINE void tile_dot() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(sums), "n"(a), "n"(b));
}

#endif

// The tiles of this thread, as long as this lives: a thread that has tiles in use is slow to interrupt.
class Tiles {
 public:
  explicit Tiles(int depth) { configure_tiles(TileConfiguration(depth)); }
  ~Tiles() { release_tiles(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

}  // namespace
}  // namespace polyquant
