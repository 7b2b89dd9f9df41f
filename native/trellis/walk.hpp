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
//   minus, plus, rounded   saturating signed sums, (a b + 2^14) >> 15
//   least, add, subtract   of unsigned numbers: minimum, saturating sum, difference
//   smallest               the minimum of all lanes
//   take_apart             2 ** bits vectors of adjacent values -> the members of each remainder mod 2 ** bits
#pragma once

#include "base/simd.hpp"
#include "trellis/trellis.hpp"

namespace polyquant {
namespace {

template <class V, int doublings>
PQ_INLINE typename V::Vector square(typename V::Vector x, typename V::Vector level) {
  typename V::Vector d = V::minus(x, level);
  for (int i = 0; i < doublings; ++i) d = V::plus(d, d);
  return V::rounded(d, d);
}

template <class V>
unsigned least_of(const uint16_t* metric, size_t groups) {
  typename V::Vector low = V::load(metric);
  for (size_t g = V::lanes; g < groups; g += V::lanes) low = V::least(low, V::load(metric + g));
  return V::smallest(low);
}

template <class V, int bits, int doublings>
void walk_planes(const TrellisSearch& s, const int16_t* table, const int16_t* x[2], size_t steps,
                 const TrellisTrail trail[2]) {
  using Vector = typename V::Vector;
  constexpr size_t choices = size_t(1) << bits;
  const size_t groups = s.groups(), mask = (groups >> bits) - 1, plane = mask + 1 + kStagger;
  unsigned base[2] = {least_of<V>(trail[0].at(0), plane << bits), least_of<V>(trail[1].at(0), plane << bits)};
  for (size_t j = 0; j < steps; ++j) {
    const uint16_t *m0 = trail[0].at(j), *m1 = trail[1].at(j);
    uint16_t *n0 = trail[0].at(j + 1), *n1 = trail[1].at(j + 1);
    trail[0].base[j] = uint16_t(base[0]), trail[1].base[j] = uint16_t(base[1]);
    const Vector x0 = V::all(x[0][j]), x1 = V::all(x[1][j]);
    const Vector b0 = V::all(int16_t(base[0])), b1 = V::all(int16_t(base[1]));
    Vector low0 = V::all(-1), low1 = low0;
    const int16_t* level = table;
    for (size_t n = 0; n < groups; n += V::lanes * choices) {
      const size_t q = trellis_block(s, V::lanes, n);
      Vector v0[choices], v1[choices];
#pragma GCC unroll 8
      for (size_t i = 0; i < choices; ++i) {
        const size_t r = (q + V::lanes * i) & mask;
        Vector best0 = V::all(-1), best1 = best0;
#pragma GCC unroll 16
        for (size_t b = 0; b < choices; ++b, level += V::lanes) {
          const Vector c = V::load(level);
          best0 = V::least(best0, V::add(V::load(m0 + b * plane + r), square<V, doublings>(x0, c)));
          best1 = V::least(best1, V::add(V::load(m1 + b * plane + r), square<V, doublings>(x1, c)));
        }
        v0[i] = V::subtract(best0, b0), v1[i] = V::subtract(best1, b1);
        low0 = V::least(low0, v0[i]), low1 = V::least(low1, v1[i]);
      }
      V::take_apart(v0, n0 + (q >> bits), plane), V::take_apart(v1, n1 + (q >> bits), plane);
    }
    base[0] = V::smallest(low0), base[1] = V::smallest(low1);
  }
}

// The walk of two to four bits; null for others, and if the groups do not fill the vectors.
template <class V>
TrellisWalker planes_of(const TrellisSearch& s) {
  if (s.groups() >> s.bits < V::lanes) return nullptr;
  if (s.bits == 2 && s.doublings == 0) return walk_planes<V, 2, 0>;
  if (s.bits == 3 && s.doublings == 0) return walk_planes<V, 3, 0>;
  if (s.bits == 4 && s.doublings == 1) return walk_planes<V, 4, 1>;
  return nullptr;
}

}  // namespace
}  // namespace polyquant
