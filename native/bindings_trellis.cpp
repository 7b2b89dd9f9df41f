// Trellis-coded weights.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "bindings.hpp"
#include "trellis.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace polyquant {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using BytesOut = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Tiles = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Levels = nb::ndarray<const int16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Codes = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void pack(Bytes codes, int bits, BytesOut packed) {
  if (bits < 1 || bits > 8 || codes.shape(0) % 8 || codes.shape(0) / 8 * size_t(bits) != packed.shape(0))
    throw nb::value_error("sizes of codes and bytes do not fit");
  nb::gil_scoped_release release;
  trellis_pack(codes.data(), codes.shape(0), unsigned(bits), packed.data());
}

void unpack(Bytes packed, int bits, BytesOut codes) {
  if (bits < 1 || bits > 8 || codes.shape(0) % 8 || codes.shape(0) / 8 * size_t(bits) != packed.shape(0))
    throw nb::value_error("sizes of codes and bytes do not fit");
  nb::gil_scoped_release release;
  trellis_unpack(packed.data(), codes.shape(0), unsigned(bits), codes.data());
}

void rotate(Rows x, int block) {
  if (block < 2 || block > 128 || (block & (block - 1)) || x.shape(1) % size_t(block)) throw nb::value_error("the block does not divide the rows");
  nb::gil_scoped_release release;
  hadamard(x.data(), x.shape(0), x.shape(1), size_t(block));
}

void encode(Tiles tiles, int bits, int window, Levels levels, float factor, int doublings, Codes codes) {
  if (bits < 1 || bits > 8 || window < bits || window > 16 || levels.shape(0) != size_t(1) << window || tiles.shape(1) != kTile ||
      codes.shape(0) != tiles.shape(0) || codes.shape(1) != kTile || doublings < 0 || doublings > 5)
    throw nb::value_error("shapes of tiles, levels and codes do not fit");
  nb::gil_scoped_release release;
  trellis_encode(tiles.data(), tiles.shape(0), {unsigned(bits), unsigned(window), levels.data(), factor, doublings}, codes.data());
}

}  // namespace

void bind_trellis(nb::module_& m) {
  m.def("trellis_pack", &pack, "codes"_a, "bits"_a, "packed"_a);
  m.def("trellis_unpack", &unpack, "packed"_a, "bits"_a, "codes"_a);
  m.def("hadamard", &rotate, "x"_a, "block"_a);
  m.def("trellis_encode", &encode, "tiles"_a, "bits"_a, "window"_a, "levels"_a, "factor"_a, "doublings"_a, "codes"_a);
}

}  // namespace polyquant
