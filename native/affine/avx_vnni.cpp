#if defined(__x86_64__) && defined(__GNUC__)  // compiled with this instruction set: see CMakeLists.txt
#include "affine/bytes.hpp"

namespace polyquant {
namespace {

struct Panels : Bytes {
  using Cell = uint8_t;  // weights: signed codes
  using Sum = int32_t;
  using Register = __m256i;
  static constexpr size_t cells = 32, rows = 8;
  static constexpr size_t tokens = 2;  // 8 sums, 4 rows and an input fit 16 registers

  static void widen(const AffineMatrix& m, size_t row, size_t column, size_t n, uint8_t* out) {
    std::memcpy(out, m.codes + row * m.cols + column, n);
    std::memset(out + n, 0, (32 - n % 32) % 32);
  }
};

void sums(const AffineMatrix& m, size_t first, size_t last, const WideInput& x, int32_t* out, size_t stride) {
  if (x.tokens <= kFew) return few_sums<Bytes>(m, first, last, x, out, stride);
  many<Panels>(m, first, last, x.bytes, x.tokens, out, stride);
  subtract_excess(m, first, last, x.tokens, out, stride);
}

}  // namespace

const AffineSet& affine_avx_vnni() {
  static constexpr AffineSet set{true, true, sums, floats};
  return set;
}

}  // namespace polyquant
#endif
