// The exact operations' kernels for one instruction set: included by exact/plain.cpp, exact/avx2.cpp and
// exact/avx512.cpp, each compiled with its own flags, but all without contraction. Everything is in an unnamed
// namespace: no two sets share a function.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "base/simd.hpp"
#include "exact/set.hpp"

namespace polyquant {
namespace {

// A tile uses all registers for sums, except those of a row of b and one element of a.
#if defined(__AVX512F__)
constexpr size_t kLanes = 8, kRows = 8, kVectors = 3;
#elif defined(__AVX2__)
constexpr size_t kLanes = 4, kRows = 4, kVectors = 3;
#else
constexpr size_t kLanes = 2, kRows = 4, kVectors = 2;
#endif
constexpr size_t kColumns = kLanes * kVectors;

using Doubles = double __attribute__((vector_size(8 * kLanes)));
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Bits = uint64_t __attribute__((vector_size(8 * kLanes)));

PQ_INLINE Doubles take(const double* p) {
  Doubles v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

PQ_INLINE void put(double* p, Doubles v) { std::memcpy(p, &v, sizeof v); }

// a * b + c where a * b is exact: fused or not, the result is the same.
PQ_INLINE Doubles add_exact(Doubles a, Doubles b, Doubles c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_pd(a, b, c);
#else
  return a * b + c;
#endif
}

enum class Tile { start, add, subtract };

template <Tile how>
void tile(const double* a, const double* b, double* c, size_t stride, size_t depth) {
  Doubles sum[kRows][kVectors];
#pragma GCC unroll 8
  for (size_t r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (size_t v = 0; v < kVectors; ++v)
      sum[r][v] = how == Tile::start ? Doubles{} : take(c + r * stride + kLanes * v);
  for (size_t k = 0; k < depth; ++k) {
    Doubles right[kVectors];
#pragma GCC unroll 8
    for (size_t v = 0; v < kVectors; ++v) right[v] = take(b + k * kColumns + kLanes * v);
#pragma GCC unroll 8
    for (size_t r = 0; r < kRows; ++r) {
      const Doubles left = a[k * kRows + r] - Doubles{};
#pragma GCC unroll 8
      for (size_t v = 0; v < kVectors; ++v)
        sum[r][v] = how == Tile::subtract ? sum[r][v] - left * right[v] : add_exact(left, right[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (size_t r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (size_t v = 0; v < kVectors; ++v) put(c + r * stride + kLanes * v, sum[r][v]);
}

PQ_INLINE Doubles widened(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, Doubles);
}

// Exchanges the lanes with bit d of `a` for those without it of `b`.
template <size_t d, size_t... lane>
PQ_INLINE void exchange(Doubles& a, Doubles& b, std::index_sequence<lane...>) {
  const Doubles low = __builtin_shufflevector(a, b, (lane & d ? kLanes + lane - d : lane)...);
  b = __builtin_shufflevector(a, b, (lane & d ? kLanes + lane : lane + d)...);
  a = low;
}

template <size_t d>
PQ_INLINE void transpose(Doubles* rows) {
#pragma GCC unroll 8
  for (size_t i = 0; i < kLanes; ++i)
    if (!(i & d)) exchange<d>(rows[i], rows[i + d], std::make_index_sequence<kLanes>{});
  if constexpr (d > 1) transpose<d / 2>(rows);
}

template <size_t width>
void pack_panel(const float* from, ptrdiff_t across, ptrdiff_t along, size_t count, size_t depth, double* to) {
  size_t k = 0;
  if (count == width && across == 1) {
    for (; k < depth; ++k)
      for (size_t i = 0; i < width; i += kLanes) put(to + k * width + i, widened(from + ptrdiff_t(k) * along + i));
  } else if (count == width && along == 1) {
    for (; k + kLanes <= depth; k += kLanes)
      for (size_t i = 0; i < width; i += kLanes) {
        Doubles rows[kLanes];
#pragma GCC unroll 8
        for (size_t j = 0; j < kLanes; ++j) rows[j] = widened(from + ptrdiff_t(i + j) * across + k);
        transpose<kLanes / 2>(rows);
#pragma GCC unroll 8
        for (size_t j = 0; j < kLanes; ++j) put(to + (k + j) * width + i, rows[j]);
      }
  }
  for (; k < depth; ++k)
    for (size_t i = 0; i < width; ++i)
      to[k * width + i] = i < count ? double(from[ptrdiff_t(i) * across + ptrdiff_t(k) * along]) : 0.0;
}

void pack(const float* from, ptrdiff_t across, ptrdiff_t along, size_t count, size_t depth, size_t width, double* to) {
  (width == kRows ? pack_panel<kRows> : pack_panel<kColumns>)(from, across, along, count, depth, to);
}

void narrow(const double* c, size_t stride, float* out, size_t out_stride, size_t high, size_t wide) {
  for (size_t r = 0; r < high; ++r)
    for (size_t i = 0; i < wide; ++i) out[r * out_stride + i] = float(c[r * stride + i]);
}

void solve(const double* l, size_t stride, size_t size, double* x) {
  for (size_t c = 0; c < size; ++c) {
    Doubles own[kVectors];
#pragma GCC unroll 8
    for (size_t v = 0; v < kVectors; ++v) own[v] = take(x + c * kColumns + kLanes * v);
    for (size_t k = 0; k < c; ++k)
#pragma GCC unroll 8
      for (size_t v = 0; v < kVectors; ++v) own[v] -= take(x + k * kColumns + kLanes * v) * l[c * stride + k];
#pragma GCC unroll 8
    for (size_t v = 0; v < kVectors; ++v) put(x + c * kColumns + kLanes * v, own[v] / l[c * stride + c]);
  }
}

// e^x = 2^n e^r, x = n ln 2 + r, and the series of e^r. 2^n is two factors, since n may be beyond the exponents of
// normal doubles.
PQ_INLINE Doubles exponential_of(Doubles x) {
  const Doubles magic = 0x1.8p52 - Doubles{};  // the sum's lowest bits are the nearest integer
  const Doubles n = (x * 0x1.71547652b82fep+0 + magic) - magic;
  const Doubles r = (x - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
  Doubles p = 1.0 / 6227020800.0 - Doubles{};
  constexpr double terms[] = {
      1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
      1.0 / 120,       1.0 / 24,       1.0 / 6,       0.5,          1.0,         1.0};
  for (const double term : terms) p = p * r + term;
  const Doubles first = n * 0.5 + magic, second = (n - (first - magic)) + magic;
  const auto power = [](Doubles whole) {
    return std::bit_cast<Doubles>((std::bit_cast<Bits>(whole) << 52) + (uint64_t(1023) << 52));
  };
  const Doubles y = p * power(first) * power(second);
  const Doubles low = x < -746.0 ? Doubles{} : y;
  return x > 710.0 ? INFINITY - Doubles{} : low;
}

void exponential(const double* x, double* out, size_t n) {
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) put(out + i, exponential_of(take(x + i)));
  if (i == n) return;
  double rest[kLanes] = {};
  std::memcpy(rest, x + i, (n - i) * sizeof(double));
  put(rest, exponential_of(take(rest)));
  std::memcpy(out + i, rest, (n - i) * sizeof(double));
}

// out = float(e^(x - base)); returns its values as doubles.
PQ_INLINE Doubles floats_exponential(const float* x, float base, float* out) {
  Floats v;
  std::memcpy(&v, x, sizeof v);
  const Floats e =
      __builtin_convertvector(exponential_of(__builtin_convertvector(v - (base - Floats{}), Doubles)), Floats);
  std::memcpy(out, &e, sizeof e);
  return __builtin_convertvector(e, Doubles);
}

void float_exponential(const float* x, float* out, size_t n) {
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) floats_exponential(x + i, 0.0f, out + i);
  if (i == n) return;
  float rest[kLanes] = {};
  std::memcpy(rest, x + i, (n - i) * sizeof(float));
  floats_exponential(rest, 0.0f, rest);
  std::memcpy(out + i, rest, (n - i) * sizeof(float));
}

void softmax(float* scores, size_t columns, size_t low, size_t high, float scale, const float* sink) {
  constexpr size_t group = 8;  // sums of columns i, i + 8, i + 16, ...
  const size_t first = low / group * group, last = (high + group - 1) / group * group;
  float top = sink ? *sink : -INFINITY;
  for (size_t i = low; i < high; ++i) {
    scores[i] *= scale;
    top = scores[i] > top ? scores[i] : top;
  }
  std::fill(scores, scores + low, -INFINITY);
  std::fill(scores + high, scores + columns, -INFINITY);
  Doubles sums[group / kLanes] = {};
  for (size_t i = first; i < last; i += group) {
    float rest[group], *own = scores + i;
    if (i + group > columns) {
      std::fill(rest, rest + group, -INFINITY);
      std::copy(own, scores + columns, rest);
      own = rest;
    }
    for (size_t j = 0; j < group / kLanes; ++j) sums[j] += floats_exponential(own + j * kLanes, top, own + j * kLanes);
    if (own == rest) std::copy(rest, rest + (columns - i), scores + i);
  }
  std::fill(scores, scores + first, 0.0f);
  if (last < columns) std::fill(scores + last, scores + columns, 0.0f);
  double lanes[group];
  std::memcpy(lanes, sums, sizeof lanes);
  for (size_t width = group / 2; width > 0; width /= 2)
    for (size_t j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  if (sink) {
    float own[kLanes] = {*sink};
    lanes[0] += floats_exponential(own, top, own)[0];
  }
  const float total = float(lanes[0]);
  for (size_t i = low; i < high; ++i) scores[i] /= total;
}

constexpr ExactSet kSet{
    kRows,       kColumns,          pack,   tile<Tile::add>, tile<Tile::start>, tile<Tile::subtract>, narrow, solve,
    exponential, float_exponential, softmax};

}  // namespace
}  // namespace polyquant
