// Rows that each select their matrix: y [A, N] = row a of the input times the transpose of matrix ids[a] of a stack of
// experts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "packed/packed.hpp"

namespace polyquant {

// [experts][matrices]: the matrices of one expert have `cols` inputs and `rows` outputs in total, side by side, equal
// for all
// experts.
struct PackedExperts {
  std::span<const PackedJob> jobs;  // their y is unused
  size_t experts, matrices, cols, rows;
};

// x [inputs, cols]: `assignments` is a multiple of inputs, and assignment a reads row a / (assignments / inputs).
// y [assignments, rows]: NaN if ids[a] is out of range. Only the matrices of selected experts are read, each one once.
void multiply_experts(const PackedExperts& w, const float* x, size_t inputs, const int32_t* ids, size_t assignments,
                      float* y, Rounding rounding);

}  // namespace polyquant
