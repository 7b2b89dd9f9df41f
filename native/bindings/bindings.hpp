// Shared by the bindings* files. NB_MODULE is in bindings/module.cpp; each other file adds its functions to it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <span>
#include <vector>

#include "base/threads.hpp"
#include "bindings/array.hpp"
#include "decoder/tape.hpp"
#include "packed/packed.hpp"

namespace polyquant {

// Output arrays of a different type or order are rejected: nanobind would convert them, and fill the copy.
// Each of them is declared with `"out"_a.noconvert()`.

// Returns a list member as the expected handle. Raises TypeError for None, other types, and foreign objects.
template <class Handle>
const Handle& handle_of(nanobind::handle member) {
  const Handle* found = nullptr;
  if (!nanobind::try_cast(member, found, false) || !found)
    throw nanobind::type_error("a group requires handles of its own kind of matrix");
  return *found;
}

constexpr size_t kMostMatrices = 64;  // per group

// A packed matrix and the bytes it keeps alive.
using PackedBytes = Array<const uint8_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
struct Packed {
  PackedBytes bytes;
  PackedMatrix matrix;
  const PackedKernel* kernel = nullptr;
  const BlockKernel* dequantizer = nullptr;
  std::vector<PackedBytes> tables{};  // of grouped codes
};

// x [T, K] times a group of matrices -> y [T, sum of N], recorded by an active tape. A group has cols, rows and
// run(x, tokens, rounding, y).
template <class G>
void multiply_group(nanobind::pointer_and_handle<G> self,
                    Array<const float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu> x, int how,
                    Array<float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu> y) {
  const G* group = self.p;
  const size_t tokens = x.shape(0);
  if (x.shape(1) != group->cols || y.shape(0) != tokens || y.shape(1) != group->rows || how < 0 || how > 3)
    throw nanobind::value_error("shapes of weights, activations and output do not match");
  const float* in = x.data();
  float* out = y.data();
  const Rounding rounding = Rounding(how);
  {
    nanobind::gil_scoped_release release;
    const KernelTime time;
    group->run(in, tokens, rounding, out);
  }
  if (recording)
    record({in, out}, [=, alive = nanobind::borrow(self.h)](size_t) { group->run(in, tokens, rounding, out); });
}

// Matrices of one kind with a common input, bound together so that a call passes only arrays. Their outputs are side by
// side. A Handle has a `matrix`; outputs_of and inputs_of return its size, and may reject it. A Job is a matrix and the
// location of its outputs.
template <class Handle, class Matrix, class Job,
          void (*multiply)(std::span<const Job>, const float*, size_t, size_t, Rounding)>
struct MatrixGroup {
  std::vector<nanobind::object> owners;
  std::vector<const Matrix*> matrices;
  size_t cols = 0, rows = 0;

  explicit MatrixGroup(nanobind::sequence items) {
    for (nanobind::handle h : items) {
      const Matrix& m = handle_of<Handle>(h).matrix;
      if (matrices.size() == kMostMatrices) throw nanobind::value_error("a group has 1 to 64 matrices");
      owners.push_back(nanobind::borrow(h));
      matrices.push_back(&m);
      cols = inputs_of(m);
      rows += outputs_of(m);
      if (cols != inputs_of(*matrices[0])) throw nanobind::value_error("matrices of a group must have the same inputs");
    }
    if (matrices.empty()) throw nanobind::value_error("a group has 1 to 64 matrices");
  }

  void run(const float* x, size_t tokens, Rounding rounding, float* y) const {
    std::array<Job, kMostMatrices> jobs;
    for (size_t i = 0; i < matrices.size(); ++i) {
      jobs[i] = {matrices[i], y};
      y += outputs_of(*matrices[i]);
    }
    multiply({jobs.data(), matrices.size()}, x, tokens, rows, rounding);
  }
};

void bind_affine(nanobind::module_& m);
void bind_codes(nanobind::module_& m);
void bind_grouped(nanobind::module_& m);
void bind_decoder(nanobind::module_& m);
void bind_exact(nanobind::module_& m);
void bind_experts(nanobind::module_& m);
void bind_floats(nanobind::module_& m);
void bind_packed(nanobind::module_& m);
void bind_tables(nanobind::module_& m);
void bind_tape(nanobind::module_& m);
void bind_trellis(nanobind::module_& m);

}  // namespace polyquant
