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
  // importance: cols floats or null. May be null where a type is read only or encoded by numpy.
  void (*quantize)(const float* src, uint8_t* dst, size_t rows, size_t cols, const float* importance);
};

using KernelTable = std::span<const BlockKernel>;

// one per family file
KernelTable legacy_kernels();
KernelTable k_kernels();
KernelTable iq_kernels();

}  // namespace polyquant
