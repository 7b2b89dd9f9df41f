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

}  // namespace
}  // namespace polyquant
