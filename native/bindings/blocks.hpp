// Kernels of stored blocks and sums of errors, for the bindings* files that take them.
#pragma once

#include <string_view>
#include <tuple>

#include "codecs/blocks.hpp"
#include "codecs/metrics.hpp"

namespace polyquant {

// The kernels of a codec; null if it has none.
const BlockKernel* find_block_kernel(std::string_view name);  // bindings/module.cpp

using FiveSums = std::tuple<double, double, double, double, double>;

inline FiveSums five(const ErrorSums& s) { return {s.aa, s.bb, s.ab, s.dd, s.worst}; }

}  // namespace polyquant
