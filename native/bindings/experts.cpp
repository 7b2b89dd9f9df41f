// Python bindings of a mixture of experts: routing, stacks of matrices, and combination of outputs. Ids are int32, in
// memory
// that the tape lends as float32: both have four bytes. Calls from Python check them; a replayed tape reads the ids
// that
// `route` wrote.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "bindings/steps.hpp"
#include "decoder/experts.hpp"
#include "packed/experts.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace polyquant {
namespace {

using Ids = Array<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IdsOut = Array<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MatrixOut = Array<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Strided = Array<const float, nb::ndim<2>, nb::device::cpu>;

constexpr size_t kMostStacks = 8, kMostExperts = size_t(1) << 16, kMostAssignments = size_t(1) << 31;

const float* as_floats(const int32_t* ids) { return reinterpret_cast<const float*>(ids); }

void check_ids(const Ids& ids, size_t experts) {
  const int32_t* p = ids.data();
  require(std::all_of(p, p + ids.shape(0), [=](int32_t id) { return id >= 0 && size_t(id) < experts; }),
          "an expert id is out of range");
}

// The matrices of all experts, stack by stack: each stack is one matrix of experts * N rows, or a list of `experts`
// matrices
// of N rows.
struct Stacks {
  std::vector<nb::object> owners;
  std::vector<PackedMatrix> matrices;
  std::vector<PackedJob> jobs;  // [experts][stacks]
  size_t experts, stacks = 0, cols = 0, rows = 0;

  Stacks(nb::sequence items, size_t count) : experts(count) {
    require(experts > 0 && experts <= kMostExperts, "experts must be 1 to 65536");
    stacks = nb::len(items);
    require(stacks > 0 && stacks <= kMostStacks, "there must be 1 to 8 stacks");
    matrices.resize(experts * stacks);
    jobs.resize(experts * stacks);
    for (size_t s = 0; s < stacks; ++s) {
      const nb::object item = items[s];
      if (nb::isinstance<Packed>(item))
        cut(handle_of<Packed>(item), s);
      else
        gather(item, s);
      owners.push_back(item);
      rows += matrices[s].rows;
    }
  }

  void cut(const Packed& p, size_t s) {
    const PackedMatrix& whole = p.matrix;
    require(whole.rows % experts == 0 && whole.lane_step <= 1 && whole.rows / experts % whole.lanes == 0,
            "the stack cannot be split into experts");
    const size_t n = whole.rows / experts;
    for (size_t e = 0; e < experts; ++e) {
      put(e, s, whole.part(e * n, n), p);
    }
  }

  void gather(const nb::object& list, size_t s) {
    if (!nb::isinstance<nb::sequence>(list)) throw nb::type_error("a stack must be a packed matrix or a list of them");
    const auto items = nb::borrow<nb::sequence>(list);
    require(nb::len(items) == experts, "a stack must have one matrix per expert");
    for (size_t e = 0; e < experts; ++e) {
      const nb::object item = items[e];
      const Packed& p = handle_of<Packed>(item);
      owners.push_back(item);
      put(e, s, p.matrix, p);
    }
  }

  void put(size_t e, size_t s, const PackedMatrix& matrix, const Packed& p) {
    if (e == 0 && s == 0) cols = matrix.cols;
    require(matrix.cols == cols && (e == 0 || matrix.rows == matrices[s].rows),
            "experts must have the same shape, and stacks the same inputs");
    matrices[e * stacks + s] = matrix;
    jobs[e * stacks + s] = {&matrices[e * stacks + s], p.kernel, p.dequantizer, nullptr};
  }

  void run(const float* x, size_t inputs, const int32_t* ids, size_t assignments, Rounding rounding, float* y) const {
    multiply_experts({jobs, experts, stacks, cols, rows}, x, inputs, ids, assignments, y, rounding);
  }
};

// x [T or A, K], ids [A] -> y [A, sum of N]. ids: none if row i uses matrix i % experts, as for heads.
void multiply_py(nb::pointer_and_handle<Stacks> self, Matrix x, std::optional<Ids> ids, int how, MatrixOut y) {
  const Stacks* stacks = self.p;
  const size_t inputs = x.shape(0), count = ids ? ids->shape(0) : inputs;
  require(x.shape(1) == stacks->cols && y.shape(0) == count && y.shape(1) == stacks->rows && how >= 0 && how <= 3 &&
              count < kMostAssignments && (inputs ? count % inputs == 0 : count == 0),
          "shapes of experts, activations, ids and output do not match");
  if (ids) check_ids(*ids, stacks->experts);
  auto in_turn = std::make_shared<std::vector<int32_t>>(ids ? 0 : count);
  for (size_t i = 0; i < in_turn->size(); ++i) (*in_turn)[i] = int32_t(i % stacks->experts);
  const float* in = x.data();
  const int32_t* chosen = ids ? ids->data() : in_turn->data();
  float* out = y.data();
  const Rounding rounding = Rounding(how);
  {
    nb::gil_scoped_release release;
    const KernelTime time;
    stacks->run(in, inputs, chosen, count, rounding, out);
  }
  if (recording)
    record({in, ids ? as_floats(chosen) : in, out}, [=, kept = in_turn, alive = nb::borrow(self.h)](size_t) {
      stacks->run(in, inputs, chosen, count, rounding, out);
    });
}

void route_py(Matrix logits, std::optional<Vector> bias, IdsOut ids, MatrixOut weights, int scores, bool norm,
              double eps, double least, double scale, size_t groups, size_t groups_used, bool pairs) {
  const size_t tokens = logits.shape(0), experts = logits.shape(1), used = ids.shape(1);
  require(ids.shape(0) == tokens && weights.shape(0) == tokens && weights.shape(1) == used &&
              (!bias || bias->shape(0) == experts),
          "shapes of logits, bias, ids and weights do not match");
  require(experts > 0 && experts <= kMostExperts && used > 0 && used <= experts && scores >= 0 && scores <= 2,
          "invalid selection of experts");
  require(groups > 0 && groups <= experts && experts % groups == 0 && groups_used > 0 && groups_used <= groups &&
              groups_used * (experts / groups) >= used && !(bias && scores == 2),
          "invalid selection of groups");
  if (tokens == 0) return;
  const Routing how{Scores(scores), used, norm, eps, least, scale, groups, groups_used, pairs};
  const float* in = logits.data();
  int32_t* chosen = ids.data();
  float* out = weights.data();
  perform(tokens * experts * used, 0, {in, as_floats(chosen), out},
          [=](size_t) { route(in, tokens, experts, bias ? bias->data() : nullptr, how, chosen, out); });
}

// y [A, n], with any row stride; bias [experts, n]
void add_expert_bias_py(Output y, Matrix bias, Ids ids) {
  const size_t count = y.shape(0), n = y.shape(1), experts = bias.shape(0);
  require(bias.shape(1) == n && ids.shape(0) == count, "requires one bias per column, and one id per row");
  if (y.size() == 0) return;
  require(n == 1 || y.stride(1) == 1, "rows must be contiguous");
  const size_t stride = count == 1 ? n : size_t(y.stride(0));
  require(count == 1 || y.stride(0) >= int64_t(n), "rows must be contiguous");
  check_ids(ids, experts);
  float* to = y.data();
  const int32_t* chosen = ids.data();
  perform(y.size(), 0, {to, as_floats(chosen)},
          [=](size_t) { add_expert_bias(to, stride, bias.data(), experts, chosen, count, n); });
}

// y [T * used, n], weights [T, used] or none for ones -> out [T, n]
void combine_py(Matrix y, std::optional<Matrix> weights, MatrixOut out) {
  const size_t tokens = out.shape(0), n = out.shape(1), used = tokens ? y.shape(0) / tokens : 0;
  require(y.shape(0) == tokens * used && y.shape(1) == n && (used || !tokens), "shapes of outputs do not match");
  require(!weights || (weights->shape(0) == tokens && (weights->shape(1) == used || !tokens)),
          "requires one weight per expert of a token");
  if (out.size() == 0) return;
  const float *from = y.data(), *w = weights ? weights->data() : nullptr;
  float* to = out.data();
  perform(y.size(), 0, {from, w ? w : from, to}, [=](size_t) { combine(from, w, to, tokens, used, n); });
}

// x [T, n], weights [T, used] -> out [T * used, n]
void spread_py(Matrix x, Matrix weights, MatrixOut out) {
  const size_t tokens = weights.shape(0), used = weights.shape(1), n = x.shape(1);
  require(x.shape(0) == tokens && out.shape(0) == weights.size() && out.shape(1) == n,
          "shapes of inputs and weights do not match");
  if (out.size() == 0) return;
  const float *from = x.data(), *w = weights.data();
  float* to = out.data();
  perform(out.size(), 0, {from, w, to}, [=](size_t) { spread(from, w, to, tokens, used, n); });
}

// y, x [T, n], gate [T, 1] -> out [T, n]
void add_gated_py(Matrix y, Matrix x, Matrix gate, MatrixOut out) {
  const size_t rows = out.shape(0), n = out.shape(1);
  for (const Matrix* a : {&y, &x}) require(a->shape(0) == rows && a->shape(1) == n, "out must have the shape of both");
  require(gate.shape(0) == rows && gate.shape(1) == 1, "requires one gate per row");
  if (out.size() == 0) return;
  const float *a = y.data(), *b = x.data(), *g = gate.data();
  float* to = out.data();
  perform(out.size(), 0, {a, b, g, to}, [=](size_t) { add_gated(a, b, g, to, rows, n); });
}

// gate, up [A, n] with any strides
void clamped_swiglu_py(Strided gate, Strided up, MatrixOut out, float alpha, float limit) {
  const size_t rows = out.shape(0), n = out.shape(1);
  for (const Strided* a : {&gate, &up})
    require(a->shape(0) == rows && a->shape(1) == n, "out must have the shape of both");
  if (out.size() == 0) return;
  const Grid2 g{gate.data(), gate.stride(0), gate.stride(1)}, u{up.data(), up.stride(0), up.stride(1)};
  float* to = out.data();
  perform(out.size(), 0, {g.data, u.data, to}, [=](size_t) { clamped_swiglu(g, u, to, rows, n, alpha, limit); });
}

}  // namespace

void bind_experts(nb::module_& m) {
  nb::class_<Stacks>(m, "PackedExperts")
      .def(nb::init<nb::sequence, size_t>(), "stacks"_a, "experts"_a)
      .def("multiply", &multiply_py, "x"_a.noconvert(), "ids"_a.noconvert().none(), "rounding"_a, "y"_a.noconvert());
  m.def("route", &route_py, "logits"_a.noconvert(), "bias"_a.noconvert().none(), "ids"_a.noconvert(),
        "weights"_a.noconvert(), "scores"_a, "norm"_a, "eps"_a, "least"_a, "scale"_a, "groups"_a, "groups_used"_a,
        "pairs"_a);
  m.def("add_expert_bias", &add_expert_bias_py, "y"_a.noconvert(), "bias"_a.noconvert(), "ids"_a.noconvert());
  m.def("combine", &combine_py, "y"_a.noconvert(), "weights"_a.noconvert().none(), "out"_a.noconvert());
  m.def("spread", &spread_py, "x"_a.noconvert(), "weights"_a.noconvert(), "out"_a.noconvert());
  m.def("add_gated", &add_gated_py, "y"_a.noconvert(), "x"_a.noconvert(), "gate"_a.noconvert(), "out"_a.noconvert());
  m.def("clamped_swiglu", &clamped_swiglu_py, "gate"_a.noconvert(), "up"_a.noconvert(), "out"_a.noconvert(), "alpha"_a,
        "limit"_a);
}

}  // namespace polyquant
