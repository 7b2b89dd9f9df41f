// The interface of every block type: whole blocks in, whole blocks out. Each family file exports one table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace polyquant {

struct BlockKernel {
  const char* name;
  int weights;  // per block
  int bytes;    // per block
  void (*dequantize)(const uint8_t* src, float* dst, size_t blocks);
  // importance: cols floats or null. May be null if a type is read only or encoded by numpy.
  void (*quantize)(const float* src, uint8_t* dst, size_t rows, size_t cols, const float* importance);
};

using KernelTable = std::span<const BlockKernel>;

struct ErrorSums;

// Rows in the layout of `source` to blocks of `target`, a few rows at a time in cache. The same bits as dequantizing
// all of them, quantizing and, unless `errors` is null, comparing. importance: cols floats or null. False if a weight
// is not finite: `out` is then incomplete.
bool requantize(const BlockKernel& source, const BlockKernel& target, const uint8_t* data, size_t rows, size_t cols,
                const float* importance, uint8_t* out, ErrorSums* errors);

// codecs/metrics.hpp's error_sums of `count` weights stored as blocks of two types, a few at a time in cache. count: a
// multiple of both types' blocks.
ErrorSums stored_errors(const BlockKernel& a, const BlockKernel& b, const uint8_t* data_a, const uint8_t* data_b,
                        size_t count);

// codecs/metrics.hpp's unit_errors of weights stored as blocks of two types, a few units at a time in cache. unit: a
// multiple of both types' blocks.
void stored_unit_errors(const BlockKernel& a, const BlockKernel& b, const uint8_t* data_a, const uint8_t* data_b,
                        size_t units, size_t unit, float* out);

// one per family file
KernelTable plain_kernels();
KernelTable legacy_kernels();
KernelTable k_kernels();
KernelTable iq_kernels();
KernelTable fp4_kernels();
KernelTable ternary_kernels();

// Block types with codes -1, 0, +1: codes int8 [blocks * weights], scale float32 [blocks].
struct TernaryKernel {
  const char* name;
  int weights;
  int bytes;
  void (*pack)(const int8_t* codes, const float* scale, uint8_t* dst, size_t blocks);
  void (*unpack)(const uint8_t* src, int8_t* codes, float* scale, size_t blocks);
};

std::span<const TernaryKernel> ternary_layouts();

// Blocks of 256: scale = largest magnitude, codes = round(weight / scale), half away from zero.
void ternarize(const float* src, int8_t* codes, float* scale, size_t blocks);

}  // namespace polyquant
