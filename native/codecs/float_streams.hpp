// Small floats: decoding, rounding, sums of errors, and the order of 4-bit floats in blocks. References:
// ops/small_floats.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace polyquant {

// w = table[code] * scale of the block; the rows count from `start` in the table of blocks. high, wide: rows and
// columns of a block, 0 for all; scale_cols: of the table.
struct BlockGrid {
  size_t high, wide, start, scale_cols;
};
void decode_small(const uint8_t* codes, size_t rows, size_t cols, const float* table, const float* scale,
                  const BlockGrid& grid, float* w);

// Largest magnitudes of groups of columns, the last one partial: [rows, ceil(cols / group)].
void amax_groups(const float* w, size_t rows, size_t cols, size_t group, float* out);

enum class SmallFloat { e2m1, e4m3, e5m2 };

// Codes nearest to w / scale, ties to even, saturated; scale [rows, groups], 0 gives zeros.
void encode_small(SmallFloat kind, const float* w, size_t rows, size_t cols, const float* scale, size_t group,
                  uint8_t* codes);

// Sums of weights * squared errors of groups for `count` candidates: scale, out [rows, groups, count]; weights [cols].
void errors_small(SmallFloat kind, const float* w, size_t rows, size_t cols, const float* scale, size_t group,
                  size_t count, const float* weights, float* out);

// Bytes of pairs of neighbours (columns 2 j and 2 j + 1) and scales -> ggml's blocks: the scales of `together` groups,
// then each group with columns j and j + size / 2 in byte j. size: columns of a group.
void join_fp4(const uint8_t* pairs, const uint8_t* scales, size_t groups, size_t size, size_t together,
              uint8_t* blocks);
void split_fp4(const uint8_t* blocks, size_t groups, size_t size, size_t together, uint8_t* pairs, uint8_t* scales);

}  // namespace polyquant
