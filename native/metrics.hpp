#pragma once

#include <cstddef>

namespace polyquant {

struct ErrorSums {
  double aa, bb, ab, dd;  // sums of a^2, b^2, a*b, (a-b)^2
  double worst;           // max |a-b|
};

ErrorSums error_sums(const float* a, const float* b, size_t n);

}  // namespace polyquant
