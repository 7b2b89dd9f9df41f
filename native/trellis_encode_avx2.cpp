#if defined(__x86_64__) && defined(__GNUC__)
// The walk through the trellis for AVX2, two tiles at a time so that each level is loaded once. Compiled with its own
// flags.
//
// A step computes, for every state, the metric of its group plus the squared distance of its level, and for every 2 **
// bits
// adjacent states their minimum: the metric of the group they lead to. For few bits, the metrics of groups with equal
// low bits
// are contiguous (a plane): then 16 groups of a vector are reached from 16 adjacent ones in each plane, and the minimum
// needs
// no horizontal operations.
#include <immintrin.h>

#include "simd.hpp"
#include "trellis.hpp"

namespace polyquant {
namespace {

PQ_INLINE __m256i load16(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
PQ_INLINE void store16(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

template <int doublings>
PQ_INLINE __m256i square(__m256i x, __m256i level) {
  __m256i d = _mm256_subs_epi16(x, level);
  for (int i = 0; i < doublings; ++i) d = _mm256_adds_epi16(d, d);
  return _mm256_mulhrs_epi16(d, d);
}

PQ_INLINE unsigned least(__m256i v) {
  const __m128i m = _mm_min_epu16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  return unsigned(_mm_cvtsi128_si32(_mm_minpos_epu16(m))) & 0xffff;
}

unsigned least_of(const uint16_t* metric, size_t groups) {
  __m256i low = load16(metric);
  for (size_t g = 16; g < groups; g += 16) low = _mm256_min_epu16(low, load16(metric + g));
  return least(low);
}

// 4 vectors of 64 adjacent values -> the 16 members of each remainder mod 4
PQ_INLINE void take_apart4(const __m256i* v, uint16_t* out, size_t plane) {
  const __m256i by_class = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15, 0, 1, 8, 9, 2, 3, 10,
                                            11, 4, 5, 12, 13, 6, 7, 14, 15);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  __m256i w[4];
  for (int i = 0; i < 4; ++i) w[i] = _mm256_shuffle_epi8(v[i], by_class);
  const __m256i a = _mm256_unpacklo_epi32(w[0], w[1]), b = _mm256_unpacklo_epi32(w[2], w[3]);
  const __m256i c = _mm256_unpackhi_epi32(w[0], w[1]), d = _mm256_unpackhi_epi32(w[2], w[3]);
  store16(out, _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi64(a, b), order));
  store16(out + plane, _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi64(a, b), order));
  store16(out + 2 * plane, _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi64(c, d), order));
  store16(out + 3 * plane, _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi64(c, d), order));
}

// 8 vectors of 128 adjacent values -> the 16 members of each remainder mod 8
PQ_INLINE void take_apart8(const __m256i* v, uint16_t* out, size_t plane) {
  const __m256i zip = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15, 0, 1, 8, 9, 2, 3, 10, 11,
                                       4, 5, 12, 13, 6, 7, 14, 15);
  __m256i a[8], b[8];
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm256_unpacklo_epi16(v[2 * i], v[2 * i + 1]);      // classes 0 ... 3
    a[i + 4] = _mm256_unpackhi_epi16(v[2 * i], v[2 * i + 1]);  // classes 4 ... 7
  }
  for (int h = 0; h < 2; ++h)
    for (int i = 0; i < 2; ++i) {
      b[4 * h + i] = _mm256_unpacklo_epi32(a[4 * h + 2 * i], a[4 * h + 2 * i + 1]);  // the first two classes of four
      b[4 * h + i + 2] = _mm256_unpackhi_epi32(a[4 * h + 2 * i], a[4 * h + 2 * i + 1]);  // the other two
    }
  for (int p = 0; p < 4; ++p)
    for (int e = 0; e < 2; ++e) {
      const __m256i both =
          e ? _mm256_unpackhi_epi64(b[2 * p], b[2 * p + 1]) : _mm256_unpacklo_epi64(b[2 * p], b[2 * p + 1]);
      store16(out + size_t(2 * p + e) * plane, _mm256_shuffle_epi8(_mm256_permute4x64_epi64(both, 0xd8), zip));
    }
}

template <int bits, int doublings>
void walk_planes(const TrellisSearch& s, const int16_t* table, const int16_t* x[2], size_t steps,
                 const TrellisTrail trail[2]) {
  constexpr size_t choices = size_t(1) << bits;
  const size_t groups = s.groups(), mask = (groups >> bits) - 1, plane = mask + 1 + kStagger;
  unsigned base[2] = {least_of(trail[0].at(0), plane << bits), least_of(trail[1].at(0), plane << bits)};
  for (size_t j = 0; j < steps; ++j) {
    const uint16_t *m0 = trail[0].at(j), *m1 = trail[1].at(j);
    uint16_t *n0 = trail[0].at(j + 1), *n1 = trail[1].at(j + 1);
    trail[0].base[j] = uint16_t(base[0]), trail[1].base[j] = uint16_t(base[1]);
    const __m256i x0 = _mm256_set1_epi16(x[0][j]), x1 = _mm256_set1_epi16(x[1][j]);
    const __m256i b0 = _mm256_set1_epi16(short(base[0])), b1 = _mm256_set1_epi16(short(base[1]));
    __m256i low0 = _mm256_set1_epi16(-1), low1 = low0;
    const int16_t* level = table;
    for (size_t n = 0; n < groups; n += 16 * choices) {
      const size_t q = trellis_block(s, n);
      __m256i v0[choices], v1[choices];
#pragma GCC unroll 8
      for (size_t i = 0; i < choices; ++i) {
        const size_t r = (q + 16 * i) & mask;
        __m256i best0 = _mm256_set1_epi16(-1), best1 = best0;
#pragma GCC unroll 8
        for (size_t b = 0; b < choices; ++b, level += 16) {
          const __m256i c = load16(level);
          best0 = _mm256_min_epu16(best0, _mm256_adds_epu16(load16(m0 + b * plane + r), square<doublings>(x0, c)));
          best1 = _mm256_min_epu16(best1, _mm256_adds_epu16(load16(m1 + b * plane + r), square<doublings>(x1, c)));
        }
        v0[i] = _mm256_sub_epi16(best0, b0), v1[i] = _mm256_sub_epi16(best1, b1);
        low0 = _mm256_min_epu16(low0, v0[i]), low1 = _mm256_min_epu16(low1, v1[i]);
      }
      if constexpr (bits == 2)
        take_apart4(v0, n0 + (q >> bits), plane), take_apart4(v1, n1 + (q >> bits), plane);
      else
        take_apart8(v0, n0 + (q >> bits), plane), take_apart8(v1, n1 + (q >> bits), plane);
    }
    base[0] = least(low0), base[1] = least(low1);
  }
}

// At least 16 states lead to each group: metrics in order, horizontal minimum.
template <int doublings>
void walk_rows(const TrellisSearch& s, const int16_t* table, const int16_t* x[2], size_t steps,
               const TrellisTrail trail[2]) {
  const size_t groups = s.groups(), choices = size_t(1) << s.bits;
  for (int t = 0; t < 2; ++t) {
    unsigned base = least_of(trail[t].at(0), groups);
    for (size_t j = 0; j < steps; ++j) {
      const uint16_t* metric = trail[t].at(j);
      uint16_t* next = trail[t].at(j + 1);
      trail[t].base[j] = uint16_t(base);
      const __m256i value = _mm256_set1_epi16(x[t][j]);
      unsigned low = 65535;
      for (size_t q = 0; q < groups; ++q) {
        __m256i best = _mm256_set1_epi16(-1);
        for (size_t b = 0; b < choices; b += 16) {
          const size_t state = q * choices + b;
          const __m256i e = square<doublings>(value, load16(table + state));
          best = _mm256_min_epu16(best, _mm256_adds_epu16(load16(metric + (state & (groups - 1))), e));
        }
        const unsigned found = least(best) - base;
        next[q] = uint16_t(found);
        low = found < low ? found : low;
      }
      base = low;
    }
  }
}

}  // namespace

TrellisWalker trellis_walk_avx2(const TrellisSearch& s, bool* planes) {
  *planes = s.bits == 2 || s.bits == 3;
  if (*planes && s.window >= 2 * s.bits + 4 && s.doublings == 0)
    return s.bits == 2 ? walk_planes<2, 0> : walk_planes<3, 0>;
  *planes = false;
  if (s.bits < 4 || s.groups() < 16) return nullptr;
  switch (s.doublings) {
    case 1:
      return walk_rows<1>;
    case 2:
      return walk_rows<2>;
    case 3:
      return walk_rows<3>;
    case 4:
      return walk_rows<4>;
    case 5:
      return walk_rows<5>;
    default:
      return nullptr;
  }
}

}  // namespace polyquant
#endif
