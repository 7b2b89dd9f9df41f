// Python bindings of the exact operations (exact/exact.hpp).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "bindings/steps.hpp"
#include "exact/exact.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace polyquant {
namespace {

using Stack = Array<const float, nb::ndim<3>, nb::device::cpu>;  // any strides
using StackOut = Array<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Square = Array<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Scores = Array<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ends = Array<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

ExactIsa isa_of(const std::string& name) {
  const ExactIsa isa = name.empty()       ? ExactIsa::best
                       : name == "avx2"   ? ExactIsa::avx2
                       : name == "avx512" ? ExactIsa::avx512
                                          : ExactIsa::plain;
  require(name.empty() || name == "plain" || isa != ExactIsa::plain, "unknown instruction set");
  require(exact_supports(isa), "this processor lacks the instruction set");
  return isa;
}

FloatMatrices matrices(const Stack& x) { return {x.data(), x.stride(0), x.stride(1), x.stride(2)}; }

// a [items, rows, depth], b [items, depth, columns] -> out [items, rows, columns]
void product_py(Stack a, Stack b, StackOut out, bool symmetric, const std::string& isa) {
  const ProductSize size{a.shape(0), a.shape(1), b.shape(2), a.shape(2), symmetric};
  require(b.shape(0) == size.items && b.shape(1) == size.depth, "a and b do not fit");
  require(out.shape(0) == size.items && out.shape(1) == size.rows && out.shape(2) == size.columns,
          "out must be [items, rows, columns]");
  require(!symmetric || size.rows == size.columns, "a symmetric product must be square");
  const ExactIsa chosen = isa_of(isa);
  const FloatMatrices left = matrices(a), right = matrices(b);
  float* to = out.data();
  if (out.size() == 0) return;
  const Kernel running(size.items * size.rows * size.columns * size.depth);
  exact_product(left, right, size, to, chosen);
}

bool cholesky_py(Square h, const std::string& isa) {
  require(h.shape(0) == h.shape(1), "the matrix must be square");
  const ExactIsa chosen = isa_of(isa);
  double* data = h.data();
  nb::gil_scoped_release release;
  return exact_cholesky(data, h.shape(0), chosen);
}

template <class T>
void exponential_py(Array<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu> x,
                    Array<T, nb::ndim<1>, nb::c_contig, nb::device::cpu> out, const std::string& isa) {
  require(x.shape(0) == out.shape(0), "out must have the shape of x");
  const ExactIsa chosen = isa_of(isa);
  const T* from = x.data();
  T* to = out.data();
  const Kernel running(x.shape(0));
  exact_exponential(from, to, x.shape(0), chosen);
}

void softmax_py(Scores scores, Ends low, Ends high, float scale, std::optional<Vector> sinks, const std::string& isa) {
  const size_t rows = scores.shape(0), columns = scores.shape(1);
  require(low.shape(0) == rows && high.shape(0) == rows && (!sinks || sinks->shape(0) == rows), "one end per row");
  for (size_t r = 0; r < rows; ++r)
    require(low.data()[r] >= 0 && low.data()[r] < high.data()[r] && size_t(high.data()[r]) <= columns,
            "each row needs a column");
  const ExactIsa chosen = isa_of(isa);
  const SoftmaxRows all{scores.data(), rows, columns, low.data(), high.data(), scale, sinks ? sinks->data() : nullptr};
  const Kernel running(rows * columns);
  exact_softmax(all, chosen);
}

nb::list sets_py() {
  nb::list names;
  for (const auto& [name, isa] :
       {std::pair{"plain", ExactIsa::plain}, {"avx2", ExactIsa::avx2}, {"avx512", ExactIsa::avx512}})
    if (exact_supports(isa)) names.append(name);
  return names;
}

}  // namespace

void bind_exact(nb::module_& m) {
  m.def("exact_product", &product_py, "a"_a.noconvert(), "b"_a.noconvert(), "out"_a.noconvert(), "symmetric"_a = false,
        "isa"_a = "");
  m.def("exact_cholesky", &cholesky_py, "h"_a.noconvert(), "isa"_a = "");
  m.def("exact_exponential", &exponential_py<double>, "x"_a.noconvert(), "out"_a.noconvert(), "isa"_a = "");
  m.def("exact_float_exponential", &exponential_py<float>, "x"_a.noconvert(), "out"_a.noconvert(), "isa"_a = "");
  m.def("exact_softmax", &softmax_py, "scores"_a.noconvert(), "low"_a.noconvert(), "high"_a.noconvert(), "scale"_a,
        "sinks"_a.noconvert().none(), "isa"_a = "");
  m.def("exact_sets", &sets_py);
}

}  // namespace polyquant
