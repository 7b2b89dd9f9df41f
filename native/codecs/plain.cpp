// Conversions between float32 and the 16-bit floats. The reference is src/polyquant/codecs/plain.py.
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

#include "base/half.hpp"
#include "codecs/blocks.hpp"

namespace polyquant {
namespace {

void copy_out(const uint8_t* src, float* dst, size_t n) {
  if (n) std::memcpy(dst, src, 4 * n);  // memcpy takes no null pointers
}

void copy_in(const float* src, uint8_t* dst, size_t rows, size_t cols, const float*) {
  std::memcpy(dst, src, 4 * rows * cols);
}

PQ_SIMD void dequantize_f16_portable(const uint8_t* src, float* dst, size_t n) {
  for (size_t i = 0; i < n; ++i) dst[i] = half_to_float(load<uint16_t>(src + 2 * i));
}

#if defined(__x86_64__) && defined(__GNUC__)
// The processor's own conversion is also exact and runs at memory speed; it quiets signalling NaNs, which weights do
// not
// contain. Arrays larger than the cache are written with streaming stores: overwritten lines need not be fetched first.
constexpr size_t beyond_cache = size_t(1) << 23;

__attribute__((target("avx,f16c"))) void dequantize_f16_f16c(const uint8_t* src, float* dst, size_t n) {
  const auto eight = [src](size_t i) __attribute__((target("avx,f16c"))) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + 2 * i)));
  };
  size_t i = 0;
  if (n >= beyond_cache) {
    for (; reinterpret_cast<uintptr_t>(dst + i) % 32; ++i) dst[i] = half_to_float(load<uint16_t>(src + 2 * i));
    for (; i + 8 <= n; i += 8) _mm256_stream_ps(dst + i, eight(i));
    _mm_sfence();
  }
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, eight(i));
  for (; i < n; ++i) dst[i] = half_to_float(load<uint16_t>(src + 2 * i));
}

void dequantize_f16(const uint8_t* src, float* dst, size_t n) {
  // Any processor with AVX2 has F16C, which clang 14 cannot query.
  static const bool fast = __builtin_cpu_supports("avx2");
  fast ? dequantize_f16_f16c(src, dst, n) : dequantize_f16_portable(src, dst, n);
}
#else
void dequantize_f16(const uint8_t* src, float* dst, size_t n) { dequantize_f16_portable(src, dst, n); }
#endif

PQ_SIMD void quantize_f16(const float* src, uint8_t* dst, size_t rows, size_t cols, const float*) {
  const size_t n = rows * cols;
  for (size_t i = 0; i < n; ++i) store(dst + 2 * i, float_to_half(src[i]));
}

PQ_SIMD void dequantize_bf16(const uint8_t* src, float* dst, size_t n) {
  for (size_t i = 0; i < n; ++i) dst[i] = bfloat_to_float(load<uint16_t>(src + 2 * i));
}

PQ_SIMD void quantize_bf16(const float* src, uint8_t* dst, size_t rows, size_t cols, const float*) {
  const size_t n = rows * cols;
  for (size_t i = 0; i < n; ++i) store(dst + 2 * i, float_to_bfloat(src[i]));
}

constexpr BlockKernel table[] = {
    {"f32", 1, 4, copy_out, copy_in},
    {"f16", 1, 2, dequantize_f16, quantize_f16},
    {"bf16", 1, 2, dequantize_bf16, quantize_bf16},
};

}  // namespace

KernelTable plain_kernels() { return table; }

}  // namespace polyquant
