// Panels of sixteen rows times vectors of sixteen tokens, for processors with registers that are tiles (AMX).
#pragma once

#include <cstddef>
#include <cstdint>

namespace polyquant {

// A unit of a row: signed codes in the order of the columns; scales and offsets of groups of 32.
struct alignas(64) TileRow {
  int8_t q[256];
  float d[8], m[8];
};
struct TileUnit {
  TileRow row[16];
};

// One vector of Activations::lanes.
struct TileInputs {
  const int8_t* q;
  const float *scale, *sums;  // of groups of 32
};

struct TileKernels {
  using Multiply = void(const TileUnit*, size_t units, TileInputs, float* out);  // out [16 rows][16 tokens] is added to

  // Around calls by one thread of `multiply` for scales of `span` columns, 32 or 128.
  void (*begin)(int span);
  void (*end)();
  Multiply* (*multiply)(int span, bool offset);
};

const TileKernels* tiles_amx();  // null if the compiler does not know them

}  // namespace polyquant
