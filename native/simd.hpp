// Run-time choice of instruction set: PQ_SIMD compiles a function once per set and picks at load time.
// Use it on loops that the compiler vectorizes; write intrinsics only where a measurement says so.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(POLYQUANT_NO_CLONES)
#define PQ_SIMD __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define PQ_SIMD
#endif

#define PQ_INLINE inline __attribute__((always_inline))

// Before a loop of 16 turns or fewer: GCC would unroll it before the vectorizer sees it, and then mostly fail to find the vectors again.
#if defined(__GNUC__) && !defined(__clang__)
#define PQ_LOOP _Pragma("GCC unroll 1")
#else
#define PQ_LOOP
#endif
