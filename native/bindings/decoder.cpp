// Python bindings of the decoder's kernels. They are called a few hundred times per token, so nothing is converted and
// few
// objects are created: arrays of a different type or order are rejected, and short calls keep the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cmath>
#include <cstring>
#include <optional>

#include "bindings/steps.hpp"
#include "decoder/decoder.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace polyquant {
namespace {

using Out = Array<float, nb::c_contig, nb::device::cpu>;
using Blocks = Array<nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using Steps = Array<float, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using Grid = Array<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Recent = Array<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

void same_shape(const Rows& x, const Out& out) {
  require(x.ndim() == out.ndim(), "out must have the shape of x");
  for (size_t axis = 0; axis < x.ndim(); ++axis)
    require(x.shape(axis) == out.shape(axis), "out must have the shape of x");
}

void rms_norm_py(Rows x, Vector weight, Out out, double eps) {
  same_shape(x, out);
  require(x.ndim() >= 1, "rows needed");
  const size_t n = x.shape(x.ndim() - 1);
  require(weight.shape(0) == n, "requires one weight per column");
  if (x.size() == 0) return;
  const size_t stride = stride_of(x);
  const size_t outer = x.ndim() == 1 ? 1 : x.shape(0), inner = x.size() / outer / n;  // inner: contiguous rows
  const float* from = x.data();
  float* to = out.data();
  perform(x.size(), 0, {from, to}, [=](size_t) {
    if (inner == 1 || stride == inner * n)
      return rms_norm(from, inner == 1 ? stride : n, weight.data(), to, outer * inner, n, eps);
    for (size_t i = 0; i < outer; ++i) rms_norm(from + i * stride, n, weight.data(), to + i * inner * n, inner, n, eps);
  });
}

// weight [n], or per head for x [tokens, heads, n]; bias: none for zeros.
void layer_norm_py(Rows x, Vector weight, std::optional<Vector> bias, Out out, double eps) {
  same_shape(x, out);
  require(x.ndim() >= 1, "rows needed");
  const size_t n = x.shape(x.ndim() - 1);
  const size_t outer = x.size() == 0 || x.ndim() == 1 ? 1 : x.shape(0),
               inner = n ? x.size() / outer / n : 0;  // inner: contiguous rows
  const bool each = inner > 1 && !bias && weight.shape(0) == inner * n;
  require(each || (weight.shape(0) == n && (!bias || bias->shape(0) == n)),
          "requires one weight and bias per column, or weights per head");
  if (x.size() == 0) return;
  const size_t stride = stride_of(x);
  const float* from = x.data();
  float* to = out.data();
  perform(x.size(), 0, {from, to}, [=](size_t) {
    const float* b = bias ? bias->data() : nullptr;
    for (size_t j = 0; each && j < inner; ++j)
      for (size_t i = 0; i < outer; ++i)
        layer_norm(from + i * stride + j * n, n, weight.data() + j * n, nullptr, to + (i * inner + j) * n, 1, n, eps);
    if (each) return;
    if (inner == 1 || stride == inner * n)
      return layer_norm(from, inner == 1 ? stride : n, weight.data(), b, to, outer * inner, n, eps);
    for (size_t i = 0; i < outer; ++i)
      layer_norm(from + i * stride, n, weight.data(), b, to + i * inner * n, inner, n, eps);
  });
}

void rotate_py(Rows x, Matrix cos, Matrix sin, Out out, bool interleaved) {
  same_shape(x, out);
  require(x.ndim() == 3, "x must be [tokens, heads, size]");
  if (x.size() == 0) return;
  const Rotation rotation{x.shape(0), x.shape(1), x.shape(2), cos.shape(1), stride_of(x), interleaved};
  require(cos.shape(0) == rotation.tokens && sin.shape(0) == rotation.tokens && sin.shape(1) == rotation.pairs &&
              rotation.pairs <= rotation.size / 2,
          "cos and sin must be [tokens, at most size / 2]");
  const float *from = x.data(), *c = cos.data(), *s = sin.data();
  float* to = out.data();
  perform(x.size(), 0, {from, c, s, to}, [=](size_t) { rotate(from, c, s, to, rotation); });
}

// up: none for ones.
void gate_py(Rows gates, std::optional<Rows> up, Out out, int how) {
  same_shape(gates, out);
  if (up) same_shape(*up, out);
  require(how >= 0 && how < activations, "unknown activation");
  if (out.size() == 0) return;
  const size_t rows = out.ndim() ? out.shape(0) : 1, width = out.size() / rows, from = stride_of(gates),
               also = up ? stride_of(*up) : width;
  const Activation which{how};
  const float *g = gates.data(), *u = up ? up->data() : nullptr;
  float* to = out.data();
  perform(out.size(), 0, {g, u ? u : g, to}, [=](size_t) {
    if (from == width && also == width) return gate(which, g, u, to, rows * width);
    for (size_t i = 0; i < rows; ++i) gate(which, g + i * from, u ? u + i * also : nullptr, to + i * width, width);
  });
}

void xielu_py(Rows x, Out out, float positive, float negative, float beta, float eps) {
  same_shape(x, out);
  if (out.size() == 0) return;
  const size_t rows = out.ndim() ? out.shape(0) : 1, width = out.size() / rows, stride = stride_of(x);
  const Xielu how{positive, negative, beta, eps};
  const float* from = x.data();
  float* to = out.data();
  perform(out.size(), 0, {from, to}, [=](size_t) {
    if (stride == width) return xielu(from, to, rows * width, how);
    for (size_t i = 0; i < rows; ++i) xielu(from + i * stride, to + i * width, width, how);
  });
}

void add_py(Rows x, Rows y, Out out, float scale) {
  same_shape(x, out);
  same_shape(y, out);
  if (out.size() == 0) return;
  const size_t rows = out.ndim() ? out.shape(0) : 1, width = out.size() / rows, from = stride_of(x),
               also = stride_of(y);
  const float *a = x.data(), *b = y.data();
  float* to = out.data();
  perform(out.size(), 0, {a, b, to}, [=](size_t) { add(a, from, b, also, to, width, rows, width, scale); });
}

// y [T, n] += bias [n]
void add_bias_py(Output y, Vector bias) {
  require(y.shape(1) == bias.shape(0), "requires one bias per column");
  if (y.size() == 0) return;
  require(y.shape(1) == 1 || y.stride(1) == 1, "rows must be contiguous");
  const size_t rows = y.shape(0), n = y.shape(1), stride = rows == 1 ? n : size_t(y.stride(0));
  require(stride >= n, "rows must be contiguous");
  float* to = y.data();
  perform(y.size(), 0, {to}, [=](size_t) { add(to, stride, bias.data(), 0, to, stride, rows, n); });
}

// y [T, n] = x [T, n], with any row strides
void copy_py(Rows x, Output y) {
  require(x.ndim() == 2 && x.shape(0) == y.shape(0) && x.shape(1) == y.shape(1), "y must have the shape of x, [T, n]");
  if (y.size() == 0) return;
  require(y.shape(1) == 1 || y.stride(1) == 1, "rows must be contiguous");
  const size_t rows = y.shape(0), n = y.shape(1), from = stride_of(x), stride = rows == 1 ? n : size_t(y.stride(0));
  require(rows == 1 || y.stride(0) >= int64_t(n), "rows must be contiguous");
  const float* in = x.data();
  float* to = y.data();
  perform(y.size(), 0, {in, to}, [=](size_t) {
    for (size_t i = 0; i < rows; ++i) std::memmove(to + i * stride, in + i * from, n * sizeof(float));
  });
}

Kept kept_of(const Blocks& blocks) {
  if (blocks.dtype() == nb::dtype<float>()) return Kept::f32;
  if (blocks.dtype() == nb::dtype<int8_t>()) return Kept::i8;
  require(blocks.dtype().code == uint8_t(nb::dlpack::dtype_code::Float) && blocks.dtype().bits == 16,
          "the cache must be float32, float16 or int8");
  return Kept::f16;
}

// x [T, ...] with n elements per row; step, offset [n]
void on_grid_py(Rows x, Vector step, Vector offset, Out out) {
  same_shape(x, out);
  require(x.ndim() >= 1, "rows needed");
  if (x.size() == 0) return;
  const size_t rows = x.ndim() == 1 ? 1 : x.shape(0), n = x.size() / rows, stride = stride_of(x);
  require(step.shape(0) == n && offset.shape(0) == n, "requires a step and an offset per column");
  const float* from = x.data();
  float* to = out.data();
  perform(x.size(), 0, {from, to}, [=](size_t) { on_grid(from, stride, step.data(), offset.data(), to, rows, n); });
}

// steps, recent: only for int8; grid: optional for int8. softcap, slopes, sinks, chunk: see Tokens.
void attend_py(Rows q, Rows k, Rows v, Blocks keys, Blocks values, Out out, size_t start, float scale, size_t window,
               std::optional<Steps> steps, std::optional<Recent> recent, std::optional<Grid> grid, float softcap,
               std::optional<Vector> slopes, std::optional<Vector> sinks, size_t chunk) {
  same_shape(q, out);
  require(q.ndim() == 3 && k.ndim() == 3 && v.ndim() == 3,
          "q must be [tokens, heads, size], k and v [tokens, groups, size]");
  const Cache cache{kept_of(keys),
                    keys.shape(0),
                    keys.shape(1),
                    keys.shape(2),
                    keys.data(),
                    values.data(),
                    steps ? steps->data() : nullptr,
                    recent ? recent->data() : nullptr,
                    grid ? grid->data() : nullptr};
  const size_t count = q.shape(0), heads = q.shape(1), groups = cache.groups, blocks = cache.blocks, size = cache.size;
  for (const Rows* x : {&k, &v})
    require(x->shape(0) == count && x->shape(1) == groups && x->shape(2) == size,
            "k and v must be [tokens, groups, size] of the cache");
  require(q.shape(2) == size && groups > 0 && heads % groups == 0,
          "heads must be a multiple of groups, with the cache's head size");
  require(keys.shape(3) == cache_block && kept_of(values) == cache.kept && values.shape(0) == groups &&
              values.shape(1) == blocks && values.shape(2) == cache_block && values.shape(3) == size,
          "keys must be [groups, blocks, size, 32], values [groups, blocks, 32, size]");
  require(start <= blocks * cache_block && count <= blocks * cache_block - start,
          "the cache has no room for these positions");
  if (cache.kept == Kept::i8) {
    require(steps && recent, "int8 requires steps and recent positions");
    require(steps->shape(0) == groups && steps->shape(1) == blocks && steps->shape(2) == 4 && steps->shape(3) == size &&
                recent->shape(0) == groups && recent->shape(1) == 2 && recent->shape(2) == cache_block * size,
            "steps must be [groups, blocks, 4, size], recent [groups, 2, 32 * size]");
  }
  require(
      !grid || (cache.kept == Kept::i8 && grid->shape(0) == groups && grid->shape(1) == 4 && grid->shape(2) == size),
      "a grid must be [groups, 4, size], for an int8 cache");
  require((!slopes || slopes->shape(0) == heads) && (!sinks || sinks->shape(0) == heads),
          "requires one slope and one sink per head");
  require(softcap >= 0 && std::isfinite(softcap), "softcap must be positive, or 0 for none");
  if (out.size() == 0) return;
  const Tokens tokens{q.data(),
                      k.data(),
                      v.data(),
                      stride_of(q),
                      stride_of(k),
                      stride_of(v),
                      count,
                      heads,
                      start,
                      window,
                      scale,
                      out.data(),
                      softcap,
                      slopes ? slopes->data() : nullptr,
                      sinks ? sinks->data() : nullptr,
                      chunk};
  positions_to(start, count, blocks * cache_block);
  perform(count * (start + count) * groups * size, start, {tokens.q, tokens.k, tokens.v, tokens.out},
          [cache, tokens, keys, values, steps, recent, grid, slopes, sinks](size_t position) {
            Tokens now = tokens;
            now.start = position;
            attend(cache, now);
          });
}

}  // namespace

void bind_decoder(nb::module_& m) {
  m.def("rms_norm", &rms_norm_py, "x"_a.noconvert(), "weight"_a.noconvert(), "out"_a.noconvert(), "eps"_a);
  m.def("layer_norm", &layer_norm_py, "x"_a.noconvert(), "weight"_a.noconvert(), "bias"_a.noconvert().none(),
        "out"_a.noconvert(), "eps"_a);
  m.def("rotate", &rotate_py, "x"_a.noconvert(), "cos"_a.noconvert(), "sin"_a.noconvert(), "out"_a.noconvert(),
        "interleaved"_a);
  m.def("gate", &gate_py, "gates"_a.noconvert(), "up"_a.noconvert().none(), "out"_a.noconvert(), "how"_a);
  m.def("xielu", &xielu_py, "x"_a.noconvert(), "out"_a.noconvert(), "positive"_a, "negative"_a, "beta"_a, "eps"_a);
  m.def("add", &add_py, "x"_a.noconvert(), "y"_a.noconvert(), "out"_a.noconvert(), "scale"_a = 1.0f);
  m.def("add_bias", &add_bias_py, "y"_a.noconvert(), "bias"_a.noconvert());
  m.def("copy", &copy_py, "x"_a.noconvert(), "y"_a.noconvert());
  m.def("attend", &attend_py, "q"_a.noconvert(), "k"_a.noconvert(), "v"_a.noconvert(), "keys"_a.noconvert(),
        "values"_a.noconvert(), "out"_a.noconvert(), "start"_a, "scale"_a, "window"_a,
        "steps"_a.noconvert().none() = nb::none(), "recent"_a.noconvert().none() = nb::none(),
        "grid"_a.noconvert().none() = nb::none(), "softcap"_a = 0.0f, "slopes"_a.noconvert().none() = nb::none(),
        "sinks"_a.noconvert().none() = nb::none(), "chunk"_a = 0);
  m.def("on_grid", &on_grid_py, "x"_a.noconvert(), "step"_a.noconvert(), "offset"_a.noconvert(), "out"_a.noconvert());
}

}  // namespace polyquant
