// Affine grids as Python functions: src/polyquant/ops/affine.py checks nothing that is not checked here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "affine.hpp"
#include "bindings.hpp"

namespace nb = nanobind;

namespace polyquant {
namespace {

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MatrixOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Codes = nb::ndarray<const int8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using CodesOut = nb::ndarray<int8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Columns of a group of a matrix [rows, cols] with grids [rows, G].
template <class W, class S, class Z>
size_t group_size(const W& w, const S& scale, const Z& offset) {
  const size_t groups = scale.shape(1);
  if (scale.shape(0) != w.shape(0) || offset.shape(0) != w.shape(0) || offset.shape(1) != groups || groups == 0 || w.shape(1) % groups)
    throw nb::value_error("a scale and an offset for each group of columns needed");
  return w.shape(1) / groups;
}

Levels checked_levels(int bits, bool symmetric) {
  if (bits < 2 || bits > 8) throw nb::value_error("2 to 8 bits");
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
  if (codes.shape(0) != w.shape(0) || codes.shape(1) != w.shape(1)) throw nb::value_error("one code a weight");
  const Levels levels = checked_levels(bits, symmetric);
  nb::gil_scoped_release release;
  affine_encode(w.data(), scale.size(), size, levels, scale.data(), offset.data(), codes.data());
}

void decode_py(Codes codes, Matrix scale, Matrix offset, MatrixOut w) {
  const size_t size = group_size(codes, scale, offset);
  if (codes.shape(0) != w.shape(0) || codes.shape(1) != w.shape(1)) throw nb::value_error("one weight a code");
  nb::gil_scoped_release release;
  affine_decode(codes.data(), scale.size(), size, scale.data(), offset.data(), w.data());
}

}  // namespace

void bind_affine(nb::module_& m) {
  m.def("affine_grid", &grid_py);
  m.def("affine_encode", &encode_py);
  m.def("affine_decode", &decode_py);
}

}  // namespace polyquant
