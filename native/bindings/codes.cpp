// Python functions for the packings of integer codes, their tables of scales, and checksums.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "base/checksum.hpp"
#include "bindings/bindings.hpp"
#include "codecs/code_streams.hpp"
#include "codecs/number_tables.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace polyquant {

namespace {

using Bytes = Array<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using BytesOut = Array<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Words = Array<const uint32_t, nb::ndim<2>, nb::device::cpu>;
using WordsOut = Array<uint32_t, nb::ndim<2>, nb::device::cpu>;
using Numbers = Array<const uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using NumbersOut = Array<uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void check_bits(int bits) {
  if (bits < 1 || bits > 8) throw nb::value_error("bits must be 1 to 8");
}

// The stream of `count` codes fits into `pitch` bytes.
void check_stream(size_t pitch, size_t count, int bits) {
  check_bits(bits);
  if (count > pitch * 8 / size_t(bits)) throw nb::value_error("rows of the stream are too short for the codes");
}

uint8_t checked_shift(int shift) {
  if (shift < 0 || shift > 255) throw nb::value_error("shift must be 0 to 255");
  return uint8_t(shift);
}

// Returns the distance between rows in words. Columns of a larger array are accepted.
template <class W>
size_t word_pitch(const W& words) {
  if (words.size() == 0) return 0;
  if ((words.shape(1) > 1 && words.stride(1) != 1) || (words.shape(0) > 1 && words.stride(0) < int64_t(words.shape(1))))
    throw nb::value_error("words must be rows of adjacent words");
  return words.shape(0) > 1 ? size_t(words.stride(0)) : words.shape(1);
}

void unpack_py(Bytes stream, BytesOut codes, int bits, int shift) {
  check_stream(stream.shape(1), codes.shape(1), bits);
  if (stream.shape(0) != codes.shape(0)) throw nb::value_error("requires one row of codes per row of the stream");
  const uint8_t less = checked_shift(shift);
  nb::gil_scoped_release release;
  unpack_codes(stream.data(), stream.shape(0), stream.shape(1), codes.data(), codes.shape(1), bits, less);
}

void pack_py(Bytes codes, BytesOut stream, int bits, int shift) {
  check_stream(stream.shape(1), codes.shape(1), bits);
  if (stream.shape(0) != codes.shape(0)) throw nb::value_error("requires one row of codes per row of the stream");
  const uint8_t more = checked_shift(shift);
  nb::gil_scoped_release release;
  pack_codes(codes.data(), codes.shape(0), codes.shape(1), stream.data(), stream.shape(1), bits, more);
}

template <class W, class C>
void check_columns(const W& words, const C& codes, int bits) {
  check_bits(bits);
  if (words.shape(0) > (size_t(1) << 56) || words.shape(0) * 32 % size_t(bits) ||
      codes.shape(1) != words.shape(0) * 32 / size_t(bits) || codes.shape(0) != words.shape(1))
    throw nb::value_error("requires a row of codes that fill the words, per column of words");
}

void unpack_columns_py(Words words, BytesOut codes, int bits, int shift) {
  check_columns(words, codes, bits);
  const uint8_t less = checked_shift(shift);
  const size_t pitch = word_pitch(words);
  nb::gil_scoped_release release;
  unpack_columns(words.data(), words.shape(0), words.shape(1), pitch, codes.data(), bits, less);
}

void pack_columns_py(Bytes codes, WordsOut words, int bits, int shift) {
  check_columns(words, codes, bits);
  const uint8_t more = checked_shift(shift);
  const size_t pitch = word_pitch(words);
  nb::gil_scoped_release release;
  pack_columns(codes.data(), words.shape(0), words.shape(1), pitch, words.data(), bits, more);
}

template <class W, class C>
void check_interleaved(const W& words, const C& codes) {
  if (codes.shape(0) % 8 || codes.shape(0) / 8 != words.shape(1) || codes.shape(1) != words.shape(0))
    throw nb::value_error("requires eight rows of codes per column of words");
}

void unpack_interleaved_py(Words words, BytesOut codes, int shift) {
  check_interleaved(words, codes);
  const uint8_t less = checked_shift(shift);
  const size_t pitch = word_pitch(words);
  nb::gil_scoped_release release;
  unpack_interleaved(words.data(), words.shape(0), words.shape(1), pitch, codes.data(), less);
}

void pack_interleaved_py(Bytes codes, WordsOut words, int shift) {
  check_interleaved(words, codes);
  const uint8_t more = checked_shift(shift);
  const size_t pitch = word_pitch(words);
  nb::gil_scoped_release release;
  pack_interleaved(codes.data(), words.shape(0), words.shape(1), pitch, words.data(), more);
}

template <class B, class C, class F>
void check_blocks(const B& blocks, const C& codes, const F& numbers, int bits) {
  const size_t size = block_bytes(bits, numbers.shape(1));
  if (size == 0 || blocks.shape(1) != size || codes.shape(1) != 32 || codes.shape(0) != blocks.shape(0) ||
      numbers.shape(0) != blocks.shape(0))
    throw nb::value_error("requires 32 codes and one or two numbers per block");
}

void unpack_blocks_py(Bytes blocks, BytesOut codes, NumbersOut numbers, int bits, int shift) {
  check_blocks(blocks, codes, numbers, bits);
  const uint8_t less = checked_shift(shift);
  nb::gil_scoped_release release;
  unpack_blocks(blocks.data(), blocks.shape(0), bits, numbers.shape(1), codes.data(), numbers.data(), less);
}

void pack_blocks_py(Bytes codes, Numbers numbers, BytesOut blocks, int bits, int shift) {
  check_blocks(blocks, codes, numbers, bits);
  const uint8_t more = checked_shift(shift);
  nb::gil_scoped_release release;
  pack_blocks(codes.data(), numbers.data(), blocks.shape(0), bits, numbers.shape(1), blocks.data(), more);
}

using Floats = Array<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatsOut = Array<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Halves = Array<const uint16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using HalvesOut = Array<uint16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void widen_py(Halves stored, FloatsOut values, bool bfloat) {
  if (stored.size() != values.size()) throw nb::value_error("requires arrays of the same length");
  nb::gil_scoped_release release;
  (bfloat ? widen_bfloats : widen_halves)(stored.data(), values.data(), values.size());
}

bool narrow_py(Floats values, HalvesOut stored, bool bfloat) {
  if (stored.size() != values.size()) throw nb::value_error("requires arrays of the same length");
  nb::gil_scoped_release release;
  return (bfloat ? narrow_bfloats : narrow_halves)(values.data(), stored.data(), values.size());
}

uint32_t crc32_py(Array<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> data, uint32_t crc) {
  nb::gil_scoped_release release;
  return crc32(crc, data.data(), data.size());
}

}  // namespace

void bind_codes(nb::module_& m) {
  m.def("unpack_codes", &unpack_py, "stream"_a, "codes"_a.noconvert(), "bits"_a, "shift"_a = 0);
  m.def("pack_codes", &pack_py, "codes"_a, "stream"_a.noconvert(), "bits"_a, "shift"_a = 0);
  m.def("unpack_columns", &unpack_columns_py, "words"_a, "codes"_a.noconvert(), "bits"_a, "shift"_a = 0);
  m.def("pack_columns", &pack_columns_py, "codes"_a, "words"_a.noconvert(), "bits"_a, "shift"_a = 0);
  m.def("unpack_interleaved", &unpack_interleaved_py, "words"_a, "codes"_a.noconvert(), "shift"_a = 0);
  m.def("pack_interleaved", &pack_interleaved_py, "codes"_a, "words"_a.noconvert(), "shift"_a = 0);
  m.def("unpack_blocks", &unpack_blocks_py, "blocks"_a, "codes"_a.noconvert(), "numbers"_a.noconvert(), "bits"_a,
        "shift"_a = 0);
  m.def("pack_blocks", &pack_blocks_py, "codes"_a, "numbers"_a, "blocks"_a.noconvert(), "bits"_a, "shift"_a = 0);
  m.def("widen", &widen_py, "stored"_a, "values"_a.noconvert(), "bfloat"_a);
  m.def("narrow", &narrow_py, "values"_a, "stored"_a.noconvert(), "bfloat"_a);
  m.def("crc32", &crc32_py, "data"_a, "crc"_a = 0);
}

}  // namespace polyquant
