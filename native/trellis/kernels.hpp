// Trellis-coded matrices with 256-bit registers: eight values of the stream at a time. Included by trellis/avx2.cpp and
// trellis/avx_vnni.cpp, compiled with the flags of each.
#pragma once

#include <immintrin.h>

#include <cstring>
#include <utility>

#include "base/dots.hpp"
#include "trellis/matrix.hpp"
#include "trellis/stream.hpp"

namespace polyquant {
namespace {

// Lane j: at least 16 bits from bit k * (8 v + j) on.
template <int k, int v>
PQ_INLINE __m256i windows(const uint8_t* tile) {
  constexpr int upper = k < 7 ? 0 : 4 * k / 8;  // if eight bytes are too few, lanes 4 ... 7 read others
  constexpr auto first = [](int j) { return char(j * k / 8 - (j < 4 ? 0 : upper)); };
  const __m256i shift = _mm256_setr_epi32(0, k % 8, 2 * k % 8, 3 * k % 8, 4 * k % 8, 5 * k % 8, 6 * k % 8, 7 * k % 8);
  __m256i b;
  if constexpr (k <= 2) {
    const __m256i word = _mm256_set1_epi32(int(uint32_t(bytes8<k, k * v>(tile))));
    return _mm256_srlv_epi32(word, _mm256_setr_epi32(0, k, 2 * k, 3 * k, 4 * k, 5 * k, 6 * k, 7 * k));
  }
  if constexpr (k < 7)
    b = _mm256_set1_epi64x((long long)(bytes8<k, k * v>(tile)));
  else
    b = _mm256_set_epi64x(0, (long long)(bytes8<k, k * v + upper>(tile)), 0, (long long)(bytes8<k, k * v>(tile)));
#define PQ_LANE(j) first(j), char(first(j) + 1), char(first(j) + 2), char(-128)
  const __m256i take =
      _mm256_setr_epi8(PQ_LANE(0), PQ_LANE(1), PQ_LANE(2), PQ_LANE(3), PQ_LANE(4), PQ_LANE(5), PQ_LANE(6), PQ_LANE(7));
#undef PQ_LANE
  return _mm256_srlv_epi32(_mm256_shuffle_epi8(b, take), shift);
}

// A codebook: states -> levels, and accumulated products of levels and activations.

// Activations are twice in a lane, as 16 bits.
struct Pairs {
  static PQ_INLINE const int32_t* inputs(const TrellisInput& in) { return in.pairs; }
};

struct Mul1 {
  __m256 step, zero;
  PQ_INLINE explicit Mul1(const TrellisMatrix& w) : step(_mm256_set1_ps(w.step)), zero(_mm256_set1_ps(w.zero)) {}
  // A level is the sum of these four bytes.
  static PQ_INLINE __m256i bytes(__m256i state) {
    return _mm256_mullo_epi32(state, _mm256_set1_epi32(int(0x83DCD12D)));
  }
  static PQ_INLINE __m256i halves(__m256i state) { return _mm256_maddubs_epi16(bytes(state), _mm256_set1_epi8(1)); }
  PQ_INLINE __m256i level(__m256i state) const { return _mm256_madd_epi16(halves(state), _mm256_set1_epi16(1)); }
  static PQ_INLINE const int32_t* inputs(const TrellisInput& in) { return kDotsBytes ? in.quads : in.pairs; }
  PQ_INLINE __m256i add(__m256i acc, __m256i state, __m256i a) const {
    return kDotsBytes ? dot4(acc, bytes(state), a) : dot2(acc, halves(state), a);
  }
  PQ_INLINE __m256 number(__m256i state) const {
    // Products and sums of these values with few bits are exact: the order does not matter.
    const __m256 y = _mm256_fmadd_ps(_mm256_cvtepi32_ps(level(state)), step, zero);
    return _mm256_cvtph_ps(_mm256_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};

struct Grid : Pairs {
  __m256 middle;
  PQ_INLINE explicit Grid(const TrellisMatrix& w) : middle(_mm256_set1_ps(float((1 << w.bits) - 1) / 2)) {}
  PQ_INLINE __m256i level(__m256i state) const { return state; }
  PQ_INLINE __m256i add(__m256i acc, __m256i state, __m256i a) const { return dot2(acc, state, a); }
  PQ_INLINE __m256 number(__m256i state) const {
    return _mm256_mul_ps(_mm256_sub_ps(_mm256_cvtepi32_ps(state), middle), _mm256_set1_ps(1.24371088f));
  }
};

// Two half-precision values hashed from each state, added in half precision.
template <uint32_t factor, uint32_t offset>
struct Halves {
  PQ_INLINE explicit Halves(const TrellisMatrix&) {}
  static PQ_INLINE const int32_t* inputs(const TrellisInput& in) { return in.lower; }
  // Of a half-precision number, the sign, the two lowest bits of the exponent and the fraction are those of
  // x & 0x8fff ^ 0x3b60. In the place of a float's, whose exponent is 112 more, they are that number, here times
  // 2 ** scale, a multiple of 4 whose sum with the exponent has no carry.
  template <int scale>
  static PQ_INLINE __m256 upper_half(__m256i x) {
    constexpr int kept = int(0x81ffe000u), changed = ((112 + 12 + scale) << 23) | (0x3b60 & 0xfff) << 13;
    return _mm256_castsi256_ps(_mm256_xor_si256(_mm256_and_si256(_mm256_srai_epi32(x, 3), _mm256_set1_epi32(kept)),
                                                _mm256_set1_epi32(changed)));
  }
  // The sum of both, times 2 ** scale. Rounded to the eleven digits of half precision: added to 1.5 * 2 ** 13 times its
  // power of two.
  template <int scale>
  static PQ_INLINE __m256 sum(__m256i state) {
    __m256i x = _mm256_mullo_epi32(state, _mm256_set1_epi32(int(factor)));
    if constexpr (offset != 0) x = _mm256_add_epi32(x, _mm256_set1_epi32(int(offset)));
    const __m256 both = _mm256_add_ps(upper_half<scale>(x), upper_half<scale>(_mm256_slli_epi32(x, 16))),
                 power = _mm256_and_ps(both, _mm256_castsi256_ps(_mm256_set1_epi32(int(0xff800000u)))),
                 large = _mm256_set1_ps(1.5f * 8192);
    return _mm256_fnmadd_ps(power, large, _mm256_fmadd_ps(power, large, both));
  }
  PQ_INLINE __m256 number(__m256i state) const { return sum<0>(state); }
  // In the lower half of a lane; the upper one meets an input of 0. Halves of levels are the last digits of
  // 1.5 * 2 ** 22, whose own are 0.
  PQ_INLINE __m256i level(__m256i state) const {
    return _mm256_castps_si256(_mm256_add_ps(sum<12>(state), _mm256_set1_ps(1.5f * (1 << 22))));
  }
  PQ_INLINE __m256i add(__m256i acc, __m256i state, __m256i a) const { return dot2(acc, level(state), a); }
};
using Mcg = Halves<0xCBAC1FED, 0>;
using ThreeInst = Halves<89226354, 64248484>;

struct Table : Pairs {
  const int16_t* levels;
  const float* numbers;
  PQ_INLINE explicit Table(const TrellisMatrix& w) : levels(w.levels), numbers(w.numbers) {}
  // The upper half of a lane is the next level; the table has one extra entry.
  PQ_INLINE __m256i level(__m256i state) const {
    return _mm256_and_si256(_mm256_i32gather_epi32(reinterpret_cast<const int*>(levels), state, 2),
                            _mm256_set1_epi32(0xffff));
  }
  PQ_INLINE __m256i add(__m256i acc, __m256i state, __m256i a) const { return dot2(acc, level(state), a); }
  PQ_INLINE __m256 number(__m256i state) const { return _mm256_i32gather_ps(numbers, state, 4); }
};

PQ_INLINE __m256i mask_of(const TrellisMatrix& w) { return _mm256_set1_epi32((1 << w.window) - 1); }

// f(v, states) for the 32 vectors of a tile
template <int k, class F, size_t... v>
PQ_INLINE void each(const uint8_t* tile, __m256i mask, const F& f, std::index_sequence<v...>) {
  (f(std::integral_constant<int, int(v)>{}, _mm256_and_si256(windows<k, int(v)>(tile), mask)), ...);
}
template <int k, class F>
PQ_INLINE void each(const uint8_t* tile, __m256i mask, const F& f) {
  each<k>(tile, mask, f, std::make_index_sequence<32>{});
}

PQ_INLINE void add_floats(float* y, __m256 x) { _mm256_storeu_ps(y, _mm256_add_ps(_mm256_loadu_ps(y), x)); }

PQ_INLINE float sum4(__m128 x) {
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

// The order of vector v's lanes in a tile. Rows: 16 outputs of one input. Tensor-core fragments: 4 inputs of 2 outputs.
struct Rows {
  static constexpr int sums = 2;
  static constexpr int sum(int v) { return v % 2; }
  static PQ_INLINE __m256i input(const int32_t* inputs, int v) { return _mm256_set1_epi32(inputs[v / 2]); }
  static constexpr size_t stride = 16;
  static PQ_INLINE void finish(const __m256i* acc, __m256 out[2]) {
    out[0] = _mm256_cvtepi32_ps(acc[0]), out[1] = _mm256_cvtepi32_ps(acc[1]);
  }
};

struct Fragments {
  static constexpr int sums = 8;
  static constexpr int sum(int v) { return (31 - v) / 4; }
  static PQ_INLINE __m256i input(const int32_t* inputs, int v) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(inputs + v % 4 * 8));
  }
  static constexpr size_t stride = 32;
  static PQ_INLINE void finish(const __m256i* acc, __m256 out[2]) {
    alignas(32) float y[16];
    for (int c = 0; c < 8; ++c) {
      const __m256 x = _mm256_cvtepi32_ps(acc[c]);
      y[c + 8] = sum4(_mm256_castps256_ps128(x)), y[c] = sum4(_mm256_extractf128_ps(x, 1));
    }
    out[0] = _mm256_load_ps(y), out[1] = _mm256_load_ps(y + 8);
  }
};

template <int k, class B, class Order>
void one(const TrellisMatrix& w, size_t first, size_t last, const TrellisInput& in, float* y, size_t) {
  const B book(w);
  const __m256i mask = mask_of(w);
  const size_t rows = w.tile_rows(), row_bytes = w.tile_columns() * 32 * k;
  for (size_t block = 0; block * 8 < rows; ++block) {
    const size_t count = rows - block * 8 < 8 ? rows - block * 8 : 8;
    const float* scales = w.scales_of(block * 128);
    const __m256 step = _mm256_set1_ps(in.scale[block] * w.step), zero = _mm256_set1_ps(in.sum[block] * w.zero);
    for (size_t c = first; c < last; ++c) {
      const uint8_t* tile = w.tile(block * 8, c);
      const int32_t* inputs = B::inputs(in) + block * 8 * Order::stride;
      __m256i acc[Order::sums];
      for (__m256i& a : acc) a = _mm256_setzero_si256();
      for (size_t r = 0; r < count; ++r, tile += row_bytes, inputs += Order::stride) {
        for (int i = 0; i < 32 * k; i += 64)
          _mm_prefetch(reinterpret_cast<const char*>(tile + 8 * row_bytes + i), _MM_HINT_T0);
        each<k>(tile, mask, [&](auto v, __m256i state) PQ_FLAT {
          acc[Order::sum(v)] = book.add(acc[Order::sum(v)], state, Order::input(inputs, v));
        });
      }
      __m256 sums[2];
      Order::finish(acc, sums);
      for (int h = 0; h < 2; ++h)
        add_floats(y + 16 * (c - first) + 8 * h,
                   _mm256_mul_ps(_mm256_fmadd_ps(sums[h], step, zero), _mm256_loadu_ps(scales + 16 * c + 8 * h)));
    }
  }
}

// N tokens against a panel of 128 inputs and 16 outputs
template <int N>
PQ_INLINE void some_times(const int16_t* panel, const int16_t* a, __m256i acc[N][2]) {
  for (int n = 0; n < N; ++n) acc[n][0] = acc[n][1] = _mm256_setzero_si256();
  for (size_t p = 0; p < 64; ++p) {
    const __m256i w0 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel + 32 * p)),
                  w1 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel + 32 * p + 16));
    for (int n = 0; n < N; ++n) {
      int32_t pair;
      std::memcpy(&pair, a + size_t(n) * 128 + 2 * p, 4);
      const __m256i x = _mm256_set1_epi32(pair);
      acc[n][0] = dot2(acc[n][0], w0, x);
      acc[n][1] = dot2(acc[n][1], w1, x);
    }
  }
}

template <int N>
PQ_INLINE void times_tokens(const int16_t* panel, const TrellisInput& in, size_t t, size_t block, float step,
                            float zero, const float* scales, float* y, size_t stride) {
  __m256i acc[N][2];
  some_times<N>(panel, in.codes + (block * in.tokens + t) * 128, acc);
  for (int n = 0; n < N; ++n) {
    const size_t at = (t + size_t(n)) * (in.padded / 128) + block;
    const __m256 factor = _mm256_set1_ps(in.scale[at] * step), offset = _mm256_set1_ps(in.sum[at] * zero);
    for (int h = 0; h < 2; ++h)
      add_floats(y + (t + size_t(n)) * stride + 8 * h,
                 _mm256_mul_ps(_mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[n][h]), factor, offset),
                               _mm256_loadu_ps(scales + 8 * h)));
  }
}

void times(const int16_t* panel, const TrellisInput& in, size_t block, float step, float zero, const float* scales,
           float* y, size_t stride) {
  size_t t = 0;
  for (; t + 4 <= in.tokens; t += 4) times_tokens<4>(panel, in, t, block, step, zero, scales, y, stride);
  for (; t < in.tokens; ++t) times_tokens<1>(panel, in, t, block, step, zero, scales, y, stride);
}

}  // namespace
}  // namespace polyquant
