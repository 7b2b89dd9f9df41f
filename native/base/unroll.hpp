// PQ_UNROLL: before a loop of at most 16 iterations whose arrays are to stay in registers.
#pragma once

#if defined(__clang__)
#define PQ_UNROLL _Pragma("unroll")
#else
#define PQ_UNROLL _Pragma("GCC unroll 16")
#endif
