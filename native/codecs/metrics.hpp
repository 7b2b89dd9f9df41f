#pragma once

#include <cstddef>

namespace polyquant {

struct ErrorSums {
  double aa, bb, ab, dd;  // sums of a^2, b^2, a*b, (a-b)^2
  double worst;           // max |a-b|
};

// Adds those of a and b to `sums`. Calls for stretches of a multiple of 512 add up to the same bits as one call for
// all.
void add_errors(const float* a, const float* b, size_t n, ErrorSums& sums);
ErrorSums error_sums(const float* a, const float* b, size_t n);
// For each of `units` stretches of `unit` values: sums of a^2, b^2, a b and (a - b)^2, in float32. out: [4, apart], of
// which the first `units` of each row are written.
void unit_errors(const float* a, const float* b, size_t units, size_t unit, float* out, size_t apart);

}  // namespace polyquant
