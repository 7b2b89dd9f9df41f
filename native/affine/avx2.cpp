#if defined(__x86_64__) && defined(__GNUC__)  // compiled with this instruction set: see CMakeLists.txt
#include "affine/kernels.hpp"

namespace polyquant {
namespace {

// Both operands as int16: pairs of products are added in 32 bits, which cannot overflow.
struct Words {
  using Cell = int16_t;
  using Sum = int32_t;
  using Register = __m256i;
  static constexpr size_t cells = 16, rows = 8;
  static constexpr size_t tokens = 2;  // 8 sums, 4 rows, an input and a product fit 16 registers

  static PQ_INLINE __m256i load(const int16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

  struct Codes {
    __m256i part[2];
  };
  using Inputs = const int16_t*;
  static constexpr uint32_t excess = 0;
  static PQ_INLINE __m256i half(const int8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static PQ_INLINE Codes codes(const int8_t* p) { return {{half(p), half(p + 16)}}; }
  static PQ_INLINE const int16_t* inputs(const WideInput& x, size_t t, size_t i) { return x.words + t * x.padded + i; }
  static PQ_INLINE __m256i add(__m256i sums, const Codes& w, const int16_t* x) {
    return add(add(sums, w.part[0], load(x)), w.part[1], load(x + 16));
  }
  static PQ_INLINE __m256i add_codes(__m256i sums, const Codes&) { return sums; }

  // In place: otherwise GCC adds into the product and moves it back, eight times per iteration of the inner loop.
  static PQ_INLINE __m256i add(__m256i sums, __m256i w, __m256i x) {
    const __m256i product = _mm256_madd_epi16(w, x);
    asm("vpaddd %1, %0, %0" : "+x"(sums) : "x"(product));
    return sums;
  }

  static void widen(const AffineMatrix& m, size_t row, size_t column, size_t n, int16_t* out) {
    const int8_t* codes = m.codes + row * m.cols + column;
    for (size_t i = 0; i < n; i += 32) {
      alignas(32) int8_t rest[32] = {};
      if (n - i < 32) std::memcpy(rest, codes + i, n - i);
      const int8_t* p = n - i < 32 ? rest : codes + i;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), half(p));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i + 16), half(p + 16));
    }
  }
};

void sums(const AffineMatrix& m, size_t first, size_t last, const WideInput& x, int32_t* out, size_t stride) {
  if (x.tokens <= kFew) return few_sums<Words>(m, first, last, x, out, stride);
  many<Words>(m, first, last, x.words, x.tokens, out, stride);
}

}  // namespace

const AffineSet& affine_avx2() {
  static constexpr AffineSet set{false, true, sums, floats};
  return set;
}

}  // namespace polyquant
#endif
