// Shared by the bindings of a layer's steps, which are called a few hundred times per token and recorded by a tape.
#pragma once

#include <initializer_list>
#include <optional>

#include "bindings/bindings.hpp"

namespace polyquant {

using Rows = Array<const float, nanobind::device::cpu>;  // any row stride, rows contiguous
using Vector = Array<const float, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using Matrix = Array<const float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
using Output = Array<float, nanobind::ndim<2>, nanobind::device::cpu>;

// Floats to process; for less, another thread would wait longer for the GIL than for this call.
inline constexpr size_t long_work = size_t(1) << 17;

// Measures kernel time, and releases the GIL for long enough work.
class Kernel {
 public:
  explicit Kernel(size_t work) {
    if (work >= long_work) release_.emplace();
  }

 private:
  KernelTime time_;
  std::optional<nanobind::gil_scoped_release> release_;
};

// Runs a step of a layer at `position`, and records it. `touched`: the activations that it reads and writes, held by
// pointer; it holds its other inputs as arrays, which keeps them alive.
template <class F>
void perform(size_t work, size_t position, std::initializer_list<const float*> touched, const F& step) {
  {
    Kernel running(work);
    step(position);
  }
  record(touched, step);
}

inline void require(bool good, const char* what) {
  if (!good) throw nanobind::value_error(what);
}

// Stride of the first axis in floats; the other axes must be contiguous.
inline size_t stride_of(const Rows& x) {
  int64_t width = 1;
  for (size_t axis = x.ndim(); axis-- > 1;) {
    require(x.shape(axis) <= 1 || x.stride(axis) == width, "rows must be contiguous");
    width *= int64_t(x.shape(axis));
  }
  if (x.ndim() == 0 || x.shape(0) <= 1) return size_t(width);
  require(x.stride(0) >= width, "rows must be contiguous");
  return size_t(x.stride(0));
}

}  // namespace polyquant
