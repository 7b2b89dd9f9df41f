// A trellis-coded matrix in its stored layout: decoding, and multiplication without decoding it to memory.
//
//   y = ((x * su) H_K) What H_N * sv       What [K, N] = scales * values
//
// Integer path: the rotated input is rounded to int8 with a scale per 128 values; codebooks give integer levels,
// value = level * step + zero. Tiles of 16 inputs x 16 outputs are consecutive along the outputs. A single token
// multiplies
// levels directly from the stream; several tokens multiply a panel of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "packed/packed.hpp"
#include "trellis/trellis.hpp"

namespace polyquant {

enum class Book { mul1, grid, mcg, three_inst, table };

struct TrellisMatrix;

// int8 input of one matrix for T tokens, K padded to 128.
struct TrellisInput {
  size_t tokens, padded;
  const float* scale;    // [T, padded / 128]
  const float* sum;      // [T, padded / 128] scale * sum of the codes
  const int16_t* codes;  // [padded / 128, T, 128]: rows of one matrix would fall into the same lines of the cache
  // For `few`: [lanes / 16, T rounded up to a power of two, 16], in the order of the lanes, with zeros for more tokens.
  const int32_t* pairs;  // each code twice, as 16 bits
  const int32_t* quads;  // four times as 8 bits
  const int32_t* lower;  // once, in the lower 16 bits
};

// The functions of one instruction set for one stream type.
struct TrellisKernel {
  // y[t * stride + 16 * (last - first)] of up to `most` tokens, tile columns [first, last)
  void (*few)(const TrellisMatrix&, size_t first, size_t last, const TrellisInput&, float* y, size_t stride);
  // levels of a tile: [8 pairs of inputs][16 outputs][2]
  void (*levels)(const TrellisMatrix&, const uint8_t* tile, int16_t* panel);
  // values of a tile times scales [16]: [16 inputs][16 outputs], with an input stride in floats
  void (*numbers)(const TrellisMatrix&, const uint8_t* tile, const float* scales, float* out, size_t stride);
  size_t most;
};

struct TrellisSet {
  TrellisKernel (*find)(unsigned bits, Book book, bool row_major);
  // y[t * stride + o] += (levels * step + zero) . codes * scales[o], for 128 inputs: panel [64][16][2]; block: which
  // 128 inputs
  void (*times)(const int16_t* panel, const TrellisInput&, size_t block, float step, float zero, const float* scales,
                float* y, size_t stride);
  // y[t * stride + o] += x[t * padded + i] w[i][o]: w [inputs][16]
  void (*times_floats)(const float* w, size_t inputs, const float* x, size_t padded, size_t tokens, float* y,
                       size_t stride);
  // squares of 128 x 128 with row stride kLine. Rotates blocks of the first axis, in `columns` columns, a multiple of
  // 16
  void (*rotate_down)(float* x, size_t rows, size_t columns, size_t block);
  void (*transpose)(const float* x, float* out);
  void (*finish)(const float* x, float sv, const float* su, float* out, size_t count);  // out = x * sv * su
};

constexpr size_t kLine = 144;  // with a power of two, the rows of a column would map to one cache line

struct TrellisMatrix {
  const uint8_t* tiles;
  size_t inputs, outputs;  // K, N
  unsigned bits, window;
  Book book;
  const int16_t* levels;  // [2 ** window]
  const float* numbers;   // [2 ** window]
  float step, zero;
  const uint8_t* order;  // stream position -> index 16 * input + output; null for row-major
  size_t block_k, block_n;
  size_t groups, span;            // rows of scales, and inputs per row
  const float *scales, *su, *sv;  // scales [groups, outputs rounded up to 16]
  bool halves;                    // each weight is rounded to half precision, without rotation
  TrellisKernel kernel;

  size_t tile_rows() const { return (inputs + 15) / 16; }
  size_t tile_columns() const { return (outputs + 15) / 16; }
  const uint8_t* tile(size_t row, size_t column) const { return tiles + (row * tile_columns() + column) * 32 * bits; }
  const float* scales_of(size_t input) const { return scales + input / span * tile_columns() * 16; }
};

const TrellisSet& trellis_plain();
#if defined(__x86_64__) && defined(__GNUC__)
const TrellisSet& trellis_avx2();
const TrellisSet& trellis_avx_vnni();
const TrellisSet& trellis_vnni();
const TrellisSet* trellis_fp16();  // null: compiled without it
#elif defined(__aarch64__) && defined(__GNUC__)
const TrellisSet& trellis_neon();
const TrellisSet& trellis_neon_dotprod();
const TrellisSet& trellis_neon_i8mm();
#endif
const TrellisSet& trellis_set();

void trellis_dequantize(const TrellisMatrix& w, float* out);  // [N, K]

// Several matrices with a common input [T, K], their outputs side by side: y[t * stride + ...].
struct TrellisJob {
  const TrellisMatrix* matrix;
  float* y;
};
void multiply_trellis(std::span<const TrellisJob> jobs, const float* x, size_t tokens, size_t stride,
                      Rounding rounding);

}  // namespace polyquant
