// What the loops over packed matrices share: packed.cpp for one input of all rows, packed_experts.cpp for rows that choose their matrix.
#pragma once

#include <memory>

#include "packed.hpp"

namespace polyquant {

// Memory of one thread that grows and is kept, aligned to 64.
class Room {
 public:
  uint8_t* at_least(size_t bytes);

 private:
  struct Free {
    void operator()(uint8_t* p) const;
  };
  std::unique_ptr<uint8_t, Free> data_;
  size_t size_ = 0;
};

constexpr size_t kFewTokens = 4;  // that rows are multiplied with one by one: those read Activations::paired

// Eight chunks a thread: few enough that each thread reads long stretches, enough that one that was interrupted holds up little.
constexpr size_t kChunks = 8, kLeastBytes = 16 << 10;
size_t share_of_a_chunk(size_t bytes);
size_t rows_of_a_chunk(const PackedMatrix& w, size_t tokens, size_t share);

// x [tokens, cols] as int8, in memory of this thread that the next call overwrites. in_pairs: with Activations::paired.
Activations rounded(const float* x, size_t cols, size_t tokens, Rounding how, bool in_pairs);

// Rows [first, last) dequantized, times x [tokens, cols].
void float_rows(const PackedJob& job, size_t first, size_t last, const float* x, size_t tokens, size_t stride);

}  // namespace polyquant
