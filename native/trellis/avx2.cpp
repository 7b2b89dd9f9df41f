// Trellis-coded matrices with AVX2. Compiled with its own flags.
#if defined(__x86_64__) && defined(__GNUC__)
#include "trellis/dispatch.hpp"
#include "trellis/kernels.hpp"
#include "trellis/rotate.hpp"

namespace polyquant {
namespace {

// The levels of an even and the next odd input as pairs.
PQ_INLINE __m256i paired(__m256i even, __m256i odd) {
  return _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xaa);
}

// In each 128-bit lane, word i of register j and word j of register i change places.
PQ_INLINE void exchange_words(__m256i (&x)[4]) {
  const __m256i a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpackhi_epi32(x[0], x[1]);
  const __m256i c = _mm256_unpacklo_epi32(x[2], x[3]), d = _mm256_unpackhi_epi32(x[2], x[3]);
  x[0] = _mm256_unpacklo_epi64(a, c), x[1] = _mm256_unpackhi_epi64(a, c);
  x[2] = _mm256_unpacklo_epi64(b, d), x[3] = _mm256_unpackhi_epi64(b, d);
}

// The 32-bit words that `of` makes from states of tensor-core fragments, by input: row(input, words of outputs 0 ... 7,
// those of 8 ... 15). Lanes of 128 bits hold one output and four inputs, which are those of every fourth vector.
// together(rows): what becomes of those of four inputs, from the last one, before they are put in order.
template <int k, class Of, class Together, class Row>
PQ_INLINE void fragment_rows(const uint8_t* tile, __m256i mask, const Of& of, const Together& together,
                             const Row& row) {
  const auto quarter = [&]<int n>() PQ_FLAT {
    __m256i low[4], high[4];  // outputs 0 ... 3 and 8 ... 11, the others
    each<k>(
        tile, mask, [&](auto v, __m256i state) PQ_FLAT { (v < 16 ? high : low)[3 - v / 4 % 4] = of(state); },
        std::index_sequence<n, n + 4, n + 8, n + 12, n + 16, n + 20, n + 24, n + 28>{});
    exchange_words(low), exchange_words(high);
    together(low), together(high);
    PQ_UNROLL
    for (int q = 0; q < 4; ++q)
      row(size_t(15 - 2 * n - q % 2 - q / 2 * 8), _mm256_permute2x128_si256(low[q], high[q], 0x31),
          _mm256_permute2x128_si256(low[q], high[q], 0x20));
  };
  quarter.template operator()<0>(), quarter.template operator()<1>();
  quarter.template operator()<2>(), quarter.template operator()<3>();
}

template <int k, class B>
void levels(const TrellisMatrix& w, const uint8_t* tile, int16_t* panel) {
  const B book(w);
  const auto level = [&](__m256i state) PQ_FLAT { return book.level(state); };
  const auto store = [&](size_t input, size_t output, __m256i pairs) PQ_FLAT {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(panel + input / 2 * 32 + output * 2), pairs);
  };
  if (w.order == nullptr) {
    __m256i even[2];
    return each<k>(tile, mask_of(w), [&](auto v, __m256i state) PQ_FLAT {
      if constexpr (v % 4 < 2)
        even[v % 4] = level(state);
      else
        store(size_t(v) / 2, v % 2 * 8, paired(even[v % 2], level(state)));
    });
  }
  const auto pairs = [](__m256i(&x)[4]) PQ_FLAT { x[0] = paired(x[1], x[0]), x[2] = paired(x[3], x[2]); };
  fragment_rows<k>(tile, mask_of(w), level, pairs, [&](size_t input, __m256i a, __m256i b) PQ_FLAT {
    if (input % 2 == 1) store(input, 0, a), store(input, 8, b);
  });
}

template <int k, class B>
void numbers(const TrellisMatrix& w, const uint8_t* tile, const float* scales, float* out, size_t stride) {
  const B book(w);
  const __m256 factors[2] = {_mm256_loadu_ps(scales), _mm256_loadu_ps(scales + 8)};
  const auto store = [&](size_t input, size_t half, __m256 x) PQ_FLAT {
    _mm256_storeu_ps(out + input * stride + 8 * half, _mm256_mul_ps(x, factors[half]));
  };
  if (w.order == nullptr)
    return each<k>(tile, mask_of(w),
                   [&](auto v, __m256i state) PQ_FLAT { store(size_t(v) / 2, v % 2, book.number(state)); });
  fragment_rows<k>(
      tile, mask_of(w), [&](__m256i state) PQ_FLAT { return _mm256_castps_si256(book.number(state)); },
      [](__m256i(&)[4]) {},
      [&](size_t input, __m256i a, __m256i b)
          PQ_FLAT { store(input, 0, _mm256_castsi256_ps(a)), store(input, 1, _mm256_castsi256_ps(b)); });
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
