// Affine matrices with instructions that multiply unsigned by signed bytes. Included by affine/vnni.cpp and
// affine/avx_vnni.cpp.
#pragma once

#include "affine/kernels.hpp"
#include "base/dots.hpp"

namespace polyquant {
namespace {

// The input is q + 128, and 128 times the sum of the weights is subtracted.
struct Bytes {
  using Codes = __m256i;
  using Inputs = __m256i;
  static constexpr uint32_t excess = 128;

  static PQ_INLINE __m256i load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static PQ_INLINE __m256i add(__m256i sums, __m256i w, __m256i x) { return dot4(sums, x, w); }
  static PQ_INLINE __m256i codes(const int8_t* p) { return load_codes(p); }
  static PQ_INLINE __m256i inputs(const WideInput& x, size_t t, size_t i) { return load(x.bytes + t * x.padded + i); }
  static PQ_INLINE __m256i add_codes(__m256i sums, __m256i w) { return dot4(sums, _mm256_set1_epi8(1), w); }
};

// 128 times the sum of a row.
inline uint32_t excess_of(const int8_t* w, size_t cols) {
  __m256i sum = _mm256_setzero_si256();
  size_t i = 0;
  for (; i + 32 <= cols; i += 32) sum = Bytes::add_codes(sum, load_codes(w + i));
  if (i < cols) sum = Bytes::add_codes(sum, load_codes(w + i, cols - i));
  return Bytes::excess * uint32_t(add_lanes(sum));
}

// From sums of the products of (q + 128), out[t * stride + r - first].
inline void subtract_excess(const AffineMatrix& m, size_t first, size_t last, size_t tokens, int32_t* out,
                            size_t stride) {
  thread_local std::vector<uint32_t> extra;
  extra.resize(last - first);
  for (size_t r = first; r < last; ++r) extra[r - first] = excess_of(m.codes + r * m.cols, m.cols);
  const uint32_t* const of_rows = extra.data();
  for (size_t t = 0; t < tokens; ++t)
    for (size_t r = 0; r < last - first; ++r) out[t * stride + r] = int32_t(uint32_t(out[t * stride + r]) - of_rows[r]);
}

}  // namespace
}  // namespace polyquant
