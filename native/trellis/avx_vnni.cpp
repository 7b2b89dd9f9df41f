// Trellis-coded matrices with AVX-VNNI. The sums are those of trellis/avx2.cpp, bit for bit; functions that are not
// here are taken from there. Compiled with its own flags.
#if defined(__x86_64__) && defined(__GNUC__)
#include "trellis/kernels.hpp"

namespace polyquant {
namespace {

using Few = decltype(TrellisKernel::few);

template <class Order, size_t... k>
Few few_of(unsigned bits, std::index_sequence<k...>) {
  static constexpr Few all[] = {one<int(k) + 1, Mul1, Order>...};
  return all[bits - 1];
}

TrellisKernel find(unsigned bits, Book book, bool row_major) {
  TrellisKernel kernel = trellis_avx2().find(bits, book, row_major);
  constexpr auto widths = std::make_index_sequence<8>{};
  if (book == Book::mul1) kernel.few = row_major ? few_of<Rows>(bits, widths) : few_of<Fragments>(bits, widths);
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
