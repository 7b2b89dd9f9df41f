// Row loops of a decoder layer's norms, rotary positions and gates. Attention is in decoder/attention.cpp.
#include "decoder/decoder.hpp"

#include <algorithm>
#include <cmath>

#include "base/simd.hpp"
#include "base/threads.hpp"
#include "decoder/set.hpp"

namespace polyquant {
namespace {

constexpr size_t piece = size_t(1) << 15;  // minimum number of floats to wake a thread for

PQ_SIMD void row_on_grid(const float* x, const float* step, const float* offset, float* out, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    float q = std::rint(x[i] / step[i] + offset[i]);
    q = q < -128.0f ? -128.0f : q;
    q = q > 127.0f ? 127.0f : q;
    out[i] = (q - offset[i]) * step[i];
  }
}

}  // namespace

const DecoderSet& decoder_set() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const DecoderSet& best = []() -> const DecoderSet& {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
      return decoder_avx512();
    // Any processor with AVX2 has F16C, which clang 14 cannot query.
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return decoder_avx2();
    return decoder_plain();
  }();
  return best;
#else
  return decoder_plain();
#endif
}

void rms_norm(const float* x, size_t stride, const float* weight, float* out, size_t rows, size_t n, double eps) {
  const size_t step = std::max<size_t>(1, piece / std::max<size_t>(1, n));
  parallel_for((rows + step - 1) / step, [=](size_t chunk) {
    for (size_t r = chunk * step; r < std::min(rows, (chunk + 1) * step); ++r)
      decoder_set().norm_row(x + r * stride, weight, out + r * n, n, eps);
  });
}

void layer_norm(const float* x, size_t stride, const float* weight, const float* bias, float* out, size_t rows,
                size_t n, double eps) {
  const size_t step = std::max<size_t>(1, piece / std::max<size_t>(1, n));
  parallel_for((rows + step - 1) / step, [=](size_t chunk) {
    for (size_t r = chunk * step; r < std::min(rows, (chunk + 1) * step); ++r)
      decoder_set().layer_norm_row(x + r * stride, weight, bias, out + r * n, n, eps);
  });
}

void rotate(const float* x, const float* cos, const float* sin, float* out, const Rotation& rotation) {
  const auto head = rotation.interleaved ? decoder_set().rotate_pairs : decoder_set().rotate_halves;
  const size_t width = rotation.heads * rotation.size, step = std::max<size_t>(1, piece / std::max<size_t>(1, width));
  parallel_for((rotation.tokens + step - 1) / step, [=, &rotation](size_t chunk) {
    for (size_t t = chunk * step; t < std::min(rotation.tokens, (chunk + 1) * step); ++t)
      for (size_t h = 0; h < rotation.heads; ++h) {
        const float* from = x + t * rotation.stride + h * rotation.size;
        float* to = out + t * width + h * rotation.size;
        head(from, cos + t * rotation.pairs, sin + t * rotation.pairs, to, rotation.pairs);
        std::copy(from + 2 * rotation.pairs, from + rotation.size, to + 2 * rotation.pairs);
      }
  });
}

void gate(Activation which, const float* gates, const float* up, float* out, size_t n) {
  const auto kernel = decoder_set().gates[size_t(which)];
  parallel_for((n + piece - 1) / piece, [=](size_t chunk) {
    const size_t at = chunk * piece;
    kernel(gates + at, up ? up + at : nullptr, out + at, std::min(piece, n - at));
  });
}

void xielu(const float* x, float* out, size_t n, const Xielu& how) {
  parallel_for((n + piece - 1) / piece, [=, &how](size_t chunk) {
    const size_t at = chunk * piece;
    decoder_set().xielu(x + at, out + at, std::min(piece, n - at), how);
  });
}

void on_grid(const float* x, size_t stride, const float* step, const float* offset, float* out, size_t rows, size_t n) {
  for (size_t r = 0; r < rows; ++r) row_on_grid(x + r * stride, step, offset, out + r * n, n);
}

void add(const float* x, size_t x_stride, const float* y, size_t y_stride, float* out, size_t out_stride, size_t rows,
         size_t n, float scale) {
  const size_t step = std::max<size_t>(1, piece / std::max<size_t>(1, n));
  parallel_for((rows + step - 1) / step, [=](size_t chunk) {
    for (size_t r = chunk * step; r < std::min(rows, (chunk + 1) * step); ++r) {
      const float *a = x + r * x_stride, *b = y + r * y_stride;
      float* to = out + r * out_stride;
      for (size_t i = 0; i < n; ++i) to[i] = a[i] + b[i] * scale;
    }
  });
}

}  // namespace polyquant
