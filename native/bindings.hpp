// What the files that know Python share. NB_MODULE stands in bindings.cpp; each other file adds its functions to it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "packed.hpp"
#include "tape.hpp"
#include "threads.hpp"

namespace polyquant {

// x [T, K] times a group of matrices -> y [T, sum of N], recorded if a tape runs. A group has cols, rows and run(x, tokens, rounding, y).
template <class G>
void multiply_group(nanobind::pointer_and_handle<G> self, nanobind::ndarray<const float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu> x, int how,
                    nanobind::ndarray<float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu> y) {
  const G* group = self.p;
  const size_t tokens = x.shape(0);
  if (x.shape(1) != group->cols || y.shape(0) != tokens || y.shape(1) != group->rows || how < 0 || how > 3)
    throw nanobind::value_error("shapes of weights, activations and output do not fit");
  const float* in = x.data();
  float* out = y.data();
  const Rounding rounding = Rounding(how);
  {
    nanobind::gil_scoped_release release;
    const KernelTime time;
    group->run(in, tokens, rounding, out);
  }
  if (recording) record({in, out}, [=, alive = nanobind::borrow(self.h)](size_t) { group->run(in, tokens, rounding, out); });
}

void bind_affine(nanobind::module_& m);
void bind_decoder(nanobind::module_& m);
void bind_packed(nanobind::module_& m);
void bind_tape(nanobind::module_& m);
void bind_trellis(nanobind::module_& m);

}  // namespace polyquant
