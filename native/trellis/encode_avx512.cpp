#if defined(__x86_64__) && defined(__GNUC__)  // compiled with this instruction set: see CMakeLists.txt
#include <immintrin.h>

#include "base/sixteen_lines.hpp"
#include "trellis/walk.hpp"

namespace polyquant {
namespace {

struct ThirtyTwo {
  using Vector = __m512i;
  static constexpr size_t lanes = 32;

  static PQ_INLINE __m512i all(int16_t x) { return _mm512_set1_epi16(x); }
  static PQ_INLINE __m512i load(const void* p) { return _mm512_loadu_si512(p); }
  static PQ_INLINE void store(void* p, __m512i v) { _mm512_storeu_si512(p, v); }
  static PQ_INLINE __m512i minus(__m512i x, __m512i y) { return _mm512_subs_epi16(x, y); }
  static PQ_INLINE __m512i rounded(__m512i x, __m512i y) { return _mm512_mulhrs_epi16(x, y); }
  static PQ_INLINE __m512i least(__m512i x, __m512i y) { return _mm512_min_epu16(x, y); }
  static PQ_INLINE __m512i add(__m512i x, __m512i y) { return _mm512_adds_epu16(x, y); }
  static PQ_INLINE __m512i subtract(__m512i x, __m512i y) { return _mm512_sub_epi16(x, y); }
  static PQ_INLINE unsigned smallest(__m512i v) {
    const __m256i half = _mm256_min_epu16(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    const __m128i m = _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return unsigned(_mm_cvtsi128_si32(_mm_minpos_epu16(m))) & 0xffff;
  }

  // Each vector by remainder, then lanes of 128 bits change places: they hold 8, 4 or 2 numbers of a vector that have
  // one remainder.
  static PQ_INLINE void take_apart(const __m512i (&v)[4], uint16_t* out, size_t plane) {
    __m512i w[4];
    for (int i = 0; i < 4; ++i) w[i] = by_remainder<4>(v[i]);
    put_lanes(w, out, plane);
  }
  static PQ_INLINE void take_apart(const __m512i (&v)[8], uint16_t* out, size_t plane) {
    __m512i w[8], even[4], odd[4];
    for (int i = 0; i < 8; ++i) w[i] = by_remainder<8>(v[i]);
    for (int i = 0; i < 4; ++i) {
      even[i] = _mm512_unpacklo_epi64(w[2 * i], w[2 * i + 1]);
      odd[i] = _mm512_unpackhi_epi64(w[2 * i], w[2 * i + 1]);
    }
    put_lanes(even, out, 2 * plane);
    put_lanes(odd, out + plane, 2 * plane);
  }
  static PQ_INLINE void take_apart(const __m512i (&v)[16], uint16_t* out, size_t plane) {
    __m512i x[4][4];  // [four vectors][remainder mod 4]
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 4; ++j) x[i][j] = by_remainder<16>(v[4 * i + j]);
      in_quads(x[i]);
    }
    for (size_t e = 0; e < 4; ++e) put_lanes({x[0][e], x[1][e], x[2][e], x[3][e]}, out + e * plane, 4 * plane);
  }

 private:
  // Numbers 0, n, 2 n ... first, then 1, n + 1 ...
  template <int n>
  static PQ_INLINE __m512i by_remainder(__m512i v) {
    alignas(64) static constexpr auto kOrder = [] {
      struct {
        int16_t from[32];
      } t{};
      for (int i = 0; i < 32; ++i) t.from[i] = int16_t(i % (32 / n) * n + i / (32 / n));
      return t;
    }();
    return _mm512_permutexvar_epi16(_mm512_load_si512(&kOrder), v);
  }

  // Lane l of the four vectors -> row l.
  static PQ_INLINE void put_lanes(const __m512i (&v)[4], uint16_t* out, size_t step) {
    __m512i x[4] = {v[0], v[1], v[2], v[3]};
    exchange_lanes(x);
    for (size_t l = 0; l < 4; ++l) store(out + l * step, x[l]);
  }
};

}  // namespace

TrellisWalker trellis_walk_avx512(const TrellisSearch& s, size_t* lanes) {
  *lanes = ThirtyTwo::lanes;
  return planes_of<ThirtyTwo>(s);
}

}  // namespace polyquant
#endif
