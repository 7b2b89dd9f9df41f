// Rows that each choose their matrix: y [A, N] = row a of the input times the transpose of matrix ids[a], of a stack of experts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "packed.hpp"

namespace polyquant {

// [experts][matrices]: the matrices of one expert have `cols` inputs and `rows` outputs in all, side by side, the same for every expert.
struct PackedExperts {
  std::span<const PackedJob> jobs;  // their y is not used
  size_t experts, matrices, cols, rows;
};

// x [inputs, cols]: `assignments` is a multiple of inputs, and assignment a reads row a / (assignments / inputs). y [assignments, rows]: not a number
// where ids[a] is no expert. Only the matrices of chosen experts are read; one that several assignments chose is read once.
void multiply_experts(const PackedExperts& w, const float* x, size_t inputs, const int32_t* ids, size_t assignments, float* y, Rounding rounding);

}  // namespace polyquant
