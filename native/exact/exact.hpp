// Products, Cholesky factors and exponentials with a defined order of operations: every instruction set, number of
// threads and the numpy reference (ops/exact.py) give the same bits.
//
//   product    out[i, j] = float(sum over ascending k of double(a[i, k]) * double(b[k, j]))
//              A product of two floats is exact in double, so fused and separate multiply-add agree.
//   cholesky   l[i, j] = (h[i, j] - sum over ascending k < j of l[i, k] * l[j, k]) / l[j, j], with a rounded product
//              before each subtraction.
//   exponential   one polynomial, without fused multiply-add.
#pragma once

#include <cstddef>
#include <cstdint>

namespace polyquant {

// A stack of matrices of floats; strides in elements, 0 to repeat.
struct FloatMatrices {
  const float* data;
  ptrdiff_t item, row, column;
};

struct ProductSize {
  size_t items, rows, columns, depth;
  bool symmetric;  // the result is symmetric: only one half is computed
};

enum class ExactIsa { best, plain, avx2, avx512 };

bool exact_supports(ExactIsa isa);

// out [items, rows, columns], contiguous. `isa`: which instruction set, for tests; it must be supported.
void exact_product(const FloatMatrices& a, const FloatMatrices& b, const ProductSize& size, float* out, ExactIsa isa);

// Replaces the lower triangle of h [n, n] by its factor; the upper one is not used. False if h is not positive
// definite.
bool exact_cholesky(double* h, size_t n, ExactIsa isa);

void exact_exponential(const double* x, double* out, size_t n, ExactIsa isa);
void exact_exponential(const float* x, float* out, size_t n, ExactIsa isa);  // computed in double

// Replaces each row of scores [rows, columns] by the softmax of its columns [low, high), times `scale` first; the
// others become 0. sinks: of each row, an extra score without a weight; may be null. Exponentials are floats, summed in
// double: every eighth column, then these eight sums in pairs.
struct SoftmaxRows {
  float* scores;
  size_t rows, columns;
  const int32_t *low, *high;  // low < high
  float scale;
  const float* sinks;
};
void exact_softmax(const SoftmaxRows& rows, ExactIsa isa);

}  // namespace polyquant
