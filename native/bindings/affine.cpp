// Python functions for affine grids, and Python objects for matrices on such grids.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "affine/matrix.hpp"
#include "bindings/bindings.hpp"
#include "bindings/blocks.hpp"
#include "codecs/affine.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace polyquant {

// Found by MatrixGroup through argument-dependent lookup.
static size_t inputs_of(const AffineMatrix& m) { return m.cols; }
static size_t outputs_of(const AffineMatrix& m) { return m.rows; }

namespace {

using Matrix = Array<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MatrixOut = Array<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Codes = Array<const int8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using CodesOut = Array<int8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Returns the columns per group of a matrix [rows, cols] with grids [rows, G].
template <class W, class S, class Z>
size_t group_size(const W& w, const S& scale, const Z& offset) {
  const size_t groups = scale.shape(1);
  if (scale.shape(0) != w.shape(0) || offset.shape(0) != w.shape(0) || offset.shape(1) != groups || groups == 0 ||
      w.shape(1) % groups)
    throw nb::value_error("requires a scale and an offset per group of columns");
  return w.shape(1) / groups;
}

Levels checked_levels(int bits, bool symmetric) {
  if (bits < 2 || bits > 8) throw nb::value_error("bits must be 2 to 8");
  return levels_of(bits, symmetric);
}

void grid_py(Matrix w, MatrixOut scale, MatrixOut offset, int bits, bool symmetric) {
  const size_t size = group_size(w, scale, offset);
  const Levels levels = checked_levels(bits, symmetric);
  nb::gil_scoped_release release;
  affine_grid(w.data(), scale.size(), size, levels, scale.data(), offset.data());
}

void encode_py(Matrix w, Matrix scale, Matrix offset, CodesOut codes, int bits, bool symmetric) {
  const size_t size = group_size(w, scale, offset);
  if (codes.shape(0) != w.shape(0) || codes.shape(1) != w.shape(1))
    throw nb::value_error("requires one code per weight");
  const Levels levels = checked_levels(bits, symmetric);
  nb::gil_scoped_release release;
  affine_encode(w.data(), scale.size(), size, levels, scale.data(), offset.data(), codes.data());
}

void decode_py(Codes codes, Matrix scale, Matrix offset, MatrixOut w, std::optional<Matrix> bias) {
  const size_t size = group_size(codes, scale, offset);
  if (bias && (bias->shape(0) != scale.shape(0) || bias->shape(1) != scale.shape(1)))
    throw nb::value_error("requires a bias per group of columns");
  if (codes.shape(0) != w.shape(0) || codes.shape(1) != w.shape(1))
    throw nb::value_error("requires one weight per code");
  nb::gil_scoped_release release;
  affine_decode(codes.data(), scale.size(), size, scale.data(), offset.data(), bias ? bias->data() : nullptr, w.data());
}

using Bytes = Array<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SumsOut = Array<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void row_sums_py(Codes codes, SumsOut sums) {
  if (sums.shape(0) != codes.shape(0)) throw nb::value_error("requires one sum per row");
  nb::gil_scoped_release release;
  row_sums(codes.data(), codes.shape(0), codes.shape(1), sums.data());
}

// None if a weight is not finite; otherwise the error sums, zero if not measured.
std::optional<FiveSums> quantize_py(const std::string& source, Bytes data, CodesOut codes, MatrixOut scale,
                                    MatrixOut offset, int bits, bool symmetric, bool measure) {
  const BlockKernel* kernel = find_block_kernel(source);
  const size_t rows = codes.shape(0), cols = codes.shape(1);
  group_size(codes, scale, offset);
  if (!kernel || kernel->weights != 1 || data.shape(0) != codes.size() * size_t(kernel->bytes))
    throw nb::value_error("requires one float per code");
  const Levels levels = checked_levels(bits, symmetric);
  ErrorSums e{};
  {
    nb::gil_scoped_release release;
    if (!affine_quantize(*kernel, data.data(), rows, cols, scale.shape(1), levels, codes.data(), scale.data(),
                         offset.data(), measure ? &e : nullptr))
      return std::nullopt;
  }
  return five(e);
}

// ---------------------------------------------------------------- matrices

using Vector = Array<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Whole = Array<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A matrix and the arrays it keeps alive.
struct Affine {
  Codes codes;
  Matrix scale;
  std::optional<Matrix> offset;
  std::optional<Vector> deq_scale;
  std::optional<Whole> quant_bias;
  AffineMatrix matrix;
};

Inputs inputs_of(const std::string& name) {
  for (const auto& [known, value] : {std::pair{"floats", Inputs::floats},
                                     {"token", Inputs::token},
                                     {"fixed", Inputs::fixed},
                                     {"mixed", Inputs::mixed}})
    if (name == known) return value;
  throw nb::value_error("inputs must be floats, token, fixed or mixed");
}

Affine make(Codes codes, Matrix scale, std::optional<Matrix> offset, const std::string& inputs, float input_scale,
            float input_offset, std::optional<Vector> deq_scale, std::optional<Whole> quant_bias) {
  const Inputs how = inputs_of(inputs);
  const size_t rows = codes.shape(0), cols = codes.shape(1), groups = scale.shape(1);
  const bool fixed = how == Inputs::fixed || how == Inputs::mixed;
  if (rows == 0 || cols == 0 || groups == 0 || cols % groups || scale.shape(0) != rows ||
      (offset && (offset->shape(0) != rows || offset->shape(1) != groups)) ||
      (how != Inputs::floats && cols >= kMostColumns) ||
      (fixed &&
       (groups != 1 || !deq_scale || deq_scale->shape(0) != rows || !quant_bias || quant_bias->shape(0) != rows)))
    throw nb::value_error("shapes of codes, scales and biases do not match");
  Affine a{codes, scale, offset, deq_scale, quant_bias, {}};
  a.matrix = {codes.data(),
              rows,
              cols,
              groups,
              scale.data(),
              offset ? offset->data() : nullptr,
              how,
              input_scale,
              input_offset,
              deq_scale ? deq_scale->data() : nullptr,
              quant_bias ? quant_bias->data() : nullptr};
  return a;
}

using AffineGroup = MatrixGroup<Affine, AffineMatrix, AffineJob, multiply_affine>;

}  // namespace

void bind_affine(nb::module_& m) {
  nb::class_<Affine>(m, "Affine");
  nb::class_<AffineGroup>(m, "AffineGroup")
      .def(nb::init<nb::sequence>())
      .def("multiply", &multiply_group<AffineGroup>, "x"_a, "rounding"_a, "y"_a.noconvert());
  m.def("affine", &make, "codes"_a, "scale"_a, "offset"_a.none(), "inputs"_a, "input_scale"_a, "input_offset"_a,
        "deq_scale"_a.none(), "quant_bias"_a.none());
  m.def("affine_grid", &grid_py, "w"_a, "scale"_a.noconvert(), "offset"_a.noconvert(), "bits"_a, "symmetric"_a);
  m.def("affine_encode", &encode_py, "w"_a, "scale"_a, "offset"_a, "codes"_a.noconvert(), "bits"_a, "symmetric"_a);
  m.def("affine_decode", &decode_py, "codes"_a, "scale"_a, "offset"_a, "w"_a.noconvert(), "bias"_a.none() = nb::none());
  m.def("affine_row_sums", &row_sums_py, "codes"_a, "sums"_a.noconvert());
  m.def("affine_quantize", &quantize_py, "source"_a, "data"_a, "codes"_a.noconvert(), "scale"_a.noconvert(),
        "offset"_a.noconvert(), "bits"_a, "symmetric"_a, "measure"_a);
}

}  // namespace polyquant
