// A number that is known when the program runs, as a compile-time constant.
#pragma once

#include <cstddef>
#include <utility>

#include "base/simd.hpp"

namespace polyquant {

// f.operator()<n>() if n is in 1 ... most.
template <size_t most, class F>
PQ_INLINE void with_constant(size_t n, const F& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    ((n == size_t(i) + 1 && (f.template operator()<i + 1>(), true)) || ...);
  }(std::make_integer_sequence<int, int(most)>{});
}

// f.operator()<0>() ... f.operator()<count - 1>(): as an unrolled loop, but indices are constants before the compiler
// decides which arrays stay in registers.
template <int count, class F>
PQ_INLINE void each_constant(const F& f) {
  [&]<int... i>(std::integer_sequence<int, i...>)
      PQ_FLAT { (f.template operator()<i>(), ...); }(std::make_integer_sequence<int, count>{});
}

}  // namespace polyquant
