// Python functions that search affine grids.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "grouped_search.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace polyquant {
namespace {

using Matrix = Array<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MatrixOut = Array<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = Array<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using CodesOut = Array<int8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T>
T chosen(const std::string& word, const char* const (&names)[3], const char* what) {
  for (int i = 0; i < 3; ++i)
    if (word == names[i]) return T(i);
  throw nb::value_error(what);
}

void search_py(Matrix w, Vector weights, CodesOut codes, MatrixOut scale, MatrixOut offset,
               std::optional<MatrixOut> bias, int bits, const std::string& zero, const std::string& type,
               const std::vector<float>& clips) {
  static const char* const zeros[] = {"none", "integer", "bias"};
  static const char* const types[] = {"f16", "bf16", "f32"};
  const size_t rows = w.shape(0), cols = w.shape(1), groups = scale.shape(1);
  if (bits < 2 || bits > 8 || clips.empty()) throw nb::value_error("requires 2 to 8 bits and at least one clip");
  if (groups == 0 || cols % groups || weights.shape(0) != cols)
    throw nb::value_error("requires whole groups of columns");
  const auto fits = [&](const auto& table) { return table.shape(0) == rows && table.shape(1) == groups; };
  if (codes.shape(0) != rows || codes.shape(1) != cols || !fits(scale) || !fits(offset) || (bias && !fits(*bias)))
    throw nb::value_error("requires a code per weight, and a scale and an offset per group");
  const GridSearch how{bits, chosen<Zero>(zero, zeros, "unknown kind of zero points"),
                       chosen<ScaleType>(type, types, "unknown type of scales"), clips.data(), clips.size()};
  if (how.zero == Zero::bias && !bias) throw nb::value_error("requires biases");
  nb::gil_scoped_release release;
  grouped_search(w.data(), weights.data(), rows, groups, cols / groups, how, codes.data(), scale.data(), offset.data(),
                 bias ? bias->data() : nullptr);
}

}  // namespace

void bind_grouped(nb::module_& m) {
  m.def("grouped_search", &search_py, "w"_a, "weights"_a, "codes"_a.noconvert(), "scale"_a.noconvert(),
        "offset"_a.noconvert(), "bias"_a.noconvert().none(), "bits"_a, "zero"_a, "type"_a, "clips"_a);
}

}  // namespace polyquant
