// Python functions for small floats: codecs/float_streams.hpp.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <string>

#include "bindings/array.hpp"
#include "codecs/float_streams.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace polyquant {
namespace {

template <class T, size_t n>
using In = Array<const T, nb::ndim<n>, nb::c_contig, nb::device::cpu>;
template <class T, size_t n>
using Out = Array<T, nb::ndim<n>, nb::c_contig, nb::device::cpu>;

SmallFloat kind_of(const std::string& name) {
  if (name == "e2m1") return SmallFloat::e2m1;
  if (name == "e4m3") return SmallFloat::e4m3;
  if (name == "e5m2") return SmallFloat::e5m2;
  throw nb::value_error("the element must be e2m1, e4m3 or e5m2");
}

size_t blocks_in(size_t count, size_t size) { return count / size + (count % size != 0); }

void decode_py(In<uint8_t, 2> codes, In<float, 1> table, In<float, 2> scale, Out<float, 2> w, size_t high, size_t wide,
               size_t start) {
  const size_t rows = codes.shape(0), cols = codes.shape(1);
  if (table.shape(0) != 256 || w.shape(0) != rows || w.shape(1) != cols)
    throw nb::value_error("requires a table of 256 values and one weight per code");
  const size_t above = high ? start / high : 0, inside = high ? start % high : 0;
  const size_t lines = high ? above + (rows ? (inside + (rows - 1)) / high + 1 : 0) : 1;
  if (scale.shape(0) < lines || scale.shape(1) < (wide ? blocks_in(cols, wide) : 1))
    throw nb::value_error("requires a scale per block");
  const BlockGrid grid{high, wide, start, scale.shape(1)};
  nb::gil_scoped_release release;
  decode_small(codes.data(), rows, cols, table.data(), scale.data(), grid, w.data());
}

void amax_py(In<float, 2> w, Out<float, 2> out, size_t group) {
  if (!group || out.shape(0) != w.shape(0) || out.shape(1) != blocks_in(w.shape(1), group))
    throw nb::value_error("requires one output per group of columns");
  nb::gil_scoped_release release;
  amax_groups(w.data(), w.shape(0), w.shape(1), group, out.data());
}

void encode_py(In<float, 2> w, In<float, 2> scale, Out<uint8_t, 2> codes, size_t group, const std::string& element) {
  const SmallFloat kind = kind_of(element);
  if (!group || scale.shape(0) != w.shape(0) || scale.shape(1) != blocks_in(w.shape(1), group) ||
      codes.shape(0) != w.shape(0) || codes.shape(1) != w.shape(1))
    throw nb::value_error("requires one scale per group of columns and one code per weight");
  nb::gil_scoped_release release;
  encode_small(kind, w.data(), w.shape(0), w.shape(1), scale.data(), group, codes.data());
}

void errors_py(In<float, 2> w, In<float, 3> scale, In<float, 1> weights, Out<float, 3> out, size_t group,
               const std::string& element) {
  const SmallFloat kind = kind_of(element);
  if (!group || scale.shape(0) != w.shape(0) || scale.shape(1) != blocks_in(w.shape(1), group) ||
      weights.shape(0) != w.shape(1) || out.shape(0) != scale.shape(0) || out.shape(1) != scale.shape(1) ||
      out.shape(2) != scale.shape(2))
    throw nb::value_error("requires candidates and sums per group of columns, and one weight per column");
  nb::gil_scoped_release release;
  errors_small(kind, w.data(), w.shape(0), w.shape(1), scale.data(), group, scale.shape(2), weights.data(), out.data());
}

// Groups of all rows, after checks of the shapes.
template <class P, class S, class B>
size_t groups_of(const P& pairs, const S& scales, const B& blocks, size_t size, size_t together) {
  const size_t rows = pairs.shape(0), groups = scales.shape(1);
  if ((size != 16 && size != 32) || !together || together > 16 || groups % together || scales.shape(0) != rows ||
      blocks.shape(0) != rows || pairs.shape(1) % (size / 2) || pairs.shape(1) / (size / 2) != groups ||
      blocks.shape(1) != pairs.shape(1) + groups)
    throw nb::value_error("requires blocks of 16 or 32 columns per scale that fit the pairs");
  return rows * groups;
}

void join_py(In<uint8_t, 2> pairs, In<uint8_t, 2> scales, Out<uint8_t, 2> blocks, size_t size, size_t together) {
  const size_t groups = groups_of(pairs, scales, blocks, size, together);
  nb::gil_scoped_release release;
  join_fp4(pairs.data(), scales.data(), groups, size, together, blocks.data());
}

void split_py(In<uint8_t, 2> blocks, Out<uint8_t, 2> pairs, Out<uint8_t, 2> scales, size_t size, size_t together) {
  const size_t groups = groups_of(pairs, scales, blocks, size, together);
  nb::gil_scoped_release release;
  split_fp4(blocks.data(), groups, size, together, pairs.data(), scales.data());
}

}  // namespace

void bind_floats(nb::module_& m) {
  m.def("decode_small", &decode_py, "codes"_a, "table"_a, "scale"_a, "w"_a.noconvert(), "high"_a, "wide"_a, "start"_a);
  m.def("amax_groups", &amax_py, "w"_a, "out"_a.noconvert(), "group"_a);
  m.def("encode_small", &encode_py, "w"_a, "scale"_a, "codes"_a.noconvert(), "group"_a, "element"_a);
  m.def("errors_small", &errors_py, "w"_a, "scale"_a, "weights"_a, "out"_a.noconvert(), "group"_a, "element"_a);
  m.def("join_fp4", &join_py, "pairs"_a, "scales"_a, "blocks"_a.noconvert(), "size"_a, "together"_a);
  m.def("split_fp4", &split_py, "blocks"_a, "pairs"_a.noconvert(), "scales"_a.noconvert(), "size"_a, "together"_a);
}

}  // namespace polyquant
