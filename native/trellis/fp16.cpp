// Codebooks of half-precision numbers with AVX-512 FP16. The sums are those of trellis/avx2.cpp, bit for bit; functions
// that are not here are taken from trellis/vnni.cpp. Compiled with its own flags.
#if defined(__x86_64__) && defined(__GNUC__)
#include "trellis/dispatch.hpp"
#include "trellis/kernels_512.hpp"

namespace polyquant {

#if defined(__AVX512FP16__)

namespace {

TrellisKernel find(unsigned bits, Book book, bool row_major) {
  TrellisKernel kernel = trellis_vnni().find(bits, book, row_major);
  const auto take = [&]<class B>() {
    with_constant<kMostBits>(bits,
                             [&]<int k>() { kernel.few = row_major ? one<k, B, Rows<1>> : one<k, B, Fragments>; });
  };
  if (book == Book::mcg) take.template operator()<Mcg>();
  if (book == Book::three_inst) take.template operator()<ThreeInst>();
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
