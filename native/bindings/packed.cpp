// Packed matrices as Python objects: created and checked at load; a multiplication only checks its activations.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/threads.hpp"
#include "bindings/bindings.hpp"
#include "bindings/blocks.hpp"
#include "kernel_sets.hpp"
#include "packed/packed.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace polyquant {

namespace {

const PackedKernel* find_packed(std::string_view name) {
  for (const PackedKernel& k : packed_set().kernels)
    if (name == k.name) return &k;
  return nullptr;
}

bool has_packed(const std::string& name) { return find_packed(name) || find_block_kernel(name); }

// lane_step: 0 if lines hold one row; 1 if four adjacent rows share a line, rows / 4 if four quarters of the matrix do.
Packed make_packed(const std::string& name, PackedBytes bytes, size_t rows, size_t cols, float scale,
                   size_t lane_step) {
  Packed p{bytes, {}, find_packed(name), find_block_kernel(name), {}};
  if (!p.kernel && !p.dequantizer) throw nb::value_error("unknown packed kernel");
  const size_t block = size_t(p.kernel ? p.kernel->block : p.dequantizer->weights);
  const size_t size = size_t(p.kernel ? p.kernel->bytes : p.dequantizer->bytes),
               lanes = p.kernel ? size_t(p.kernel->lanes) : 1;
  if (rows == 0 || cols == 0 || cols % block || rows % lanes || rows > (size_t(1) << 40) / cols ||
      (lanes == 1) != (lane_step == 0) || (lane_step != 0 && lane_step != 1 && lane_step != rows / lanes))
    throw nb::value_error("the layout does not divide the matrix");
  const size_t line = cols / block * size;
  if (bytes.shape(0) < rows / lanes * line) throw nb::value_error("fewer bytes than the matrix requires");
  p.matrix = {bytes.data(), rows, cols, line, lanes, lane_step == 1 ? lanes : 1, lane_step, scale};
  return p;
}

// Matrices with a common input, bound together so that a call passes only arrays. Their outputs are side by side.
struct Group {
  std::vector<nb::object> owners;
  std::vector<PackedJob> jobs;
  size_t cols = 0, rows = 0;

  explicit Group(nb::sequence items) {
    for (nb::handle h : items) {
      const Packed& p = handle_of<Packed>(h);
      if (jobs.size() == kMostMatrices) throw nb::value_error("a group has 1 to 64 matrices");
      owners.push_back(nb::borrow(h));
      jobs.push_back({&p.matrix, p.kernel, p.dequantizer, nullptr});
      cols = p.matrix.cols;
      rows += p.matrix.rows;
      if (cols != jobs[0].matrix->cols) throw nb::value_error("matrices of a group must have the same inputs");
    }
    if (jobs.empty()) throw nb::value_error("a group has 1 to 64 matrices");
  }

  void run(const float* x, size_t tokens, Rounding rounding, float* y) const {
    std::array<PackedJob, kMostMatrices> mine;
    for (size_t i = 0; i < jobs.size(); ++i) {
      mine[i] = jobs[i];
      mine[i].y = y;
      y += jobs[i].matrix->rows;
    }
    multiply_packed({mine.data(), jobs.size()}, x, tokens, rows, rounding);
  }
};

}  // namespace

void bind_packed(nb::module_& m) {
  nb::class_<Packed>(m, "Packed");
  nb::class_<Group>(m, "PackedGroup")
      .def(nb::init<nb::sequence>())
      .def("multiply", &multiply_group<Group>, "x"_a, "rounding"_a, "y"_a.noconvert());
  m.def("has_packed", &has_packed, "codec"_a);
  m.def("packed", &make_packed, "codec"_a, "bytes"_a, "rows"_a, "cols"_a, "scale"_a = 1.0f, "lane_step"_a = 0);
  m.def("kernel_set", [] { return kernel_set().name; });
  m.def("use_kernels", [](const std::string& option) { return use_kernels(option); }, "option"_a);
  m.def("set_threads", &set_threads, "count"_a);
  m.def("get_threads", &get_threads);
  m.def("kernel_nanoseconds", &kernel_nanoseconds);
}

}  // namespace polyquant
