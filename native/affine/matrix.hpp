// A matrix of int8 codes on affine grids, in its stored layout, times activations: y [T, N] = x [T, K] * W^T,
// w = (q - z) * s.
//
// Integer path: the input is int8 too, with one scale per token or a fixed grid; sums are exact in int32, so all
// instruction sets and the numpy reference (src/polyquant/ops/int8.py) agree bit for bit. Float path: codes are widened
// and multiplied in float32, group by group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "packed/packed.hpp"

namespace polyquant {

enum class Inputs { floats, token, fixed, mixed };  // mixed: fixed for one token, otherwise token

constexpr size_t kMostColumns = size_t(1) << 17;  // of an integer sum: 2^17 * 128 * 128 < 2^31 holds below it

struct AffineMatrix {
  const int8_t* codes;  // [rows, cols], any alignment
  size_t rows, cols, groups;
  const float *scale, *offset;  // [rows, groups]; offset null if all are 0
  Inputs inputs;
  float input_scale, input_offset;  // of a fixed grid
  const float* deq_scale;           // [rows]
  const int32_t* quant_bias;        // [rows]

  size_t group() const { return cols / groups; }
  Inputs of(size_t tokens) const {
    return inputs != Inputs::mixed ? inputs : tokens == 1 ? Inputs::fixed : Inputs::token;
  }
};

// T rows of int8 codes, zero beyond K: as int16, and as int8 + 128 for instructions with unsigned operands. The row
// stride `padded` exceeds K rounded up to 32. For more than kFew tokens, sets with `panels` group each stretch of
// kPanel columns: [ceil(K / kPanel), T, kPanel]; sets with `put_lanes` read V vectors of W = kLaneWidth tokens side by
// side, `lanes` [V, lane_columns(K) / 4, W, 4].
struct WideInput {
  size_t tokens, padded;
  const int16_t* words;
  const uint8_t* bytes;
  const int32_t* total = nullptr;  // [T] sums of the codes
  const uint8_t* lanes = nullptr;
};
constexpr size_t kPanel = 1024, kFew = 8, kFewFloats = 4;
constexpr size_t lane_columns(size_t cols) { return (cols + 63) / 64 * 64; }

struct AffineSet {
  bool bytes;   // reads WideInput::bytes
  bool panels;  // for many tokens, integers and floats
  // sums[t * stride + r], rows [first, last); the set has its own scratch for a panel of them
  void (*sums)(const AffineMatrix&, size_t first, size_t last, const WideInput&, int32_t* sums, size_t stride);
  // y[t * stride + r], without offsets for at most kFewFloats tokens; x in panels for more
  void (*floats)(const AffineMatrix&, size_t first, size_t last, const float* x, size_t tokens, float* y,
                 size_t stride);
  // A vector of WideInput::lanes, of tokens from `first` on; null if `sums` does not read them
  void (*put_lanes)(const WideInput&, size_t first, size_t cols, uint8_t* out) = nullptr;
  size_t rows = 48;  // of a chunk with many tokens
};

const AffineSet& affine_plain();
#if defined(__x86_64__) && defined(__GNUC__)
const AffineSet& affine_avx2();
const AffineSet& affine_avx_vnni();
const AffineSet& affine_vnni();
const AffineSet& affine_amx();
#elif defined(__aarch64__) && defined(__GNUC__)
const AffineSet& affine_neon();
const AffineSet& affine_neon_dotprod();
const AffineSet& affine_neon_i8mm();
#endif

// Several matrices with a common input [T, K], their outputs side by side: y[t * stride + ...].
struct AffineJob {
  const AffineMatrix* matrix;
  float* y;
};
void multiply_affine(std::span<const AffineJob> jobs, const float* x, size_t tokens, size_t stride, Rounding rounding);

}  // namespace polyquant
