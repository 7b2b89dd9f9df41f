// Only files called bindings* use Python: they check sizes, release the GIL, and call. This one: codecs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/blocks.hpp"
#include "codecs/blocks.hpp"
#include "codecs/gguf.hpp"
#include "codecs/metrics.hpp"
#include "codecs/ternary.hpp"
#include "kernel_sets.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace polyquant {

const BlockKernel* find_block_kernel(std::string_view name) {
  for (KernelTable family :
       {legacy_kernels(), k_kernels(), iq_kernels(), plain_kernels(), fp4_kernels(), ternary_kernels()})
    for (const BlockKernel& k : family)
      if (name == k.name) return &k;
  return nullptr;
}

namespace {

using Bytes = Array<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using BytesOut = Array<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatsOut = Array<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = Array<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = Array<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

bool dequantize(const std::string& codec, Bytes src, FloatsOut dst) {
  const BlockKernel* k = find_block_kernel(codec);
  if (!k || !k->dequantize) return false;
  const size_t blocks = src.shape(0) / size_t(k->bytes);
  if (blocks * size_t(k->bytes) != src.shape(0) || blocks * size_t(k->weights) != dst.shape(0))
    throw nb::value_error("the input must be whole blocks, with room for their weights");
  nb::gil_scoped_release release;
  k->dequantize(src.data(), dst.data(), blocks);
  return true;
}

bool quantize(const std::string& codec, Matrix src, BytesOut dst, std::optional<Vector> importance) {
  const BlockKernel* k = find_block_kernel(codec);
  if (!k || !k->quantize) return false;
  const size_t rows = src.shape(0), cols = src.shape(1);
  if (cols % size_t(k->weights) || dst.shape(0) != rows ||
      dst.shape(1) != cols / size_t(k->weights) * size_t(k->bytes) || (importance && importance->shape(0) != cols))
    throw nb::value_error("shapes of weights, blocks and importance do not match");
  if (src.size() == 0) return true;  // any number of empty rows
  nb::gil_scoped_release release;
  k->quantize(src.data(), dst.data(), rows, cols, importance ? importance->data() : nullptr);
  return true;
}

FiveSums sums(Vector a, Vector b) {
  if (a.shape(0) != b.shape(0)) throw nb::value_error("the arrays must have equal lengths");
  nb::gil_scoped_release release;
  return five(error_sums(a.data(), b.data(), a.shape(0)));
}

// Of two types with kernels; None without them, or if the weights of one do not fill blocks of the other.
std::optional<FiveSums> stored_sums_py(const std::string& a, const std::string& b, Bytes data_a, Bytes data_b) {
  const BlockKernel *x = find_block_kernel(a), *y = find_block_kernel(b);
  if (!x || !x->dequantize || !y || !y->dequantize) return std::nullopt;
  const size_t blocks = data_a.shape(0) / size_t(x->bytes), count = blocks * size_t(x->weights);
  if (count % size_t(y->weights)) return std::nullopt;
  if (data_a.shape(0) % size_t(x->bytes) || data_b.shape(0) != count / size_t(y->weights) * size_t(y->bytes))
    throw nb::value_error("both sides must be whole blocks of as many weights");
  nb::gil_scoped_release release;
  return five(stored_errors(*x, *y, data_a.data(), data_b.data(), count));
}

void units_py(Vector a, Vector b, FloatsOut out) {
  const size_t units = out.shape(0) / 4;
  if (a.shape(0) != b.shape(0) || out.shape(0) % 4 || (units ? a.shape(0) % units : a.shape(0)))
    throw nb::value_error("the arrays must have equal lengths, and four sums per unit");
  nb::gil_scoped_release release;
  unit_errors(a.data(), b.data(), units, units ? a.shape(0) / units : 0, out.data(), units);
}

constexpr size_t kMostPerUnit = size_t(1) << 40;  // the bytes of a unit do not overflow

// False without kernels for both types, or if units are not whole blocks.
bool stored_units_py(const std::string& a, const std::string& b, Bytes data_a, Bytes data_b, size_t unit,
                     FloatsOut out) {
  const BlockKernel *x = find_block_kernel(a), *y = find_block_kernel(b);
  if (!x || !x->dequantize || !y || !y->dequantize || !unit || unit > kMostPerUnit || unit % size_t(x->weights) ||
      unit % size_t(y->weights))
    return false;
  const size_t units = out.shape(0) / 4;
  const auto fits = [&](const BlockKernel& k, size_t bytes) {
    const size_t each = unit / size_t(k.weights) * size_t(k.bytes);
    return bytes % each == 0 && bytes / each == units;
  };
  if (out.shape(0) % 4 || !fits(*x, data_a.shape(0)) || !fits(*y, data_b.shape(0)))
    throw nb::value_error("both sides must be whole units, with four sums for each");
  nb::gil_scoped_release release;
  if (units) stored_unit_errors(*x, *y, data_a.data(), data_b.data(), units, unit, out.data());
  return true;
}

// Sums of errors, zeros unless `measure`; None without kernels for both types, and where a weight is not finite.
std::optional<FiveSums> requantize_py(const std::string& source, const std::string& target, Bytes data, BytesOut out,
                                      std::optional<Vector> importance, bool measure) {
  const BlockKernel *from = find_block_kernel(source), *to = find_block_kernel(target);
  if (!from || !from->dequantize || !to || !to->dequantize || !to->quantize) return std::nullopt;
  const size_t rows = out.shape(0), cols = out.shape(1) / size_t(to->bytes) * size_t(to->weights);
  if (out.shape(1) % size_t(to->bytes) || cols % size_t(from->weights) ||
      data.shape(0) != rows * (cols / size_t(from->weights)) * size_t(from->bytes) ||
      (importance && importance->shape(0) != cols))
    throw nb::value_error("bytes of the source, blocks and importance do not fit");
  ErrorSums e{};
  {
    nb::gil_scoped_release release;
    if (out.size() && !requantize(*from, *to, data.data(), rows, cols, importance ? importance->data() : nullptr,
                                  out.data(), measure ? &e : nullptr))
      return std::nullopt;
  }
  return five(e);
}

using Starts = Array<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

int64_t skip_strings(Bytes buffer, uint64_t offset, uint64_t count, bool big_endian, bool wide,
                     std::optional<Starts> starts) {
  if (starts && starts->shape(0) != count) throw nb::value_error("starts must have one entry per string");
  nb::gil_scoped_release release;
  return gguf_skip_strings(buffer.data(), buffer.shape(0), offset, count, big_endian, wide,
                           starts ? starts->data() : nullptr);
}

// ---------------------------------------------------------------- ternary layouts

using Codes = Array<const int8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using CodesOut = Array<int8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FlatBytesOut = Array<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using CountsOut = Array<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Lanes lanes_of(size_t bytes, size_t weights, size_t width, bool high_first, bool zero_first) {
  if (width == 0 || bytes % width || weights != 4 * bytes)
    throw nb::value_error("requires four weights per byte and whole blocks");
  return {width, high_first, zero_first};
}

void unpack_lanes_py(Bytes src, CodesOut codes, size_t width, bool high_first, bool zero_first) {
  const Lanes l = lanes_of(src.shape(0), codes.shape(0), width, high_first, zero_first);
  nb::gil_scoped_release release;
  unpack_lanes(src.data(), codes.data(), src.shape(0), l);
}

void dequantize_lanes_py(Bytes src, FloatsOut out, float scale, size_t width, bool high_first, bool zero_first) {
  const Lanes l = lanes_of(src.shape(0), out.shape(0), width, high_first, zero_first);
  nb::gil_scoped_release release;
  dequantize_lanes(src.data(), out.data(), src.shape(0), l, scale);
}

bool pack_lanes_py(Codes codes, FlatBytesOut dst, size_t width, bool high_first, bool zero_first) {
  const Lanes l = lanes_of(dst.shape(0), codes.shape(0), width, high_first, zero_first);
  nb::gil_scoped_release release;
  return pack_lanes(codes.data(), dst.data(), dst.shape(0), l);
}

void relayout_lanes_py(Bytes src, FlatBytesOut dst, size_t chunk, size_t width, bool high_first, bool zero_first,
                       size_t to_width, bool to_high_first, bool to_zero_first) {
  const size_t bytes = src.shape(0);
  if (dst.shape(0) != bytes || chunk == 0 || width == 0 || to_width == 0 || chunk % width || chunk % to_width ||
      bytes % width || bytes % to_width)
    throw nb::value_error("chunks must be whole blocks of both layouts");
  nb::gil_scoped_release release;
  chunk = std::min(chunk, bytes);
  std::vector<int8_t> scratch(4 * chunk);
  relayout_lanes(src.data(), dst.data(), bytes, {width, high_first, zero_first},
                 {to_width, to_high_first, to_zero_first}, scratch.data(), chunk);
}

void count_symbols_py(Bytes src, CountsOut counts) {
  if (counts.shape(0) != 4) throw nb::value_error("counts must have four entries");
  nb::gil_scoped_release release;
  count_symbols(src.data(), src.shape(0), counts.data());
}

std::pair<bool, uint32_t> ternarize_tensor_py(Vector w, CodesOut codes, bool exact, float floor) {
  if (w.shape(0) != codes.shape(0)) throw nb::value_error("requires one code per weight");
  nb::gil_scoped_release release;
  uint32_t largest = 0;
  const bool good = ternarize_tensor(w.data(), codes.data(), w.shape(0), exact, floor, &largest);
  return {good, largest};
}

// TL1 if three = 0, else TL2; the payload has the size of its sections. bm_outer, bk, bm: BM, BK, bm of bitnet.cpp's
// kernels.
Tile tile_of(size_t bytes, size_t weights, size_t rows, size_t cols, size_t three, size_t outer, size_t bk, size_t bm) {
  const size_t groups = three ? 32 : 16;
  if (outer == 0 || bk == 0 || bm == 0 || rows % outer || outer % bm || bm % groups || 256 % bm || cols == 0 ||
      rows != weights / cols || weights % cols || three > cols ||
      (three ? bm != 32 || three % bk || bk % 24 || (cols - three) % 32
             : cols % bk || bk % (256 / bm) || (256 / bm) % 4) ||
      bytes != rows * (three ? three / 24 * 5 + (cols - three) / 4 : cols / 4))
    throw nb::value_error("the tile does not divide the matrix");
  return {outer, bk, bm};
}

void unpack_tl_py(Bytes src, CodesOut codes, size_t rows, size_t cols, size_t three, size_t outer, size_t bk,
                  size_t bm) {
  const Tile tile = tile_of(src.shape(0), codes.shape(0), rows, cols, three, outer, bk, bm);
  nb::gil_scoped_release release;
  if (three)
    unpack_tl2(src.data(), codes.data(), rows, cols, three, tile);
  else
    unpack_tl1(src.data(), codes.data(), rows, cols, tile);
}

void pack_tl_py(Codes codes, FlatBytesOut dst, size_t rows, size_t cols, size_t three, size_t outer, size_t bk,
                size_t bm) {
  const Tile tile = tile_of(dst.shape(0), codes.shape(0), rows, cols, three, outer, bk, bm);
  nb::gil_scoped_release release;
  if (three)
    pack_tl2(codes.data(), dst.data(), rows, cols, three, tile);
  else
    pack_tl1(codes.data(), dst.data(), rows, cols, tile);
}

const TernaryKernel* find_ternary(std::string_view name) {
  for (const TernaryKernel& k : ternary_layouts())
    if (name == k.name) return &k;
  return nullptr;
}

void check_ternary(const TernaryKernel& k, size_t blocks, size_t codes, size_t bytes) {
  if (codes != blocks * size_t(k.weights) || bytes != blocks * size_t(k.bytes))
    throw nb::value_error("sizes of codes, scales and blocks do not match");
}

bool pack_ternary(const std::string& codec, Codes codes, Vector scale, FlatBytesOut dst) {
  const TernaryKernel* k = find_ternary(codec);
  if (!k) return false;
  const size_t blocks = scale.shape(0);
  check_ternary(*k, blocks, codes.shape(0), dst.shape(0));
  nb::gil_scoped_release release;
  k->pack(codes.data(), scale.data(), dst.data(), blocks);
  return true;
}

bool unpack_ternary(const std::string& codec, Bytes src, CodesOut codes, FloatsOut scale) {
  const TernaryKernel* k = find_ternary(codec);
  if (!k) return false;
  const size_t blocks = scale.shape(0);
  check_ternary(*k, blocks, codes.shape(0), src.shape(0));
  nb::gil_scoped_release release;
  k->unpack(src.data(), codes.data(), scale.data(), blocks);
  return true;
}

void ternarize_blocks(Vector w, CodesOut codes, FloatsOut scale) {
  const size_t blocks = scale.shape(0);
  if (w.shape(0) != 256 * blocks || codes.shape(0) != w.shape(0))
    throw nb::value_error("requires blocks of 256 weights");
  nb::gil_scoped_release release;
  ternarize(w.data(), codes.data(), scale.data(), blocks);
}

const char* instruction_set() {
#if defined(__x86_64__) && defined(__GNUC__)
  if (packed_set().tiles) return kernel_set().name;
  if (__builtin_cpu_supports("avx512vnni")) return "AVX-512 VNNI";
  if (__builtin_cpu_supports("avx512bw")) return "AVX-512";
  if (__builtin_cpu_supports("avx2")) return "AVX2";
  return "SSE2";
#elif defined(__aarch64__)
  return kernel_set().name;
#else
  return "plain";
#endif
}

}  // namespace
}  // namespace polyquant

NB_MODULE(_native, m) {
  using namespace polyquant;
  m.doc() = "Native counterparts of polyquant's numpy references. Private: use polyquant.ops.native.";
  m.def("dequantize", &dequantize, "codec"_a, "blocks"_a, "out"_a.noconvert());
  m.def("quantize", &quantize, "codec"_a, "w"_a, "out"_a.noconvert(), "importance"_a.none());
  m.def("error_sums", &sums, "a"_a, "b"_a);
  m.def("stored_errors", &stored_sums_py, "a"_a, "b"_a, "data_a"_a, "data_b"_a);
  m.def("unit_errors", &units_py, "a"_a, "b"_a, "out"_a.noconvert());
  m.def("stored_unit_errors", &stored_units_py, "a"_a, "b"_a, "data_a"_a, "data_b"_a, "unit"_a, "out"_a.noconvert());
  m.def("requantize", &requantize_py, "source"_a, "target"_a, "data"_a, "out"_a.noconvert(), "importance"_a.none(),
        "measure"_a);
  m.def("gguf_skip_strings", &skip_strings, "buffer"_a, "offset"_a, "count"_a, "big_endian"_a, "wide"_a,
        "starts"_a.noconvert().none());
  m.def("unpack_lanes", &unpack_lanes_py, "blocks"_a, "codes"_a.noconvert(), "width"_a, "high_first"_a, "zero_first"_a);
  m.def("dequantize_lanes", &dequantize_lanes_py, "blocks"_a, "out"_a.noconvert(), "scale"_a, "width"_a, "high_first"_a,
        "zero_first"_a);
  m.def("pack_lanes", &pack_lanes_py, "codes"_a, "out"_a.noconvert(), "width"_a, "high_first"_a, "zero_first"_a);
  m.def("relayout_lanes", &relayout_lanes_py, "blocks"_a, "out"_a.noconvert(), "chunk"_a, "width"_a, "high_first"_a,
        "zero_first"_a, "to_width"_a, "to_high_first"_a, "to_zero_first"_a);
  m.def("count_symbols", &count_symbols_py, "blocks"_a, "counts"_a.noconvert());
  m.def("ternarize_tensor", &ternarize_tensor_py, "w"_a, "codes"_a.noconvert(), "exact"_a, "floor"_a);
  m.def("unpack_tl", &unpack_tl_py, "blocks"_a, "codes"_a.noconvert(), "rows"_a, "cols"_a, "three"_a, "outer"_a, "bk"_a,
        "bm"_a);
  m.def("pack_tl", &pack_tl_py, "codes"_a, "out"_a.noconvert(), "rows"_a, "cols"_a, "three"_a, "outer"_a, "bk"_a,
        "bm"_a);
  m.def("pack_ternary", &pack_ternary, "codec"_a, "codes"_a, "scale"_a, "out"_a.noconvert());
  m.def("unpack_ternary", &unpack_ternary, "codec"_a, "blocks"_a, "codes"_a.noconvert(), "scale"_a.noconvert());
  m.def("ternarize", &ternarize_blocks, "w"_a, "codes"_a.noconvert(), "scale"_a.noconvert());
  m.def("instruction_set", &instruction_set);
  bind_affine(m);
  bind_codes(m);
  bind_grouped(m);
  bind_decoder(m);
  bind_exact(m);
  bind_experts(m);
  bind_floats(m);
  bind_packed(m);
  bind_tables(m);
  bind_tape(m);
  bind_trellis(m);
}
