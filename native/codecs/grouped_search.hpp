// The best affine grid of each group of columns, with the codes. Reference: src/polyquant/quantizers/grouped.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace polyquant {

struct BlockKernel;
struct ErrorSums;

enum class Zero { none, integer, bias };
enum class ScaleType { f16, bf16, f32 };

struct GridSearch {
  int bits;  // 2 to 8
  Zero zero;
  ScaleType type;
  const float* clips;
  size_t clip_count;
};

// w: rows * groups cells of `size` weights; weights: groups * size, the importance of the columns.
void grouped_search(const float* w, const float* weights, size_t rows, size_t groups, size_t size,
                    const GridSearch& how, int8_t* codes, float* scale, float* offset, float* bias);

// The same for weights stored in blocks of `source`, a few rows at a time in cache, and the error of the codes unless
// `errors` is null. source: its blocks divide the rows. False if a weight is not finite: the rest is then undefined.
bool grouped_quantize(const BlockKernel& source, const uint8_t* data, const float* weights, size_t rows, size_t groups,
                      size_t size, const GridSearch& how, int8_t* codes, float* scale, float* offset, float* bias,
                      ErrorSums* errors);

}  // namespace polyquant
