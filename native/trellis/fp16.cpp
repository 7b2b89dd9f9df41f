// Codebooks of half-precision numbers with AVX-512 FP16. The sums are those of trellis/avx2.cpp, bit for bit; functions
// that are not here are taken from trellis/vnni.cpp. Compiled with its own flags.
#if defined(__x86_64__) && defined(__GNUC__)
#include "trellis/kernels_512.hpp"

namespace polyquant {

#if defined(__AVX512FP16__)

namespace {

template <class B, size_t... k>
void of_bits(TrellisKernel& kernel, unsigned bits, bool row_major, std::index_sequence<k...>) {
  static constexpr decltype(TrellisKernel::few) rows[] = {one<int(k) + 1, B, Rows<1>>...},
                                                fragments[] = {one<int(k) + 1, B, Fragments>...};
  kernel.few = row_major ? rows[bits - 1] : fragments[bits - 1];
}

TrellisKernel find(unsigned bits, Book book, bool row_major) {
  TrellisKernel kernel = trellis_vnni().find(bits, book, row_major);
  constexpr auto widths = std::make_index_sequence<8>{};
  if (book == Book::mcg) of_bits<Mcg>(kernel, bits, row_major, widths);
  if (book == Book::three_inst) of_bits<ThreeInst>(kernel, bits, row_major, widths);
  return kernel;
}

}  // namespace

const TrellisSet* trellis_fp16() {
  static const TrellisSet set = [] {
    TrellisSet s = trellis_vnni();
    s.find = find;
    return s;
  }();
  return &set;
}

#else

const TrellisSet* trellis_fp16() { return nullptr; }

#endif

}  // namespace polyquant
#endif
