// Python functions that search affine grids.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/blocks.hpp"
#include "codecs/grouped_search.hpp"

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

using Bytes = Array<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Checks what both functions take.
GridSearch checked(const Vector& weights, const CodesOut& codes, const MatrixOut& scale, const MatrixOut& offset,
                   const std::optional<MatrixOut>& bias, int bits, const std::string& zero, const std::string& type,
                   const std::vector<float>& clips) {
  static const char* const zeros[] = {"none", "integer", "bias"};
  static const char* const types[] = {"f16", "bf16", "f32"};
  const size_t rows = codes.shape(0), cols = codes.shape(1), groups = scale.shape(1);
  if (bits < 2 || bits > 8 || clips.empty()) throw nb::value_error("requires 2 to 8 bits and at least one clip");
  if (groups == 0 || cols % groups || weights.shape(0) != cols)
    throw nb::value_error("requires whole groups of columns");
  const auto fits = [&](const auto& table) { return table.shape(0) == rows && table.shape(1) == groups; };
  if (!fits(scale) || !fits(offset) || (bias && !fits(*bias)))
    throw nb::value_error("requires a scale and an offset per group");
  const GridSearch how{bits, chosen<Zero>(zero, zeros, "unknown kind of zero points"),
                       chosen<ScaleType>(type, types, "unknown type of scales"), clips.data(), clips.size()};
  if (how.zero == Zero::bias && !bias) throw nb::value_error("requires biases");
  return how;
}

void search_py(Matrix w, Vector weights, CodesOut codes, MatrixOut scale, MatrixOut offset,
               std::optional<MatrixOut> bias, int bits, const std::string& zero, const std::string& type,
               const std::vector<float>& clips) {
  const GridSearch how = checked(weights, codes, scale, offset, bias, bits, zero, type, clips);
  const size_t rows = codes.shape(0), cols = codes.shape(1), groups = scale.shape(1);
  if (w.shape(0) != rows || w.shape(1) != cols) throw nb::value_error("requires a code per weight");
  nb::gil_scoped_release release;
  grouped_search(w.data(), weights.data(), rows, groups, cols / groups, how, codes.data(), scale.data(), offset.data(),
                 bias ? bias->data() : nullptr);
}

std::optional<FiveSums> quantize_py(const std::string& source, Bytes data, Vector weights, CodesOut codes,
                                    MatrixOut scale, MatrixOut offset, std::optional<MatrixOut> bias, int bits,
                                    const std::string& zero, const std::string& type, const std::vector<float>& clips,
                                    bool measure) {
  const GridSearch how = checked(weights, codes, scale, offset, bias, bits, zero, type, clips);
  const size_t rows = codes.shape(0), cols = codes.shape(1), groups = scale.shape(1);
  const BlockKernel* kernel = find_block_kernel(source);
  if (!kernel || !kernel->dequantize) return std::nullopt;
  if (cols % size_t(kernel->weights) ||
      data.shape(0) != rows * (cols / size_t(kernel->weights)) * size_t(kernel->bytes))
    throw nb::value_error("requires the blocks of one weight per code");
  ErrorSums e{};
  {
    nb::gil_scoped_release release;
    if (codes.size() &&
        !grouped_quantize(*kernel, data.data(), weights.data(), rows, groups, cols / groups, how, codes.data(),
                          scale.data(), offset.data(), bias ? bias->data() : nullptr, measure ? &e : nullptr))
      return std::nullopt;
  }
  return five(e);
}

}  // namespace

void bind_grouped(nb::module_& m) {
  m.def("grouped_search", &search_py, "w"_a, "weights"_a, "codes"_a.noconvert(), "scale"_a.noconvert(),
        "offset"_a.noconvert(), "bias"_a.noconvert().none(), "bits"_a, "zero"_a, "type"_a, "clips"_a);
  m.def("grouped_quantize", &quantize_py, "source"_a, "data"_a, "weights"_a, "codes"_a.noconvert(),
        "scale"_a.noconvert(), "offset"_a.noconvert(), "bias"_a.noconvert().none(), "bits"_a, "zero"_a, "type"_a,
        "clips"_a, "measure"_a);
}

}  // namespace polyquant
