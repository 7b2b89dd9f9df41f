// Trellis-coded weights (codecs/trellis.py): bit streams, rotations, the encoder.
#pragma once

#include <cstddef>
#include <cstdint>

namespace polyquant {

constexpr size_t kTile = 256;    // values per tile: 16 inputs x 16 outputs
constexpr size_t kStagger = 32;  // elements between planes, so that they do not alias in the caches
constexpr size_t kSeam = 128;    // steps on either side of a tile's seam that determine the state there

// 8 codes of `bits` bits <-> `bits` bytes, least significant bit first; count is a multiple of 8.
void trellis_pack(const uint8_t* codes, size_t count, unsigned bits, uint8_t* packed);
void trellis_unpack(const uint8_t* packed, size_t count, unsigned bits, uint8_t* codes);

// Rotates each block of each row in place by the orthonormal Sylvester matrix; block: a power of two up to 128 that
// divides
// cols.
void hadamard(float* x, size_t rows, size_t cols, size_t block);

void rotate_blocks(float* row, size_t cols, size_t block);  // one row

// Value j of a tile is levels[window of `window` bits at bit `bits` * j] / factor.
struct TrellisSearch {
  unsigned bits, window;
  const int16_t* levels;
  float factor;
  int doublings;  // of a difference before squaring
  int clear = 0;  // the difference of a value up to this, or its negative, and any level fits 16 bits
  size_t groups() const { return size_t(1) << (window - bits); }
};

// The tail-biting path of least squared error for each tile: encode_reference of ops/trellis.py, bit for bit.
void trellis_encode(const float* tiles, size_t count, const TrellisSearch& search, uint8_t* codes);

// The first group of the block of `lanes` * 2 ** bits that a plane-wise walk makes n groups after its start: blocks
// reached from the same metrics are consecutive.
inline size_t trellis_block(const TrellisSearch& s, size_t lanes, size_t n) {
  const size_t block = lanes << s.bits, plane = s.groups() >> s.bits;
  if (plane < block) return n;
  const size_t i = n / block;
  return (i & ((size_t(1) << s.bits) - 1)) * plane + (i >> s.bits) * block;
}

// The metrics of all groups before each step of a walk, as one row each. Of long rows only one in `every` is kept: the
// others
// are needed for the next step, and for a few groups of the traceback, which are recomputed.
struct TrellisTrail {
  uint16_t *kept, *between;
  uint16_t* base;  // value subtracted at each step
  size_t every, row;
  uint16_t* at(size_t step) const { return step % every ? between + step % every * row : kept + step / every * row; }
};

// A walk through the trellis. Metrics are stored in its own order: `place` of a group.
using TrellisWalker = void (*)(const TrellisSearch&, const int16_t* table, const int16_t* x[2], size_t steps,
                               const TrellisTrail trail[2]);
struct TrellisWalk {
  const int16_t* table;  // levels in the order in which `walk` reads them
  TrellisWalker walk;
  size_t lanes = 0;  // of its vectors if groups are separated by their low bits; 0: in order

  size_t row(const TrellisSearch& s) const { return lanes ? s.groups() + (kStagger << s.bits) : s.groups(); }
  size_t place(const TrellisSearch& s, size_t group) const {
    return lanes ? (group & ((size_t(1) << s.bits) - 1)) * ((s.groups() >> s.bits) + kStagger) + (group >> s.bits)
                 : group;
  }
};

#if defined(__x86_64__) && defined(__GNUC__)
// The walk of these kernels, and TrellisWalk::lanes; null if the search does not fill their vectors.
TrellisWalker trellis_walk_avx2(const TrellisSearch& search, size_t* lanes);
TrellisWalker trellis_walk_avx512(const TrellisSearch& search, size_t* lanes);
#endif

}  // namespace polyquant
