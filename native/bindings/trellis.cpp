// Python bindings of trellis-coded weights.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "trellis/matrix.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace polyquant {
// Found by MatrixGroup through argument-dependent lookup.
static size_t inputs_of(const TrellisMatrix& m) {
  if (m.groups > 1 && m.span % 128) throw nb::value_error("scale groups must be multiples of 128 inputs");
  return m.inputs;
}
static size_t outputs_of(const TrellisMatrix& m) { return m.outputs; }

namespace {

using Bytes = Array<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using BytesOut = Array<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = Array<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Tiles = Array<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Levels = Array<const int16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Codes = Array<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void pack(Bytes codes, int bits, BytesOut packed) {
  if (bits < 1 || bits > 8 || codes.shape(0) % 8 || codes.shape(0) / 8 * size_t(bits) != packed.shape(0))
    throw nb::value_error("sizes of codes and bytes do not match");
  nb::gil_scoped_release release;
  trellis_pack(codes.data(), codes.shape(0), unsigned(bits), packed.data());
}

void unpack(Bytes packed, int bits, BytesOut codes) {
  if (bits < 1 || bits > 8 || codes.shape(0) % 8 || codes.shape(0) / 8 * size_t(bits) != packed.shape(0))
    throw nb::value_error("sizes of codes and bytes do not match");
  nb::gil_scoped_release release;
  trellis_unpack(packed.data(), codes.shape(0), unsigned(bits), codes.data());
}

void rotate(Rows x, int block) {
  if (block < 2 || block > 128 || (block & (block - 1)) || x.shape(1) % size_t(block))
    throw nb::value_error("the block must divide the rows");
  if (x.size() == 0) return;
  nb::gil_scoped_release release;
  hadamard(x.data(), x.shape(0), x.shape(1), size_t(block));
}

void encode(Tiles tiles, int bits, int window, Levels levels, float factor, int doublings, Codes codes) {
  if (bits < 1 || bits > 8 || window < bits || window > 16 || levels.shape(0) != size_t(1) << window ||
      tiles.shape(1) != kTile || codes.shape(0) != tiles.shape(0) || codes.shape(1) != kTile || doublings < 0 ||
      doublings > 5)
    throw nb::value_error("shapes of tiles, levels and codes do not match");
  nb::gil_scoped_release release;
  trellis_encode(tiles.data(), tiles.shape(0), {unsigned(bits), unsigned(window), levels.data(), factor, doublings},
                 codes.data());
}

using Floats = Array<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Scales = Array<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Output = Array<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// A matrix and the arrays it keeps alive.
struct Trellis {
  Bytes tiles;
  Levels levels;
  Floats numbers, su, sv;
  std::optional<Bytes> order;
  std::vector<float> scales;  // [G, N rounded up to 16]
  TrellisMatrix matrix;
};

Book book_of(const std::string& name) {
  const std::pair<const char*, Book> known[] = {{"mul1", Book::mul1},
                                                {"grid", Book::grid},
                                                {"mcg", Book::mcg},
                                                {"3inst", Book::three_inst},
                                                {"lut", Book::table}};
  for (const auto& [word, book] : known)
    if (name == word) return book;
  throw nb::value_error("unknown codebook");
}

// levels: [2 ** window + 1], with an extra one for lanes that read two; order: [256], None for row-major; halves:
// unrotated
// grids in half precision.
Trellis make(Bytes tiles, size_t inputs, size_t outputs, int bits, int window, const std::string& book, Levels levels,
             Floats numbers, float step, float zero, std::optional<Bytes> order, std::pair<int, int> blocks,
             Scales scales, Floats su, Floats sv, bool halves) {
  const auto fits = [](size_t length, int block) {
    return block >= 1 && block <= 128 && (block & (block - 1)) == 0 && length % size_t(block) == 0;
  };
  const size_t columns = (outputs + 15) / 16, groups = scales.shape(0),
               states = window > 0 && window <= 16 ? size_t(1) << window : 0;
  if (bits < 1 || bits > 8 || window < bits || window > 16 || inputs == 0 || outputs == 0 ||
      inputs > (size_t(1) << 40) / outputs || tiles.shape(0) != (inputs + 15) / 16 * columns * 32 * size_t(bits) ||
      levels.shape(0) != states + 1 || numbers.shape(0) != states || (order && order->shape(0) != kTile) ||
      !fits(inputs, blocks.first) || !fits(outputs, blocks.second) || groups == 0 || groups > inputs ||
      scales.shape(1) != outputs || su.shape(0) != inputs || sv.shape(0) != outputs)
    throw nb::value_error("shapes of tiles, scales and signs do not match");
  const size_t span = (inputs + groups - 1) / groups;
  if (order)
    for (size_t j = 0; j < kTile; ++j)  // each lane's inputs repeat every 32 places, as the fragments' kernel requires
      if (order->data()[j] / 16 != order->data()[kTile - 32 + j % 32] / 16) throw nb::value_error("unsupported order");
  Trellis t{tiles, levels, numbers, su, sv, order, std::vector<float>(groups * columns * 16), {}};
  for (size_t g = 0; g < groups; ++g)
    std::copy_n(scales.data() + g * outputs, outputs, t.scales.data() + g * columns * 16);
  const Book kind = book_of(book);
  t.matrix = {tiles.data(),
              inputs,
              outputs,
              unsigned(bits),
              unsigned(window),
              kind,
              levels.data(),
              numbers.data(),
              step,
              zero,
              order ? order->data() : nullptr,
              size_t(blocks.first),
              size_t(blocks.second),
              groups,
              span,
              t.scales.data(),
              su.data(),
              sv.data(),
              halves,
              trellis_set().find(unsigned(bits), kind, !order)};
  return t;
}

void dequantize(const Trellis& t, Output out) {
  if (out.shape(0) != t.matrix.outputs || out.shape(1) != t.matrix.inputs)
    throw nb::value_error("the output has the wrong shape");
  nb::gil_scoped_release release;
  trellis_dequantize(t.matrix, out.data());
}

using TrellisGroup = MatrixGroup<Trellis, TrellisMatrix, TrellisJob, multiply_trellis>;

}  // namespace

void bind_trellis(nb::module_& m) {
  nb::class_<Trellis>(m, "Trellis").def("dequantize", &dequantize, "out"_a.noconvert());
  nb::class_<TrellisGroup>(m, "TrellisGroup")
      .def(nb::init<nb::sequence>())
      .def("multiply", &multiply_group<TrellisGroup>, "x"_a, "rounding"_a, "y"_a.noconvert());
  m.def("trellis", &make, "tiles"_a, "inputs"_a, "outputs"_a, "bits"_a, "window"_a, "book"_a, "levels"_a, "numbers"_a,
        "step"_a, "zero"_a, "order"_a.none(), "blocks"_a, "scales"_a, "su"_a, "sv"_a, "halves"_a);
  m.def("trellis_pack", &pack, "codes"_a, "bits"_a, "packed"_a.noconvert());
  m.def("trellis_unpack", &unpack, "packed"_a, "bits"_a, "codes"_a.noconvert());
  m.def("hadamard", &rotate, "x"_a.noconvert(), "block"_a);
  m.def("trellis_encode", &encode, "tiles"_a, "bits"_a, "window"_a, "levels"_a, "factor"_a, "doublings"_a,
        "codes"_a.noconvert());
}

}  // namespace polyquant
