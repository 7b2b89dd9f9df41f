// What the bindings of a layer's steps share: they are called a few hundred times a token, and a tape records them.
#pragma once

#include <initializer_list>
#include <optional>

#include "bindings.hpp"

namespace polyquant {

using Rows = nanobind::ndarray<const float, nanobind::device::cpu>;  // any step from row to row, rows contiguous
using Vector = nanobind::ndarray<const float, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using Matrix = nanobind::ndarray<const float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
using Output = nanobind::ndarray<float, nanobind::ndim<2>, nanobind::device::cpu>;

inline constexpr size_t long_work = size_t(1) << 17;  // floats to go through; below that another thread would wait longer for the GIL than for us

// Counts as kernel time, and lets other Python threads run meanwhile if it is long enough to be worth it.
class Kernel {
 public:
  explicit Kernel(size_t work) {
    if (work >= long_work) release_.emplace();
  }

 private:
  KernelTime time_;
  std::optional<nanobind::gil_scoped_release> release_;
};

// Runs a step of a layer at `position`, and records it: `touched` are the activations that it reads and writes, which it holds by pointer. It
// holds whatever else it needs as arrays, which keeps them alive.
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

// Floats from one entry of the first axis to the next; the other axes must lie contiguously.
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
