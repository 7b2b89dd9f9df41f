// The inner loops of the decoder's kernels, per instruction set.
#pragma once

#include "decoder/decoder.hpp"

namespace polyquant {

constexpr size_t blocks_together = 4;  // blocks whose scores are processed at once

// `count` queries from `token` on, of one kv head, over the blocks [begin, end).
struct Piece {
  size_t group, token, count, begin, end;
};

// Per row: the largest score, the sum of weights, and the weighted sum of values [size].
struct Sums {
  float *largest, *total, *out;
};

struct DecoderSet {
  void (*norm_row)(const float* x, const float* weight, float* out, size_t n, double eps);
  void (*rotate_halves)(const float* x, const float* cos, const float* sin, float* out, size_t pairs);
  void (*rotate_pairs)(const float* x, const float* cos, const float* sin, float* out, size_t pairs);
  void (*layer_norm_row)(const float* x, const float* weight, const float* bias, float* out, size_t n, double eps);
  void (*gates[activations])(const float* gate, const float* up, float* out, size_t n);  // in the order of Activation
  void (*xielu)(const float* x, float* out, size_t n, const Xielu& how);
  // scratch: rows [R, size], scores [R, 32 * blocks_together], a block of keys or values
  void (*attend_piece)(const Cache&, const Tokens&, const Piece&, float* scratch, const Sums&);
};

const DecoderSet& decoder_plain();
#if defined(__x86_64__) && defined(__GNUC__)
const DecoderSet& decoder_avx2();
const DecoderSet& decoder_avx512();
#endif

// The best set that this processor supports.
const DecoderSet& decoder_set();

}  // namespace polyquant
