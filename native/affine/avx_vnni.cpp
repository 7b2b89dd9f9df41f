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

// 128 times the sum of a row.
uint32_t excess_of(const int8_t* w, size_t cols) {
  __m256i sum = _mm256_setzero_si256();
  size_t i = 0;
  for (; i + 32 <= cols; i += 32) sum = Bytes::add_codes(sum, load_codes(w + i));
  if (i < cols) sum = Bytes::add_codes(sum, load_codes(w + i, cols - i));
  return Bytes::excess * uint32_t(add_lanes(sum));
}

// From sums of the products of (q + 128), out[t * stride + r - first].
void subtract_excess(const AffineMatrix& m, size_t first, size_t last, size_t tokens, int32_t* out, size_t stride) {
  thread_local std::vector<uint32_t> extra;
  extra.resize(last - first);
  for (size_t r = first; r < last; ++r) extra[r - first] = excess_of(m.codes + r * m.cols, m.cols);
  const uint32_t* const of_rows = extra.data();
  for (size_t t = 0; t < tokens; ++t)
    for (size_t r = 0; r < last - first; ++r) out[t * stride + r] = int32_t(uint32_t(out[t * stride + r]) - of_rows[r]);
}

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
