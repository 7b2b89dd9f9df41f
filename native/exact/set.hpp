// The inner loops of the exact operations, per instruction set.
#pragma once

#include <cstddef>

namespace polyquant {

struct ExactSet {
  size_t rows, columns;  // of a tile

  // Panels of `tile` from `count` <= width rows (or columns) of a matrix: to[k * width + i] = from[i * across + k *
  // along], zero for i >= count. width: rows or columns.
  void (*pack)(const float* from, ptrdiff_t across, ptrdiff_t along, size_t count, size_t depth, size_t width,
               double* to);

  // c[rows, columns] += a[depth][rows] b[depth][columns] in ascending order; products are exact. start: c = instead.
  void (*tile)(const double* a, const double* b, double* c, size_t stride, size_t depth);
  void (*start)(const double* a, const double* b, double* c, size_t stride, size_t depth);
  // The same with rounded products, and -= instead of +=.
  void (*subtract)(const double* a, const double* b, double* c, size_t stride, size_t depth);

  // out[high, wide] = float(c[high, wide])
  void (*narrow)(const double* c, size_t stride, float* out, size_t out_stride, size_t high, size_t wide);

  // The triangular solve of `columns` rows at once: x [size][columns] and the factor l [size, size] of `stride`:
  // x[c] = (x[c] - sum over ascending k < c of x[k] l[c, k]) / l[c, c]
  void (*solve)(const double* l, size_t stride, size_t size, double* x);

  void (*exponential)(const double* x, double* out, size_t n);
  void (*float_exponential)(const float* x, float* out, size_t n);

  // See exact_softmax.
  void (*softmax)(float* scores, size_t columns, size_t low, size_t high, float scale, const float* sink);
};

const ExactSet& exact_plain();
#if defined(__x86_64__) && defined(__GNUC__)
const ExactSet& exact_avx2();
const ExactSet& exact_avx512();
#endif

}  // namespace polyquant
