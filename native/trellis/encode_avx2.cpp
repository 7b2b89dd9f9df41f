#if defined(__x86_64__) && defined(__GNUC__)  // compiled with this instruction set: see CMakeLists.txt
#include <immintrin.h>

#include "trellis/walk.hpp"

namespace polyquant {
namespace {

struct Sixteen {
  using Vector = __m256i;
  static constexpr size_t lanes = 16;

  static PQ_INLINE __m256i all(int16_t x) { return _mm256_set1_epi16(x); }
  static PQ_INLINE __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static PQ_INLINE void store(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
  static PQ_INLINE __m256i minus(__m256i x, __m256i y) { return _mm256_subs_epi16(x, y); }
  static PQ_INLINE __m256i rounded(__m256i x, __m256i y) { return _mm256_mulhrs_epi16(x, y); }
  static PQ_INLINE __m256i least(__m256i x, __m256i y) { return _mm256_min_epu16(x, y); }
  static PQ_INLINE __m256i add(__m256i x, __m256i y) { return _mm256_adds_epu16(x, y); }
  static PQ_INLINE __m256i subtract(__m256i x, __m256i y) { return _mm256_sub_epi16(x, y); }
  static PQ_INLINE unsigned smallest(__m256i v) {
    const __m128i m = _mm_min_epu16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    return unsigned(_mm_cvtsi128_si32(_mm_minpos_epu16(m))) & 0xffff;
  }

  // 4 vectors of 64 adjacent values -> the 16 members of each remainder mod 4
  static PQ_INLINE void take_apart(const __m256i (&v)[4], uint16_t* out, size_t plane) {
    const __m256i by_class = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15, 0, 1, 8, 9, 2, 3,
                                              10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i w[4];
    for (int i = 0; i < 4; ++i) w[i] = _mm256_shuffle_epi8(v[i], by_class);
    const __m256i a = _mm256_unpacklo_epi32(w[0], w[1]), b = _mm256_unpacklo_epi32(w[2], w[3]);
    const __m256i c = _mm256_unpackhi_epi32(w[0], w[1]), d = _mm256_unpackhi_epi32(w[2], w[3]);
    store(out, _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi64(a, b), order));
    store(out + plane, _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi64(a, b), order));
    store(out + 2 * plane, _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi64(c, d), order));
    store(out + 3 * plane, _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi64(c, d), order));
  }

  // 8 vectors of 128 adjacent values -> the 16 members of each remainder mod 8
  static PQ_INLINE void take_apart(const __m256i (&v)[8], uint16_t* out, size_t plane) {
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
        store(out + size_t(2 * p + e) * plane, _mm256_shuffle_epi8(_mm256_permute4x64_epi64(both, 0xd8), zip));
      }
  }
  // 16 vectors of 256 adjacent values -> the 16 members of each remainder mod 16
  static PQ_INLINE void take_apart(const __m256i (&v)[16], uint16_t* out, size_t plane) {
    __m256i of_eight[2][8];
    for (int h = 0; h < 2; ++h) {
      const __m256i* const w = v + 8 * h;
      __m256i a[8], b[8];
      for (int i = 0; i < 4; ++i) {
        a[i] = _mm256_unpacklo_epi16(w[2 * i], w[2 * i + 1]);      // columns 0 ... 3 of each half
        a[i + 4] = _mm256_unpackhi_epi16(w[2 * i], w[2 * i + 1]);  // columns 4 ... 7
      }
      for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);  // two columns of four vectors
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
      }
      for (int i = 0; i < 4; ++i) {  // columns 2 i and 2 i + 1
        const __m256i x = b[i / 2 * 4 + i % 2], y = b[i / 2 * 4 + i % 2 + 2];
        of_eight[h][2 * i] = _mm256_unpacklo_epi64(x, y);
        of_eight[h][2 * i + 1] = _mm256_unpackhi_epi64(x, y);
      }
    }
    for (size_t i = 0; i < 8; ++i) {
      store(out + i * plane, _mm256_permute2x128_si256(of_eight[0][i], of_eight[1][i], 0x20));
      store(out + (i + 8) * plane, _mm256_permute2x128_si256(of_eight[0][i], of_eight[1][i], 0x31));
    }
  }
};

// At least 16 states lead to each group: metrics in order, horizontal minimum.
template <int doublings>
void walk_rows(const TrellisSearch& s, const int16_t* table, const int16_t* x[2], size_t steps,
               const TrellisTrail trail[2]) {
  using V = Sixteen;
  const size_t groups = s.groups(), choices = size_t(1) << s.bits;
  for (int t = 0; t < 2; ++t) {
    unsigned base = least_of<V>(trail[t].at(0), groups);
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
          __m256i d = V::minus(value, V::load(table + state));
          for (int i = 0; i < doublings; ++i) d = _mm256_adds_epi16(d, d);
          best = V::least(best, V::add(V::load(metric + (state & (groups - 1))), V::rounded(d, d)));
        }
        const unsigned found = V::smallest(best) - base;
        next[q] = uint16_t(found);
        low = found < low ? found : low;
      }
      base = low;
    }
  }
}

}  // namespace

TrellisWalker trellis_walk_avx2(const TrellisSearch& s, size_t* lanes) {
  *lanes = Sixteen::lanes;
  if (const TrellisWalker walk = planes_of<Sixteen>(s)) return walk;
  *lanes = 0;
  if (s.bits < 4 || s.groups() < 16) return nullptr;
  switch (s.doublings) {
    case 0:
      return walk_rows<0>;
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
