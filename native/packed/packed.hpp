// Packed weights times activations: y [T, N] = x [T, K] * W^T, W in its stored layout.
//
// Integer path: activations are int8 with a scale per 32 (ops/matmul.py), weights become integer codes q with a scale d
// and
// an offset m per 16 or 32 (w = d * q + m):   y = sum over sub-blocks of  d * a_scale * (q . a)  +  m * (a_scale * sum
// a).
// Float path: rows are dequantized into cache and multiplied in float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/tiles.hpp"
#include "codecs/blocks.hpp"

namespace polyquant {

constexpr size_t kUnit = 256;      // unit of codes and of the padding of activations
constexpr size_t kLaneWidth = 16;  // tokens side by side

// Activations of five and more tokens: V vectors of W = kLaneWidth tokens side by side. Portable kernels do not read
// them.
struct SideBySide {
  int8_t* q;         // [V, padded / 4, W, 4]
  float* scale;      // [V, padded / 32, W]
  float* sum16;      // [V, padded / 16, W]
  float* sum32;      // [V, padded / 32, W]
  int16_t* total16;  // [V, padded / 16, W] sums of the codes
};

// int8 activations of T tokens; the row stride is `padded`, K rounded up to 256.
struct Activations {
  const int8_t* q;       // [T, padded]
  const int8_t* paired;  // with the second and third quarter of each 64 exchanged; for at most four tokens
  const int8_t* apart;   // of each 64 the even ones before the odd ones; for at most four tokens
  const float* scale;    // [T, padded / 32]
  const float* sum16;    // [T, padded / 16] scale * sum of the codes
  const float* sum32;    // [T, padded / 32]
  size_t tokens, padded;
  bool wide;  // groups of four scales are equal
  SideBySide lanes{};
  const TileKernels* tiles = nullptr;  // for PackedKernel::tiled tokens and more
};

// Numbers of a table: how they are stored.
enum class Number : uint8_t { f32, f16, bf16, e8m0, e4m3 };

// Scales stored apart from the codes, row-major [ceil(N / tall), groups], any alignment: one per `group` columns and
// `tall` rows. w = (code - zero) * scale, or code * scale + bias.
struct Tables {
  const uint8_t* scale = nullptr;
  const uint8_t* zero = nullptr;  // uint8 of the same shape; null: `common` for all
  const uint8_t* bias = nullptr;  // of the same shape and type as the scales, instead of a zero point
  size_t groups = 1, group = 0, tall = 1;
  Number type = Number::f32;
  float common = 0;
};

// A matrix of N rows and K columns. If a layout packs `lanes` rows into one line, line p holds rows
// p * row_step + l * lane_step.
struct PackedMatrix {
  const uint8_t* data;
  size_t rows, cols;
  size_t line_bytes;
  size_t lanes = 1, row_step = 1, lane_step = 0;
  float scale = 1.0f;  // of the whole matrix
  Tables tables{};     // of grouped codes (grouped/codes.hpp)
  size_t origin = 0;   // index in the tables of the first row
  size_t owned = 0;    // bytes from `data` to the end of the codes, of grouped codes

  // Rows [first, first + count), a multiple of the lanes.
  PackedMatrix part(size_t first, size_t count) const {
    PackedMatrix some = *this;
    const size_t skipped = first / lanes * line_bytes;
    some.data += skipped, some.rows = count, some.origin += first, some.owned -= owned ? skipped : 0;
    return some;
  }
  size_t row(size_t v) const { return v / lanes * row_step + v % lanes * lane_step; }  // v counts line by line
};

// Maximum number of tokens multiplied row by row, which reads Activations::paired and apart.
constexpr size_t kFewTokens = 4;
constexpr size_t kNever = size_t(-1);
// Maximum number of rows of floats multiplied at a time.
constexpr size_t kFloatRows = 32;

// Products of inputs in bfloat16. Scales are one per row, or per group of a multiple of 32 columns.
struct BfloatKernel {
  size_t (*tiles)(size_t tokens);
  // One tile of the inputs -> its part of out [tokens, K rounded up to 64]
  void (*arrange)(const float* x, size_t tokens, size_t cols, size_t tile, uint16_t* out);
  void (*multiply)(const PackedMatrix&, size_t first, size_t last, const uint16_t* x, size_t tokens, float* y,
                   size_t stride);
};

// rows [first, last) in the order of PackedMatrix::row's argument; y[t * stride + row].
struct PackedKernel {
  const char* name;
  int block, bytes;  // weights and bytes per block of a line
  int lanes;
  // null: float inputs only
  void (*multiply)(const PackedMatrix&, size_t first, size_t last, const Activations&, float* y, size_t stride);
  void (*dequantize)(const PackedMatrix&, size_t v, float* row);  // K floats, without PackedMatrix::scale
  // At most four tokens of floats x [T, K]; null: rows are dequantized and multiplied
  void (*floats)(const PackedMatrix&, size_t first, size_t last, const float* x, size_t tokens, float* y,
                 size_t stride) = nullptr;
  size_t alone = kFewTokens;  // the largest number of tokens that need no Activations::lanes
  size_t tiled = kNever;      // with Activations::tiles, so many tokens need them too
  bool orders = true;         // few tokens are read in the orders of Activations::paired and apart
  bool rounds = false;        // float inputs are rounded to bfloat16, unless Rounding is none
  const BfloatKernel* bfloats = nullptr;
};

// Float activations. lanes: of five and more tokens, vectors of kLaneWidth tokens side by side, zeros after the last
// token; portable kernels do not read them.
struct FloatInputs {
  const float* x;      // [T, K]
  const float* lanes;  // [vectors, K, kLaneWidth]
  size_t tokens;
  const uint16_t* bfloats = nullptr;  // instead of these, as BfloatKernel arranges them
};

// The functions of one instruction set, and type-independent loops.
struct PackedSet {
  std::span<const PackedKernel> kernels;
  // 32 * n floats -> codes, scales and sums (ops/matmul.py's rounding, bit for bit); wide: n is a multiple of 4
  void (*round_blocks)(const float* x, size_t blocks, bool wide, int8_t* q, float* scale, float* sum16, float* sum32);
  void (*round_token)(const float* x, size_t count, size_t blocks, int8_t* q, float* scale, float* sum16, float* sum32);
  // y[t * stride + r] = sum_k x[t * cols + k] * w[r * cols + k], rows at most kFloatRows
  void (*multiply_floats)(const float* w, size_t rows, size_t cols, const FloatInputs& in, float* y, size_t stride);
  // The same of rows [rows, cols] of 16-bit floats and at most kFewTokens tokens; null if they must be dequantized
  void (*multiply_halves)(const uint8_t* w, bool bfloat, size_t rows, size_t cols, const float* x, size_t tokens,
                          float* y, size_t stride);
  // A vector of FloatInputs::lanes of at most kLaneWidth tokens x; null if the kernels do not read them
  void (*put_float_lanes)(const float* x, size_t tokens, size_t cols, float* lanes);
  // A unit of columns of Activations::lanes; null: by loops
  void (*put_side_by_side)(const Activations&, const SideBySide& to, size_t unit);
  const TileKernels* tiles = nullptr;
};

// Kernels of matrices with tables, by instruction set: "2.32" is 2 bits with a scale per 32 columns or more.
std::span<const PackedKernel> grouped_plain();
#if defined(__x86_64__) && defined(__GNUC__)
std::span<const PackedKernel> grouped_avx2();
std::span<const PackedKernel> grouped_avx_vnni();
std::span<const PackedKernel> grouped_vnni();
std::span<const PackedKernel> grouped_bf16();  // grouped_vnni with BfloatKernel
#elif defined(__aarch64__) && defined(__GNUC__)
std::span<const PackedKernel> grouped_neon();
std::span<const PackedKernel> grouped_neon_dotprod();
std::span<const PackedKernel> grouped_neon_i8mm();
#endif
std::span<const PackedKernel> grouped_kernels();  // in use

const PackedSet& packed_plain();
#if defined(__x86_64__) && defined(__GNUC__)
const PackedSet& packed_avx2();
const PackedSet& packed_avx_vnni();
const PackedSet& packed_vnni();
const PackedSet& packed_amx();  // packed_vnni with tiles
#elif defined(__aarch64__) && defined(__GNUC__)
const PackedSet& packed_neon();
const PackedSet& packed_neon_dotprod();
const PackedSet& packed_neon_i8mm();
#endif
const PackedSet& packed_set();  // of the kernels in use (kernel_sets.hpp)

// At least `bytes` of thread-local memory, aligned to 64; the next call may move it.
uint8_t* scratch(size_t bytes);
float* table_scratch(size_t floats);  // likewise, separate

enum class Rounding { none, block, token, wide };

// Several matrices with a common input, in one parallel loop. y[t * stride + row].
struct PackedJob {
  const PackedMatrix* matrix;
  const PackedKernel* kernel;      // null: only the float path
  const BlockKernel* dequantizer;  // of block types: exact; null if kernel->dequantize is used
  float* y;

  bool integers(Rounding rounding) const { return rounding != Rounding::none && kernel && kernel->multiply; }
  bool bfloats(Rounding rounding) const { return rounding != Rounding::none && kernel && kernel->rounds; }
  const BfloatKernel* bfloat_kernel() const {
    const bool whole = matrix->tables.groups == 1 || matrix->tables.group % 32 == 0;
    return kernel && whole ? kernel->bfloats : nullptr;
  }
};
void multiply_packed(std::span<const PackedJob> jobs, const float* x, size_t tokens, size_t stride, Rounding rounding);

}  // namespace polyquant
