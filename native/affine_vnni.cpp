#if defined(__x86_64__) && defined(__GNUC__)  // compiled with this instruction set: see CMakeLists.txt
#include "affine_kernels.hpp"

namespace polyquant {
namespace {

// vpdpbusd multiplies unsigned by signed bytes: the input comes as q + 128, and 128 times the sum of the weights goes off again.
struct Bytes {
  using Cell = int8_t;
  static constexpr size_t cells = 32;
  static constexpr int tile_rows = 4;

  using Codes = __m256i;
  static PQ_INLINE __m256i codes(__m256i c) { return c; }
  static PQ_INLINE __m256i input(const WideInput& x, size_t t, size_t i) { return load_input(x, t, i); }
  struct Lane {
    __m256i v;
    PQ_INLINE void add(__m256i w, __m256i x) { v = _mm256_dpbusd_epi32(v, x, w); }
    PQ_INLINE int32_t total() const { return add_lanes(v); }
  };
  struct Sum {
    Lane a, weights;
    PQ_INLINE void add(__m256i w, __m256i x) {
      a.add(w, x);
      weights.add(w, _mm256_set1_epi8(1));
    }
    PQ_INLINE int32_t total() const { return int32_t(uint32_t(a.total()) - 128u * uint32_t(weights.total())); }  // sums wrap around
  };

  static PQ_INLINE __m256i load(const int8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static PQ_INLINE __m256i load_input(const WideInput& x, size_t t, size_t i) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x.bytes + t * x.padded + i));
  }
  static void widen(const int8_t* codes, size_t n, int8_t* out) {
    std::memcpy(out, codes, n);
    std::memset(out + n, 0, (32 - n % 32) % 32);
  }
  static void correct(const AffineMatrix& m, size_t first, size_t last, int32_t* sums, size_t tokens, size_t stride) {
    for (size_t r = first; r < last; ++r) {
      Lane lane{};
      for (size_t i = 0; i < m.cols; i += 32) lane.add(load_codes(m.codes + r * m.cols + i, m.cols - i), _mm256_set1_epi8(1));
      const int32_t extra = int32_t(128u * uint32_t(lane.total()));
      for (size_t t = 0; t < tokens; ++t) sums[t * stride + r - first] = int32_t(uint32_t(sums[t * stride + r - first]) - uint32_t(extra));
    }
  }
};

}  // namespace

const AffineSet& affine_vnni() {
  static constexpr AffineSet set{"AVX-512 VNNI", true, sums<Bytes>, floats};
  return set;
}

}  // namespace polyquant
#endif
