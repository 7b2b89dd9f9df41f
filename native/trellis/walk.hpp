// The walk through the trellis with the vectors of one instruction set, two tiles at a time so that each level is
// loaded once. Included by the trellis_encode_*.cpp files.
//
// A step computes, for every state, the metric of its group plus the squared distance of its level, and for every 2 **
// bits adjacent states their minimum: the metric of the group they lead to. For few bits, the metrics of groups with
// equal low bits are contiguous (a plane): then the groups of a vector are reached from adjacent ones in each plane,
// and the minimum needs no horizontal operations.
//
// Of numbers of 16 bits, V defines
//
//   Vector, lanes, all, load, store
//   minus, rounded         saturating signed difference, (a b + 2^14) >> 15
//   least, add, subtract   of unsigned numbers: minimum, saturating sum, difference
//   smallest               the minimum of all lanes
//   take_apart             2 ** bits vectors of adjacent values -> the members of each remainder mod 2 ** bits
#pragma once

#include <algorithm>
#include <cstdlib>

#include "base/simd.hpp"
#include "trellis/trellis.hpp"

namespace polyquant {
namespace {

// fits: no difference exceeds 16 bits. Some processors saturate signed numbers only where they multiply.
template <class V, bool fits>
PQ_INLINE typename V::Vector difference(typename V::Vector x, typename V::Vector level) {
  return fits ? V::subtract(x, level) : V::minus(x, level);
}

template <class V>
unsigned least_of(const uint16_t* metric, size_t groups) {
  typename V::Vector low = V::load(metric);
  for (size_t g = V::lanes; g < groups; g += V::lanes) low = V::least(low, V::load(metric + g));
  return V::smallest(low);
}

// From the metrics m of two tiles to the next ones, n, less `base`, which becomes the smallest of these.
template <class V, int bits, bool fits>
void step_planes(const TrellisSearch& s, const int16_t* level, const int16_t (&x)[2], const uint16_t* const (&m)[2],
                 uint16_t* const (&n)[2], unsigned (&base)[2]) {
  using Vector = typename V::Vector;
  constexpr size_t choices = size_t(1) << bits;
  const size_t groups = s.groups(), mask = (groups >> bits) - 1, plane = mask + 1 + kStagger;
  const Vector x0 = V::all(x[0]), x1 = V::all(x[1]), b0 = V::all(int16_t(base[0])), b1 = V::all(int16_t(base[1]));
  Vector low0 = V::all(-1), low1 = low0;
  for (size_t block = 0; block < groups; block += V::lanes * choices) {
    const size_t q = trellis_block(s, V::lanes, block);
    Vector v0[choices], v1[choices];
#pragma GCC unroll 8
    for (size_t i = 0; i < choices; ++i) {
      const size_t r = (q + V::lanes * i) & mask;
      Vector best0 = V::all(-1), best1 = best0;
#pragma GCC unroll 16
      for (size_t b = 0; b < choices; ++b, level += V::lanes) {
        const Vector c = V::load(level);
        const Vector d0 = difference<V, fits>(x0, c), d1 = difference<V, fits>(x1, c);
        best0 = V::least(best0, V::add(V::load(m[0] + b * plane + r), V::rounded(d0, d0)));
        best1 = V::least(best1, V::add(V::load(m[1] + b * plane + r), V::rounded(d1, d1)));
      }
      v0[i] = V::subtract(best0, b0), v1[i] = V::subtract(best1, b1);
      low0 = V::least(low0, v0[i]), low1 = V::least(low1, v1[i]);
    }
    V::take_apart(v0, n[0] + (q >> bits), plane), V::take_apart(v1, n[1] + (q >> bits), plane);
  }
  base[0] = V::smallest(low0), base[1] = V::smallest(low1);
}

template <class V, int bits>
void walk_planes(const TrellisSearch& s, const int16_t* table, const int16_t* x[2], size_t steps,
                 const TrellisTrail trail[2]) {
  unsigned base[2] = {least_of<V>(trail[0].at(0), trail[0].row), least_of<V>(trail[1].at(0), trail[1].row)};
  for (size_t j = 0; j < steps; ++j) {
    const int16_t values[2] = {x[0][j], x[1][j]};
    trail[0].base[j] = uint16_t(base[0]), trail[1].base[j] = uint16_t(base[1]);
    const bool fits = std::max(std::abs(values[0]), std::abs(values[1])) <= s.clear;
    (fits ? step_planes<V, bits, true> : step_planes<V, bits, false>)(s, table, values,
                                                                      {trail[0].at(j), trail[1].at(j)},
                                                                      {trail[0].at(j + 1), trail[1].at(j + 1)}, base);
  }
}

// The walk of two to four bits; null for others, if differences are doubled, and if the groups do not fill the vectors.
template <class V>
TrellisWalker planes_of(const TrellisSearch& s) {
  if (s.groups() >> s.bits < V::lanes) return nullptr;
  if (s.doublings != 0) return nullptr;
  if (s.bits == 2) return walk_planes<V, 2>;
  if (s.bits == 3) return walk_planes<V, 3>;
  if (s.bits == 4) return walk_planes<V, 4>;
  return nullptr;
}

}  // namespace
}  // namespace polyquant
