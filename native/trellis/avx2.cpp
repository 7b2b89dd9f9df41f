// Trellis-coded matrices with AVX2. Compiled with its own flags.
#if defined(__x86_64__) && defined(__GNUC__)
#include "trellis/dispatch.hpp"
#include "trellis/kernels.hpp"
#include "trellis/rotate.hpp"

namespace polyquant {
namespace {

template <int k, class B>
void levels(const TrellisMatrix& w, const uint8_t* tile, int16_t* panel) {
  const B book(w);
  if (w.order == nullptr) {
    __m256i before[2];
    each<k>(tile, mask_of(w), [&](auto v, __m256i state) PQ_FLAT {
      const __m256i level = book.level(state);
      if constexpr (v % 4 < 2)
        before[v % 4] = level;
      else
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(panel + (v / 4 * 2 + v % 2) * 16),
                            _mm256_blend_epi16(before[v % 2], _mm256_slli_epi32(level, 16), 0xaa));
    });
    return;
  }
  alignas(32) int32_t all[kTile];
  each<k>(tile, mask_of(w), [&](auto v, __m256i state) PQ_FLAT {
    _mm256_store_si256(reinterpret_cast<__m256i*>(all + 8 * v), book.level(state));
  });
  for (size_t j = 0; j < kTile; ++j)
    panel[(w.order[j] / 32 * 16 + w.order[j] % 16) * 2 + w.order[j] / 16 % 2] = int16_t(all[j]);
}

template <int k, class B>
void numbers(const TrellisMatrix& w, const uint8_t* tile, const float* scales, float* out, size_t stride) {
  const B book(w);
  if (w.order == nullptr) {
    const __m256 factors[2] = {_mm256_loadu_ps(scales), _mm256_loadu_ps(scales + 8)};
    return each<k>(tile, mask_of(w), [&](auto v, __m256i state) PQ_FLAT {
      _mm256_storeu_ps(out + v / 2 * stride + v % 2 * 8, _mm256_mul_ps(book.number(state), factors[v % 2]));
    });
  }
  alignas(32) float all[kTile];
  each<k>(tile, mask_of(w), [&](auto v, __m256i state) PQ_FLAT { _mm256_store_ps(all + 8 * v, book.number(state)); });
  for (size_t j = 0; j < kTile; ++j) out[w.order[j] / 16 * stride + w.order[j] % 16] = all[j] * scales[w.order[j] % 16];
}

TrellisKernel find(unsigned bits, Book book, bool row_major) {
  return with_book<Mul1, Grid, Mcg, ThreeInst, Table>(book, [&]<class B>() {
    return with_bits(bits, [&]<int k>() {
      return TrellisKernel{row_major ? one<k, B, Rows> : one<k, B, Fragments>, levels<k, B>, numbers<k, B>, 1};
    });
  });
}

template <int N>
PQ_INLINE void floats_tokens(const float* w, size_t inputs, const float* x, size_t padded, float* y, size_t stride) {
  __m256 acc[N][2];
  for (int n = 0; n < N; ++n) acc[n][0] = acc[n][1] = _mm256_setzero_ps();
  for (size_t i = 0; i < inputs; ++i) {
    const __m256 w0 = _mm256_loadu_ps(w + 16 * i), w1 = _mm256_loadu_ps(w + 16 * i + 8);
    for (int n = 0; n < N; ++n) {
      const __m256 a = _mm256_broadcast_ss(x + size_t(n) * padded + i);
      acc[n][0] = _mm256_fmadd_ps(w0, a, acc[n][0]), acc[n][1] = _mm256_fmadd_ps(w1, a, acc[n][1]);
    }
  }
  for (int n = 0; n < N; ++n)
    for (int h = 0; h < 2; ++h) add_floats(y + size_t(n) * stride + 8 * h, acc[n][h]);
}

void times_floats(const float* w, size_t inputs, const float* x, size_t padded, size_t tokens, float* y,
                  size_t stride) {
  size_t t = 0;
  for (; t + 4 <= tokens; t += 4) floats_tokens<4>(w, inputs, x + t * padded, padded, y + t * stride, stride);
  for (; t < tokens; ++t) floats_tokens<1>(w, inputs, x + t * padded, padded, y + t * stride, stride);
}

void transpose(const float* x, float* out) {
  for (size_t i = 0; i < 128; i += 8)
    for (size_t j = 0; j < 128; j += 8) {
      __m256 a[8], b[8];
      for (size_t r = 0; r < 8; ++r) a[r] = _mm256_load_ps(x + (i + r) * kLine + j);
      for (size_t r = 0; r < 8; r += 2)
        b[r] = _mm256_unpacklo_ps(a[r], a[r + 1]), b[r + 1] = _mm256_unpackhi_ps(a[r], a[r + 1]);
      for (size_t r = 0; r < 8; r += 4)
        for (size_t h = 0; h < 2; ++h) {
          a[r + 2 * h] = _mm256_shuffle_ps(b[r + h], b[r + h + 2], 0x44);
          a[r + 2 * h + 1] = _mm256_shuffle_ps(b[r + h], b[r + h + 2], 0xee);
        }
      for (size_t r = 0; r < 4; ++r) {
        _mm256_store_ps(out + (j + r) * kLine + i, _mm256_permute2f128_ps(a[r], a[r + 4], 0x20));
        _mm256_store_ps(out + (j + r + 4) * kLine + i, _mm256_permute2f128_ps(a[r], a[r + 4], 0x31));
      }
    }
}

}  // namespace

const TrellisSet& trellis_avx2() {
  static constexpr TrellisSet set{find, times, times_floats, rotate_down, transpose, finish};
  return set;
}

}  // namespace polyquant
#endif
