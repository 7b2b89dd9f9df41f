// Sums of four products of bytes, or of two of 16-bit integers, per 32-bit lane: with the instruction set of the file
// that includes this.
#pragma once

#include <immintrin.h>

#include "base/simd.hpp"

namespace polyquant {
namespace {

// dot4(acc, u, s): acc plus unsigned bytes u times signed bytes s. Unless kDotsBytes, a pair of products must fit 16
// bits. dot2(acc, a, b): acc plus 16-bit products.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
constexpr bool kDotsBytes = true;
PQ_INLINE __m256i dot4(__m256i acc, __m256i u, __m256i s) { return _mm256_dpbusd_epi32(acc, u, s); }
PQ_INLINE __m256i dot2(__m256i acc, __m256i a, __m256i b) { return _mm256_dpwssd_epi32(acc, a, b); }
#elif defined(PQ_AVX_VNNI)
// Written as assembly: the same instructions of AVX-512 VNNI stand in for these where a processor lacks AVX-VNNI.
#if defined(POLYQUANT_EMULATE_AVX_VNNI)
#define PQ_ENCODING "%{evex%} "
#else
#define PQ_ENCODING "%{vex%} "
#endif
constexpr bool kDotsBytes = true;
PQ_INLINE __m256i dot4(__m256i acc, __m256i u, __m256i s) {
  asm(PQ_ENCODING "vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(u), "x"(s));
  return acc;
}
PQ_INLINE __m256i dot2(__m256i acc, __m256i a, __m256i b) {
  asm(PQ_ENCODING "vpdpwssd %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
  return acc;
}
#undef PQ_ENCODING
#else
constexpr bool kDotsBytes = false;
PQ_INLINE __m256i dot2(__m256i acc, __m256i a, __m256i b) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)); }
PQ_INLINE __m256i dot4(__m256i acc, __m256i u, __m256i s) {
  return dot2(acc, _mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1));
}
#endif

}  // namespace
}  // namespace polyquant
