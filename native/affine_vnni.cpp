#if defined(__x86_64__) && defined(__GNUC__)  // compiled with this instruction set: see CMakeLists.txt
#include "affine_kernels.hpp"

namespace polyquant {
namespace {

// vpdpbusd multiplies unsigned by signed bytes: the input is q + 128, and 128 times the sum of the weights is
// subtracted.
struct Bytes {
  using Cell = uint8_t;  // of panels: the bits of an int8
  using Sum = int32_t;
  using Register = __m256i;
  static constexpr size_t cells = 32, rows = 8;
  static constexpr int chains = 2;  // sums of the products, and of the weights
  static constexpr size_t tokens = 2;

  static PQ_INLINE __m256i load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static PQ_INLINE const uint8_t* cells_of(const WideInput& x) { return x.bytes; }
  static PQ_INLINE __m256i add(__m256i sums, __m256i w, __m256i x) { return _mm256_dpbusd_epi32(sums, x, w); }

  struct Codes {
    __m256i part[2];
  };
  static PQ_INLINE Codes codes(const int8_t* p) {
    const __m256i c = load_codes(p);
    return {{c, c}};
  }
  static PQ_INLINE __m256i input(const WideInput& x, size_t t, size_t i, int part) {
    return part ? _mm256_set1_epi8(1) : load(x.bytes + t * x.padded + i);
  }
  static PQ_INLINE int32_t total(__m256i products, __m256i weights) {  // sums may wrap, their difference is exact
    return int32_t(uint32_t(add_lanes(products)) - 128u * uint32_t(add_lanes(weights)));
  }

  static void widen(const AffineMatrix& m, size_t row, size_t column, size_t n, uint8_t* out) {
    std::memcpy(out, m.codes + row * m.cols + column, n);
    std::memset(out + n, 0, (32 - n % 32) % 32);
  }
  static void correct(const AffineMatrix& m, size_t first, size_t last, int32_t* sums, size_t tokens, size_t stride) {
    for (size_t r = first; r < last; ++r) {
      const int8_t* w = m.codes + r * m.cols;
      const __m256i ones = _mm256_set1_epi8(1);
      __m256i sum = _mm256_setzero_si256();
      size_t i = 0;
      for (; i + 32 <= m.cols; i += 32) sum = add(sum, load_codes(w + i), ones);
      if (i < m.cols) sum = add(sum, load_codes(w + i, m.cols - i), ones);
      const uint32_t extra = 128u * uint32_t(add_lanes(sum));
      for (size_t t = 0; t < tokens; ++t) {
        int32_t& s = sums[t * stride + r - first];
        s = int32_t(uint32_t(s) - extra);
      }
    }
  }
};

}  // namespace

const AffineSet& affine_vnni() {
  static constexpr AffineSet set{"AVX-512 VNNI", true, true, sums<Bytes>, floats};
  return set;
}

}  // namespace polyquant
#endif
