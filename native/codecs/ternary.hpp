// Ternary layouts. Codes are int8 in {-1, 0, +1}; src/polyquant/codecs/{ternary,tl}.py have the byte diagrams.
#pragma once

#include <cstddef>
#include <cstdint>

namespace polyquant {

// Four 2-bit symbols per byte: byte p of a block of `width` bytes holds the weights p, width + p, 2 width + p, 3 width
// + p.
struct Lanes {
  size_t width;
  bool high_first;  // the first weight in bits 7-6, otherwise in bits 1-0
  bool zero_first;  // symbols 0, +1, -1 (Trinity), otherwise -1, 0, +1; symbol 3 is undefined and reads as 0
};

void unpack_lanes(const uint8_t* src, int8_t* codes, size_t bytes, Lanes lanes);
void dequantize_lanes(const uint8_t* src, float* dst, size_t bytes, Lanes lanes, float scale);
bool pack_lanes(const int8_t* codes, uint8_t* dst, size_t bytes, Lanes lanes);  // false: a code outside -1..1
void relayout_lanes(const uint8_t* src, uint8_t* dst, size_t bytes, Lanes from, Lanes to, int8_t* scratch,
                    size_t chunk);
void count_symbols(const uint8_t* src, size_t bytes, uint64_t counts[4]);

// Sign of every weight; magnitudes up to `floor` become 0; *largest receives the bits of max |w|. False for NaN or
// infinity,
// or, if `exact`, for a magnitude that is neither 0 nor the largest.
bool ternarize_tensor(const float* w, int8_t* codes, size_t n, bool exact, float floor, uint32_t* largest);

struct Tile {
  size_t bm_outer, bk, bm;  // BM, BK, bm of bitnet.cpp's kernel configuration
};

// rows x cols codes; the caller checks sizes. TL1: cols % bk == 0. TL2: the columns after `three` are stored as pairs.
void unpack_tl1(const uint8_t* src, int8_t* codes, size_t rows, size_t cols, Tile tile);
void pack_tl1(const int8_t* codes, uint8_t* dst, size_t rows, size_t cols, Tile tile);
void unpack_tl2(const uint8_t* src, int8_t* codes, size_t rows, size_t cols, size_t three, Tile tile);
void pack_tl2(const int8_t* codes, uint8_t* dst, size_t rows, size_t cols, size_t three, Tile tile);

}  // namespace polyquant
