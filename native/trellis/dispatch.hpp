// From the width and the codebook of a stream to the functions compiled for them. Included by the files of an
// instruction set.
#pragma once

#include "base/with_constant.hpp"
#include "trellis/matrix.hpp"

namespace polyquant {
namespace {

constexpr size_t kMostBits = 8;

// kernel_of.operator()<bits>()
template <class F>
TrellisKernel with_bits(unsigned bits, const F& kernel_of) {
  TrellisKernel kernel{};
  with_constant<kMostBits>(bits, [&]<int k>() { kernel = kernel_of.template operator()<k>(); });
  return kernel;
}

// kernel_of.operator()<the type of the codebook>()
template <class Mul1, class Grid, class Mcg, class ThreeInst, class Table, class F>
TrellisKernel with_book(Book book, const F& kernel_of) {
  switch (book) {
    case Book::mul1:
      return kernel_of.template operator()<Mul1>();
    case Book::grid:
      return kernel_of.template operator()<Grid>();
    case Book::mcg:
      return kernel_of.template operator()<Mcg>();
    case Book::three_inst:
      return kernel_of.template operator()<ThreeInst>();
    default:
      return kernel_of.template operator()<Table>();
  }
}

}  // namespace
}  // namespace polyquant
