#if defined(__x86_64__) && defined(__GNUC__)  // compiled with this instruction set: see CMakeLists.txt
#include "affine_kernels.hpp"

namespace polyquant {
namespace {

// Both sides as int16: products of two neighbours are added in 32 bits, which no input can overflow.
struct Words {
  using Cell = int16_t;
  static constexpr size_t cells = 16;  // of a register
  static constexpr int tile_rows = 3;  // 12 sums, 3 rows and a product fill the 16 registers

  struct Codes {
    __m256i low, high;
  };
  static PQ_INLINE Codes codes(__m256i c) {
    return {_mm256_cvtepi8_epi16(_mm256_castsi256_si128(c)), _mm256_cvtepi8_epi16(_mm256_extracti128_si256(c, 1))};
  }
  static PQ_INLINE Codes input(const WideInput& x, size_t t, size_t i) {
    const auto* p = reinterpret_cast<const __m256i*>(x.words + t * x.padded + i);
    return {_mm256_loadu_si256(p), _mm256_loadu_si256(p + 1)};
  }
  struct Lane {
    __m256i v;
    PQ_INLINE void add(__m256i w, __m256i x) { v = _mm256_add_epi32(v, _mm256_madd_epi16(w, x)); }
    PQ_INLINE int32_t total() const { return add_lanes(v); }
  };
  struct Sum {
    Lane a, b;
    PQ_INLINE void add(const Codes& w, const Codes& x) {
      a.add(w.low, x.low);
      b.add(w.high, x.high);
    }
    PQ_INLINE int32_t total() const { return add_lanes(_mm256_add_epi32(a.v, b.v)); }
  };

  static PQ_INLINE __m256i load(const int16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static PQ_INLINE __m256i load_input(const WideInput& x, size_t t, size_t i) { return load(x.words + t * x.padded + i); }
  static void widen(const int8_t* codes, size_t n, int16_t* out) {
    for (size_t i = 0; i < n; i += 32) {
      const Codes c = Words::codes(load_codes(codes + i, n - i));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), c.low);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i + 16), c.high);
    }
  }
  static void correct(const AffineMatrix&, size_t, size_t, int32_t*, size_t, size_t) {}
};

}  // namespace

const AffineSet& affine_avx2() {
  static constexpr AffineSet set{"AVX2", false, sums<Words>, floats};
  return set;
}

}  // namespace polyquant
#endif
