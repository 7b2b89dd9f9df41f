// Trellis-coded matrices with AVX-VNNI. The sums are those of trellis/avx2.cpp, bit for bit; functions that are not
// here are taken from there. Compiled with its own flags.
#if defined(__x86_64__) && defined(__GNUC__)
#include "trellis/dispatch.hpp"
#include "trellis/kernels.hpp"

namespace polyquant {
namespace {

TrellisKernel find(unsigned bits, Book book, bool row_major) {
  TrellisKernel kernel = trellis_avx2().find(bits, book, row_major);
  if (book == Book::mul1)
    with_constant<kMostBits>(bits,
                             [&]<int k>() { kernel.few = row_major ? one<k, Mul1, Rows> : one<k, Mul1, Fragments>; });
  return kernel;
}

}  // namespace

const TrellisSet& trellis_avx_vnni() {
  static const TrellisSet set = [] {
    TrellisSet s = trellis_avx2();
    s.find = find, s.times = times;
    return s;
  }();
  return set;
}

}  // namespace polyquant
#endif
