// Shared by the loops over packed matrices: packed/packed.cpp for one input of all rows, packed/experts.cpp for rows
// that select their matrix.
#pragma once

#include <memory>

#include "packed/packed.hpp"

namespace polyquant {

// Thread-local memory that only grows, aligned to 64.
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

// Chunks of a matrix are multiples of these rows, except the last.
constexpr size_t kRowsTogether = 16;

// Eight chunks per thread: few enough for long sequential reads, enough that an interrupted thread delays the others
// little.
constexpr size_t kChunks = 8, kLeastBytes = 16 << 10;
size_t share_of_a_chunk(size_t bytes);
size_t rows_of_a_chunk(const PackedMatrix& w, size_t share);

// Rounds x [tokens, cols] to int8, in thread-local memory that the next call overwrites. few: with
// Activations::paired and apart.
Activations rounded(const float* x, size_t cols, size_t tokens, Rounding how, bool few);

// Activations::lanes of more tokens: number of vectors; memory for them; those from one vector on; and filling them,
// one unit of columns at a time.
size_t lane_vectors(size_t tokens);
SideBySide lanes_in(Room& room, size_t vectors, size_t padded);
SideBySide lanes_from(const SideBySide& lanes, size_t vector, size_t padded);
void put_side_by_side(const Activations& a, const SideBySide& to, size_t unit);

// x [tokens, cols] with its lanes, if there are enough tokens for them.
FloatInputs float_inputs(Room& room, const float* x, size_t tokens, size_t cols);
// The same, rounded to bfloat16 first; kernel: of all matrices, or null.
FloatInputs bfloat_inputs(Room& room, const float* x, size_t tokens, size_t cols, const BfloatKernel* kernel);

// Dequantizes rows [first, last) and multiplies them by the inputs.
void float_rows(const PackedJob& job, size_t first, size_t last, const FloatInputs& in, size_t stride);

}  // namespace polyquant
