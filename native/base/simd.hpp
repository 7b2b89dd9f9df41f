// Run-time selection of the instruction set: PQ_SIMD compiles a function once per set and selects one at load time.
// Use it for loops that the compiler vectorizes; write intrinsics only if a measurement justifies them.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(POLYQUANT_NO_CLONES)
#define PQ_SIMD __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define PQ_SIMD
#endif

#define PQ_INLINE inline __attribute__((always_inline))
#define PQ_FLAT __attribute__((always_inline))  // of lambdas

// For loops of at most 16 iterations: GCC would unroll them before vectorization, and then mostly fail to vectorize.
#if defined(__GNUC__) && !defined(__clang__)
#define PQ_LOOP _Pragma("GCC unroll 1")
#else
#define PQ_LOOP
#endif
