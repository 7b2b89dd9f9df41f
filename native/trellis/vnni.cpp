// Trellis-coded matrices with AVX-512 VNNI and VBMI: sixteen values of the stream at a time. Compiled with its own
// flags. The sums are those of trellis/avx2.cpp, bit for bit; functions that are not here are taken from there.
#if defined(__x86_64__) && defined(__GNUC__)
#include "base/sixteen_lines.hpp"
#include "trellis/dispatch.hpp"
#include "trellis/kernels_512.hpp"
#include "trellis/rotate.hpp"

namespace polyquant {
namespace {

template <int k>
void few(const TrellisMatrix& w, size_t first, size_t last, const TrellisInput& in, float* y, size_t stride) {
  if (in.tokens == 1) return tokens_times<k, 1, Mul1, Rows<1>>(w, first, last, in, y, stride);
  if (in.tokens == 2) return tokens_times<k, 2, Mul1, Rows<2>>(w, first, last, in, y, stride);
  tokens_times<k, 4, Mul1, Rows<4>>(w, first, last, in, y, stride);
}

PQ_INLINE __m512i mask_of(const TrellisMatrix& w) { return _mm512_set1_epi32((1 << w.window) - 1); }

// The levels of an even and the next odd input as pairs.
PQ_INLINE __m512i paired(__m512i even, __m512i odd) {
  return _mm512_mask_mov_epi16(even, 0xaaaaaaaa, _mm512_slli_epi32(odd, 16));
}

// The 32-bit words that `of` makes from states of tensor-core fragments, by input: row(input, words of 16 outputs).
// Lanes of 128 bits hold one output and four inputs: the even vectors and the odd ones have eight inputs each.
// together(rows): what becomes of those of four inputs, from the last one, before they are put in order.
template <int k, class Of, class Together, class Row>
PQ_INLINE void fragment_rows(const uint8_t* tile, __m512i mask, const Of& of, const Together& together,
                             const Row& row) {
  const auto half = [&]<int odd>() PQ_FLAT {
    __m512i low[4], high[4];  // outputs 0 ... 3 and 8 ... 11, the others
    each<k>(
        tile, mask, [&](auto v, __m512i state) PQ_FLAT { (v < 8 ? high : low)[3 - v / 2 % 4] = of(state); },
        std::index_sequence<odd, odd + 2, odd + 4, odd + 6, odd + 8, odd + 10, odd + 12, odd + 14>{});
    in_quads(low), in_quads(high);
    together(low), together(high);
    PQ_UNROLL
    for (int q = 0; q < 4; ++q) {
      const size_t input = size_t(15 - 4 * odd - q % 2 - q / 2 * 8);
      row(input, _mm512_permutex2var_epi64(low[q], _mm512_setr_epi64(2, 3, 10, 11, 0, 1, 8, 9), high[q]));
      row(input - 2, _mm512_permutex2var_epi64(low[q], _mm512_setr_epi64(6, 7, 14, 15, 4, 5, 12, 13), high[q]));
    }
  };
  half.template operator()<0>(), half.template operator()<1>();
}

template <int k, class B>
void levels(const TrellisMatrix& w, const uint8_t* tile, int16_t* panel) {
  const B book(w);
  const auto level = [&](__m512i state) PQ_FLAT { return book.level(state); };
  const auto store = [&](size_t input, __m512i pairs) PQ_FLAT { _mm512_storeu_si512(panel + input / 2 * 32, pairs); };
  if (w.order == nullptr) {
    __m512i even;
    return each<k>(tile, mask_of(w), [&](auto v, __m512i state) PQ_FLAT {
      if constexpr (v % 2 == 0)
        even = level(state);
      else
        store(size_t(v), paired(even, level(state)));
    });
  }
  const auto pairs = [](__m512i(&x)[4]) PQ_FLAT { x[0] = paired(x[1], x[0]), x[2] = paired(x[3], x[2]); };
  fragment_rows<k>(tile, mask_of(w), level, pairs, [&](size_t input, __m512i words) PQ_FLAT {
    if (input % 2 == 1) store(input, words);
  });
}

template <int k, class B>
void numbers(const TrellisMatrix& w, const uint8_t* tile, const float* scales, float* out, size_t stride) {
  const B book(w);
  const __m512 factors = _mm512_loadu_ps(scales);
  const auto store = [&](size_t input, __m512 x)
                         PQ_FLAT { _mm512_storeu_ps(out + input * stride, _mm512_mul_ps(x, factors)); };
  if (w.order == nullptr)
    return each<k>(tile, mask_of(w), [&](auto v, __m512i state) PQ_FLAT { store(size_t(v), book.number(state)); });
  fragment_rows<k>(
      tile, mask_of(w), [&](__m512i state) PQ_FLAT { return _mm512_castps_si512(book.number(state)); },
      [](__m512i(&)[4]) {}, [&](size_t input, __m512i words) PQ_FLAT { store(input, _mm512_castsi512_ps(words)); });
}

TrellisKernel find(unsigned bits, Book book, bool row_major) {
  TrellisKernel kernel = trellis_avx2().find(bits, book, row_major);
  const auto take = [&]<class B>() {
    with_constant<kMostBits>(bits, [&]<int k>() {
      kernel.few = row_major ? one<k, B, Rows<1>> : one<k, B, Fragments>;
      kernel.levels = levels<k, B>, kernel.numbers = numbers<k, B>;
      if (row_major && book == Book::mul1) kernel.few = few<k>, kernel.most = 4;
    });
  };
  if (book == Book::mul1) take.template operator()<Mul1>();
  if (book == Book::mcg) take.template operator()<Mcg>();
  if (book == Book::three_inst) take.template operator()<ThreeInst>();
  return kernel;
}

// N tokens against a panel of 128 inputs and 16 outputs: a register holds the levels of two inputs.
template <int N>
PQ_INLINE void times_tokens(const int16_t* panel, const TrellisInput& in, size_t t, size_t block, float step,
                            float zero, const float* scales, float* y, size_t stride) {
  const int16_t* a = in.codes + (block * in.tokens + t) * 128;
  __m512i acc[N];
  for (int n = 0; n < N; ++n) acc[n] = _mm512_setzero_si512();
  for (size_t p = 0; p < 64; ++p) {
    const __m512i w = _mm512_loadu_si512(panel + 32 * p);
    for (int n = 0; n < N; ++n) {
      int32_t pair;
      std::memcpy(&pair, a + size_t(n) * 128 + 2 * p, 4);
      acc[n] = _mm512_dpwssd_epi32(acc[n], w, _mm512_set1_epi32(pair));
    }
  }
  for (int n = 0; n < N; ++n) {
    const size_t at = (t + size_t(n)) * (in.padded / 128) + block;
    const __m512 factor = _mm512_set1_ps(in.scale[at] * step), offset = _mm512_set1_ps(in.sum[at] * zero);
    float* to = y + (t + size_t(n)) * stride;
    const __m512 product =
        _mm512_mul_ps(_mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[n]), factor, offset), _mm512_loadu_ps(scales));
    _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), product));
  }
}

void times(const int16_t* panel, const TrellisInput& in, size_t block, float step, float zero, const float* scales,
           float* y, size_t stride) {
  size_t t = 0;
  for (; t + 8 <= in.tokens; t += 8) times_tokens<8>(panel, in, t, block, step, zero, scales, y, stride);
  for (; t + 4 <= in.tokens; t += 4) times_tokens<4>(panel, in, t, block, step, zero, scales, y, stride);
  for (; t < in.tokens; ++t) times_tokens<1>(panel, in, t, block, step, zero, scales, y, stride);
}

// Four columns of sixteen rows at a time: lane l of register i is row 4 l + i.
void transpose(const float* x, float* out) {
  for (size_t i = 0; i < 128; i += 16)
    for (size_t j = 0; j < 128; j += 4) {
      const SixteenLines lines{reinterpret_cast<const uint8_t*>(x + i * kLine + j), kLine * sizeof(float)};
      __m512i quads[4];
      lines.load(quads);
      in_quads(quads);
      PQ_UNROLL
      for (size_t c = 0; c < 4; ++c) _mm512_store_si512(out + (j + c) * kLine + i, quads[c]);
    }
}

}  // namespace

const TrellisSet& trellis_vnni() {
  static const TrellisSet set = [] {
    TrellisSet s = trellis_avx2();
    s.find = find, s.times = times, s.rotate_down = rotate_down, s.transpose = transpose, s.finish = finish;
    return s;
  }();
  return set;
}

}  // namespace polyquant
#endif
