// Scales and offsets of one row of a matrix with tables (Tables in packed/packed.hpp). Included once per instruction
// set.
#pragma once

#include <cstring>

#include "packed/codes.hpp"
#include "packed/packed.hpp"

namespace polyquant {
namespace {

PQ_INLINE void put8(float* p, const F8& x) { std::memcpy(p, &x, sizeof x); }

// Eight numbers; `halved`: divided by 2.
template <Number type>
PQ_INLINE F8 numbers8(const uint8_t* p, bool halved) {
  if constexpr (type == Number::e8m0) {  // 2^(e - 127), whose half is subnormal for the two smallest
    const I8x e = ints8(load<uint64_t>(p)) - (halved ? 1 : 0);
    const I8x tiny = e < 1, subnormal = e < 0 ? I8x{} + 0x00200000 : I8x{} + 0x00400000;
    return F8((tiny & subnormal) | (~tiny & (e << 23)));
  }
  F8 x;
  if constexpr (type == Number::f32) {
    x = load<F8>(p);
  } else if constexpr (type == Number::f16) {
    x = halves8<2>(p);
  } else if constexpr (type == Number::bf16) {
#if defined(__AVX2__)
    const __m128i two = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    x = F8(_mm256_slli_epi32(_mm256_cvtepu16_epi32(two), 16));
#else
    for (int i = 0; i < 8; ++i) x[i] = bfloat_to_float(load<uint16_t>(p + 2 * i));
#endif
  } else {  // E4M3
    const I8x b = ints8(load<uint64_t>(p)), magnitude = b & 0x7f;
    x = e4m3_magnitudes(magnitude);
    x = F8(I8x(x) | (b & 0x80) << 24 | (magnitude == 0x7f ? I8x{} + 0x7fc00000 : I8x{}));
  }
  return halved ? x * 0.5f : x;
}

constexpr size_t bytes_of(Number type) {
  return type == Number::f32 ? 4 : type == Number::f16 || type == Number::bf16 ? 2 : 1;
}

// Offsets of a row: from a common zero point, one per group, or biases.
enum class Offsets { common, zero, bias };

inline Offsets offsets_of(const Tables& t) { return t.bias ? Offsets::bias : t.zero ? Offsets::zero : Offsets::common; }

// The tables of one row.
struct TableRow {
  const uint8_t *scale, *zero, *bias;
};
inline TableRow table_row(const PackedMatrix& w, size_t v) {
  const Tables& t = w.tables;
  const size_t cell = (w.origin + v) / t.tall * t.groups, at = cell * bytes_of(t.type);
  return {t.scale + at, t.zero ? t.zero + cell : nullptr, t.bias ? t.bias + at : nullptr};
}

// Each of eight numbers 1, 2 or 4 times.
template <int times>
PQ_INLINE float* spread(const F8& x, float* out) {
#if defined(__AVX2__)
  PQ_UNROLL
  for (int i = 0; i < times; ++i, out += 8) {
    const __m256i which = _mm256_srli_epi32(
        _mm256_setr_epi32(8 * i, 8 * i + 1, 8 * i + 2, 8 * i + 3, 8 * i + 4, 8 * i + 5, 8 * i + 6, 8 * i + 7),
        times == 4 ? 2 : times - 1);
    put8(out, times == 1 ? x : F8(_mm256_permutevar8x32_ps(__m256(x), which)));
  }
#else
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < times; ++j) *out++ = x[i];
#endif
  return out;
}

// Scales and offsets of a row, each `times` times. Writes whole vectors: up to 8 * count numbers beyond the last.
template <Number type, Offsets offsets, int times>
void fill_as(const TableRow& row, size_t groups, size_t count, float shift, float common, bool halved, float* d,
             float* m) {
  constexpr size_t size = bytes_of(type);
  for (size_t g = 0; g < groups; g += 8) {
    const uint8_t* scale = row.scale + g * size;
    const uint8_t* zero = offsets == Offsets::zero ? row.zero + g : nullptr;
    const uint8_t* bias = offsets == Offsets::bias ? row.bias + g * size : nullptr;
    uint8_t rest[3][8 * size];
    if (groups - g < 8) {  // the tables end here
      std::memset(rest, 0, sizeof rest);
      std::memcpy(rest[0], scale, (groups - g) * size);
      if (offsets == Offsets::zero) std::memcpy(rest[1], zero, groups - g);
      if (offsets == Offsets::bias) std::memcpy(rest[2], bias, (groups - g) * size);
      scale = rest[0], zero = rest[1], bias = rest[2];
    }
    const F8 s = numbers8<type>(scale, halved);
    F8 o;
    if constexpr (offsets == Offsets::bias)
      o = numbers8<type>(bias, false) + shift * s;
    else if constexpr (offsets == Offsets::zero)
      o = (shift - floats8(load<uint64_t>(zero))) * s;
    else
      o = (shift - common) * s;
    const size_t last = groups - g < 8 && times == 0 ? groups - g : 8;
    if constexpr (times == 0) {
      for (size_t i = 0; i < last; ++i)
        for (size_t j = 0; j < count; j += 8, d += 8, m += 8) put8(d, F8{} + s[i]), put8(m, F8{} + o[i]);
    } else {
      d = spread<times>(s, d);
      m = spread<times>(o, m);
    }
  }
}

template <Number type, Offsets offsets>
void fill_times(const TableRow& row, size_t groups, size_t times, float shift, float common, bool halved, float* d,
                float* m) {
  switch (times) {
    case 1:
      return fill_as<type, offsets, 1>(row, groups, 1, shift, common, halved, d, m);
    case 2:
      return fill_as<type, offsets, 2>(row, groups, 2, shift, common, halved, d, m);
    case 4:
      return fill_as<type, offsets, 4>(row, groups, 4, shift, common, halved, d, m);
    default:
      return fill_as<type, offsets, 0>(row, groups, times, shift, common, halved, d, m);
  }
}

template <Number type>
void fill_offsets(const TableRow& row, const Tables& t, size_t times, float shift, bool halved, float* d, float* m) {
  switch (offsets_of(t)) {
    case Offsets::bias:
      return fill_times<type, Offsets::bias>(row, t.groups, times, shift, 0, halved, d, m);
    case Offsets::zero:
      return fill_times<type, Offsets::zero>(row, t.groups, times, shift, 0, halved, d, m);
    default:
      return fill_times<type, Offsets::common>(row, t.groups, times, shift, t.common, halved, d, m);
  }
}

inline void fill_type(const TableRow& row, const Tables& t, size_t times, float shift, bool halved, float* d,
                      float* m) {
  switch (t.type) {
    case Number::f32:
      return fill_offsets<Number::f32>(row, t, times, shift, halved, d, m);
    case Number::f16:
      return fill_offsets<Number::f16>(row, t, times, shift, halved, d, m);
    case Number::bf16:
      return fill_offsets<Number::bf16>(row, t, times, shift, halved, d, m);
    case Number::e8m0:
      return fill_times<Number::e8m0, Offsets::common>(row, t.groups, times, shift, t.common, halved, d, m);
    default:
      return fill_times<Number::e4m3, Offsets::common>(row, t.groups, times, shift, t.common, halved, d, m);
  }
}

// The scales of a row's groups -> out [groups rounded up to 8]; also their offsets of a common zero point.
inline void group_scales(const PackedMatrix& w, size_t v, bool halved, float* out, float* offsets) {
  const Tables& t = w.tables;
  const TableRow row = table_row(w, v);
  fill_type({row.scale, nullptr, nullptr}, {nullptr, nullptr, nullptr, t.groups, t.group, t.tall, t.type, 0}, 1, 0,
            halved, out, offsets);
}

// Rows of floats that `fill_tables` needs, each with this many more than the sub-blocks of the padded row.
constexpr size_t kTableRows = 4, kMore = 64;

// One scale and one offset per `sub` columns -> room and room + each: w = (stored code - shift) * scale + offset.
inline void fill_tables(const PackedMatrix& w, size_t v, size_t sub, float shift, bool halved, float* room,
                        size_t each) {
  const Tables& t = w.tables;
  const size_t used = (w.cols + sub - 1) / sub, all = each - kMore;
  const size_t times = t.groups == 1 ? (used + 7) / 8 * 8 : t.group / sub;
  const TableRow row = table_row(w, v);
  float *const d = room, *const m = room + each;
  if (times <= 2 || times == 4 || times % 8 == 0) {
    fill_type(row, t, times, shift, halved, d, m);
  } else {
    float *const s = room + 2 * each, *const o = room + 3 * each;
    fill_type(row, t, 1, shift, halved, s, o);
    for (size_t j = 0, g = 0; j < used; ++g)
      for (size_t i = 0; i < times && j < used; ++i, ++j) d[j] = s[g], m[j] = o[g];
  }
  for (size_t j = used; j < all; ++j) d[j] = m[j] = 0;
}

}  // namespace
}  // namespace polyquant
