// Matrices with tables as Python objects (class Packed), and the repacking of codes stored along the outputs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/threads.hpp"
#include "bindings/bindings.hpp"
#include "codecs/grouped_repack.hpp"
#include "packed/packed.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace polyquant {
namespace {

constexpr size_t kMostWeights = size_t(1) << 40, kLeastGroup = 16;

struct Stored {
  std::string_view name;
  Number type;
  size_t bytes;
};
constexpr std::array<Stored, 5> kNumbers{{{"f32", Number::f32, 4},
                                          {"f16", Number::f16, 2},
                                          {"bf16", Number::bf16, 2},
                                          {"e8m0", Number::e8m0, 1},
                                          {"e4m3", Number::e4m3, 1}}};

Stored stored_as(const std::string& name) {
  for (const Stored& s : kNumbers)
    if (name == s.name) return s;
  throw nb::value_error("scales must be f32, f16, bf16, e8m0 or e4m3");
}

const PackedKernel* find_grouped(const std::string& name) {
  for (const PackedKernel& k : grouped_kernels())
    if (name == k.name) return &k;
  return nullptr;
}

// Kernels of integer codes have a scale per 32 or per 16 columns; those of floats take any groups.
const PackedKernel& kernel_of(const std::string& kind, size_t group, size_t groups) {
  const PackedKernel* kernel = find_grouped(kind);
  if (kernel) {
    if (kernel->multiply) throw nb::value_error("unknown kind of codes");  // "4.32": a name of the kernel only
    return *kernel;
  }
  if (groups > 1 && group % kLeastGroup) throw nb::value_error("a group must be a multiple of 16 columns");
  kernel = find_grouped(kind + (groups == 1 || group % 32 == 0 ? ".32" : ".16"));
  if (!kernel) throw nb::value_error("unknown kind of codes");
  return *kernel;
}

// codes: rows of `pitch` bytes. kind: the bits of a code, or e2m1, e4m3, e5m2. Tables [ceil(rows / tall), ceil(cols /
// group)]: `scale` as bytes of `number`, `bias` likewise, `zero` one byte each; without both, all zero points are
// `common`. factor: of the whole matrix.
Packed make_grouped(PackedBytes codes, const std::string& kind, size_t rows, size_t cols, size_t pitch,
                    PackedBytes scale, const std::string& number, size_t group, size_t tall,
                    std::optional<PackedBytes> zero, std::optional<PackedBytes> bias, float common, float factor) {
  const Stored type = stored_as(number);
  if (rows == 0 || cols == 0 || rows > kMostWeights / cols || group == 0 || tall == 0 || pitch == 0 ||
      pitch > kMostWeights / rows)
    throw nb::value_error("the layout does not divide the matrix");
  group = std::min(group, cols);
  tall = std::min(tall, rows);
  const size_t groups = (cols + group - 1) / group, cells = (rows + tall - 1) / tall * groups;
  const PackedKernel& kernel = kernel_of(kind, group, groups);
  const size_t block = size_t(kernel.block);
  if (cols % block || pitch < cols / block * size_t(kernel.bytes))
    throw nb::value_error("the layout does not divide the matrix");
  if (codes.shape(0) < rows * pitch) throw nb::value_error("fewer bytes than the matrix requires");
  if (scale.shape(0) != cells * type.bytes || (zero && zero->shape(0) != cells) ||
      (bias && bias->shape(0) != cells * type.bytes) || (zero && bias))
    throw nb::value_error("requires a scale, and at most one of a zero point and a bias, per group");
  if ((zero || bias) && (kind.size() != 1 || type.bytes == 1))
    throw nb::value_error("only integer codes have zero points or biases");
  Packed p{codes, {}, &kernel, nullptr, {scale}};
  for (const auto& table : {zero, bias})
    if (table) p.tables.push_back(*table);
  p.matrix = {codes.data(), rows, cols, pitch};
  p.matrix.scale = factor;
  p.matrix.tables = {scale.data(), zero ? zero->data() : nullptr, bias ? bias->data() : nullptr, groups, group, tall,
                     type.type,    kind == "e2m1" ? 12 : common};  // as its codes are unpacked
  p.matrix.owned = codes.shape(0);
  return p;
}

using Words = Array<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using WordsOut = Array<uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void transpose_words_py(Words words, WordsOut out) {
  const size_t rows = words.shape(0), cols = words.shape(1);
  if (out.shape(0) != cols || out.shape(1) != rows) throw nb::value_error("out must have the transposed shape");
  nb::gil_scoped_release release;
  if (words.size()) transpose_words(words.data(), rows, cols, out.data());
}

void awq_rows_py(Words words, WordsOut out) {
  const size_t k = words.shape(0), columns = words.shape(1);
  if (k % 8 || out.shape(0) / 8 != columns || out.shape(0) % 8 || out.shape(1) != k / 8)
    throw nb::value_error("requires words [K, N / 8] and out [N, K / 8]");
  nb::gil_scoped_release release;
  if (words.size()) awq_rows(words.data(), k, columns, out.data());
}

}  // namespace

void bind_tables(nb::module_& m) {
  m.def("grouped", &make_grouped, "codes"_a, "kind"_a, "rows"_a, "cols"_a, "pitch"_a, "scale"_a, "number"_a, "group"_a,
        "tall"_a, "zero"_a.none(), "bias"_a.none(), "common"_a, "factor"_a);
  m.def("transpose_words", &transpose_words_py, "words"_a, "out"_a.noconvert());
  m.def("awq_rows", &awq_rows_py, "words"_a, "out"_a.noconvert());
}

}  // namespace polyquant
