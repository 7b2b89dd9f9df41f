// Products of Trellis-coded matrices with AVX-512 VNNI and VBMI: sixteen values of the stream at a time. Included by
// trellis/vnni.cpp and trellis/fp16.cpp, compiled with the flags of each.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstring>
#include <utility>

#include "base/unroll.hpp"
#include "trellis/matrix.hpp"
#include "trellis/stream.hpp"

namespace polyquant {
namespace {

// Lane j: 16 bits from bit k * (16 v + j) on. Each eight bytes hold the windows of 16 / parts lanes.
template <int k, int v>
PQ_INLINE __m512i windows(const uint8_t* tile) {
  constexpr int parts = k <= 3 ? 1 : k <= 6 ? 2 : 4, lanes = 16 / parts;
  constexpr auto base = [](int part) { return k * lanes * part / 8; };
  alignas(64) static constexpr auto kShifts = [] {
    struct {
      uint8_t at[64];
    } t{};
    for (int j = 0; j < 16; ++j)
      for (int byte = 0; byte < 2; ++byte)
        t.at[4 * j + byte] = uint8_t(k * j - 8 * (k * lanes * (j / lanes) / 8) + 8 * byte);
    return t;
  }();
  __m512i b = _mm512_set1_epi64((long long)(bytes8<k, 2 * k * v>(tile)));
  if constexpr (parts == 2) b = _mm512_mask_set1_epi64(b, 0xf0, (long long)(bytes8<k, 2 * k * v + base(1)>(tile)));
  if constexpr (parts == 4) {
    b = _mm512_mask_set1_epi64(b, 0x0c, (long long)(bytes8<k, 2 * k * v + base(1)>(tile)));
    b = _mm512_mask_set1_epi64(b, 0x30, (long long)(bytes8<k, 2 * k * v + base(2)>(tile)));
    b = _mm512_mask_set1_epi64(b, 0xc0, (long long)(bytes8<k, 2 * k * v + base(3)>(tile)));
  }
  return _mm512_maskz_multishift_epi64_epi8(0x3333333333333333ull, _mm512_load_si512(kShifts.at), b);
}

// 8 or 16 bytes from bit k * 16 v on, with the windows of all lanes, again and again.
template <int k, int v>
PQ_INLINE __m512i repeated(const uint8_t* tile) {
  constexpr int at = 2 * k * v;
  if constexpr (k <= 3)
    return _mm512_set1_epi64((long long)(bytes8<k, at>(tile)));
  else if constexpr (at + 16 <= 32 * k)
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tile + at)));
  else
    return _mm512_broadcast_i32x4(
        _mm_set_epi64x((long long)(bytes8<k, at + 8>(tile)), (long long)(bytes8<k, at>(tile))));
}

// As `windows`, with more bits above the 16, for up to 7 bits.
template <int k, int v>
PQ_INLINE __m512i shifted_windows(const uint8_t* tile) {
  static constexpr auto kLanes = [] {
    struct {
      alignas(64) uint8_t bytes[64];
      alignas(64) int32_t shifts[16];
    } t{};
    for (int j = 0; j < 16; ++j) {
      for (int i = 0; i < 4; ++i) t.bytes[4 * j + i] = uint8_t((k * j / 8 + i) % 16);
      t.shifts[j] = k * j % 8;
    }
    return t;
  }();
  return _mm512_srlv_epi32(_mm512_shuffle_epi8(repeated<k, v>(tile), _mm512_load_si512(kLanes.bytes)),
                           _mm512_load_si512(kLanes.shifts));
}

// The states of vector v. mask: a no-op for windows of 16 bits, `all`. even: processors may multishift where they
// multiply, and shift elsewhere; with few other operations, shifting half of the vectors balances them. Of 7 bits,
// shifting all is faster than four words for a multishift.
template <int k, int v, bool all, bool even>
PQ_INLINE __m512i states(const uint8_t* tile, __m512i mask) {
  if constexpr (even && (k <= 3 ? v % 2 == 1 : k == 7)) return _mm512_and_si512(shifted_windows<k, v>(tile), mask);
  return all ? windows<k, v>(tile) : _mm512_and_si512(windows<k, v>(tile), mask);
}

// f(v, states) for vectors of a tile
template <int k, class F, size_t... v>
PQ_INLINE void each(const uint8_t* tile, __m512i mask, const F& f, std::index_sequence<v...>) {
  (f(std::integral_constant<int, int(v)>{}, states<k, int(v), false, false>(tile, mask)), ...);
}

template <int k, class F>
PQ_INLINE void each(const uint8_t* tile, __m512i mask, const F& f) {
  each<k>(tile, mask, f, std::make_index_sequence<16>{});
}

PQ_INLINE void add_floats(float* y, __m256 x) { _mm256_storeu_ps(y, _mm256_add_ps(_mm256_loadu_ps(y), x)); }

PQ_INLINE float sum4(__m128 x) {
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

PQ_INLINE __m256i upper(__m512i x) { return _mm512_extracti64x4_epi64(x, 1); }

// The order of vector v's lanes in a tile. Rows: 16 outputs of one input. Tensor-core fragments: 8 inputs of 2 outputs.
// sums: accumulators of one of N tokens; a product waits four cycles for the last one.
template <int N>
struct Rows {
  static constexpr int sums = N < 4 ? 4 : 2;
  static constexpr int sum(int v) { return v % sums; }
  static constexpr size_t stride = 16;
  static PQ_INLINE __m512i input(const int32_t* inputs, int v) { return _mm512_set1_epi32(inputs[v]); }
  static PQ_INLINE void finish(const __m512i* acc, __m256 out[2]) {
    __m512i sum = acc[0];
    for (int i = 1; i < sums; ++i) sum = _mm512_add_epi32(sum, acc[i]);
    out[0] = _mm256_cvtepi32_ps(_mm512_castsi512_si256(sum)), out[1] = _mm256_cvtepi32_ps(upper(sum));
  }
};

struct Fragments {
  static constexpr int sums = 8;
  static constexpr int sum(int v) { return 7 - v / 2; }
  static constexpr size_t stride = 32;
  static PQ_INLINE __m512i input(const int32_t* inputs, int v) { return _mm512_loadu_si512(inputs + v % 2 * 16); }
  static PQ_INLINE void finish(const __m512i* acc, __m256 out[2]) {
    alignas(32) float y[16];
    for (int c = 0; c < 8; ++c) {
      const __m256 x = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm512_castsi512_si256(acc[c]), upper(acc[c])));
      y[c + 8] = sum4(_mm256_castps256_ps128(x)), y[c] = sum4(_mm256_extractf128_ps(x, 1));
    }
    out[0] = _mm256_load_ps(y), out[1] = _mm256_load_ps(y + 8);
  }
};

// A codebook: what states become, and the accumulated products of that and activations.

// Rounded to half precision.
PQ_INLINE __m512 as_halves(__m512 x) {
  return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// A level is the sum of the four bytes of a product: with an activation four times in its lane, the products add up in
// one operation.
struct Mul1 {
  static constexpr bool even = true;
  __m512 step, zero;
  PQ_INLINE explicit Mul1(const TrellisMatrix& w) : step(_mm512_set1_ps(w.step)), zero(_mm512_set1_ps(w.zero)) {}
  static PQ_INLINE const int32_t* inputs(const TrellisInput& in) { return in.quads; }
  static PQ_INLINE __m512i spread(__m512i state) {
    return _mm512_mullo_epi32(state, _mm512_set1_epi32(int(0x83DCD12D)));
  }
  template <size_t n>
  static PQ_INLINE void spread(__m512i (&x)[n]) {
    for (__m512i& state : x) state = spread(state);
  }
  static PQ_INLINE __m512i add(__m512i acc, __m512i bytes, __m512i a) { return _mm512_dpbusd_epi32(acc, bytes, a); }
  PQ_INLINE __m512i level(__m512i state) const {
    return add(_mm512_setzero_si512(), spread(state), _mm512_set1_epi8(1));
  }
  PQ_INLINE __m512 number(__m512i state) const {
    return as_halves(_mm512_fmadd_ps(_mm512_cvtepi32_ps(level(state)), step, zero));
  }
};

struct Words {
  alignas(64) int16_t at[64];
  PQ_INLINE __m512i lower() const { return _mm512_load_si512(at); }
  PQ_INLINE __m512i upper() const { return _mm512_load_si512(at + 32); }
};

struct Floats {
  alignas(64) float at[32];
  PQ_INLINE __m512 lower() const { return _mm512_load_ps(at); }
  PQ_INLINE __m512 upper() const { return _mm512_load_ps(at + 16); }
};

constexpr int kXorOfAnd = 0x78;  // of _mm512_ternarylogic: a ^ (b & c)

// Two half-precision numbers hashed from each state, added in half precision.
template <uint32_t factor, uint32_t offset>
struct Halves {
  static constexpr bool even = false;
  PQ_INLINE explicit Halves(const TrellisMatrix&) {}
  static PQ_INLINE const int32_t* inputs(const TrellisInput& in) { return in.lower; }
  static PQ_INLINE __m512i hash(__m512i state) {
    const __m512i x = _mm512_mullo_epi32(state, _mm512_set1_epi32(int(factor)));
    return offset != 0 ? _mm512_add_epi32(x, _mm512_set1_epi32(int(offset))) : x;
  }
  // In units of 2 ** -13, the numbers x & 0x8fff ^ 0x3b60 are 11 bits times 1, 2, 4 or 8, or minus these: factors that
  // the upper six bits of x select.
  static constexpr auto kFactors = [] {
    Words t{};
    for (int i = 0; i < 64; ++i) t.at[i] = int16_t((i < 32 ? 1 : -1) << ((i & 3) ^ 2));
    return t;
  }();
  // The sum s of both as the float kOnes + s, whose last digit is a unit. A sum from 2 ** 11 times g on has a last
  // digit of g in half precision, as has the float g * kOnes + s: kSteps holds (g - 1) * kOnes by the upper bits of s.
  static constexpr float kOnes = 1.5f * (1 << 23);
  static constexpr auto kSteps = [] {
    Floats t{};
    for (int i = 0; i < 32; ++i) {
      const int upper = i < 16 ? i : 31 - i;
      t.at[i] = kOnes * float(std::bit_floor(unsigned(upper) * 2 | 1u) - 1);
    }
    return t;
  }();
  // Step by step for all: alone, a state would wait for each result, and fill the queues of the processor.
  template <size_t n>
  static PQ_INLINE void sums(const __m512i (&states)[n], __m512 (&out)[n]) {
    __m512i x[n], digits[n];
    __m512 steps[n];
    const auto each_of = [](const auto& f) PQ_FLAT {
      PQ_UNROLL
      for (size_t i = 0; i < n; ++i) f(i);
    };
    each_of([&](size_t i) PQ_FLAT { x[i] = hash(states[i]); });
    each_of([&](size_t i) PQ_FLAT {
      digits[i] =
          _mm512_ternarylogic_epi32(_mm512_set1_epi32(0x07600760), x[i], _mm512_set1_epi32(0x03ff03ff), kXorOfAnd);
    });
    each_of([&](size_t i) PQ_FLAT { x[i] = _mm512_srli_epi16(x[i], 10); });
    each_of([&](size_t i) PQ_FLAT { x[i] = _mm512_permutex2var_epi16(kFactors.lower(), x[i], kFactors.upper()); });
    each_of([&](size_t i)
                PQ_FLAT { x[i] = _mm512_dpwssd_epi32(_mm512_castps_si512(_mm512_set1_ps(kOnes)), digits[i], x[i]); });
    each_of([&](size_t i) PQ_FLAT { digits[i] = _mm512_srli_epi32(x[i], 11); });
    each_of([&](size_t i) PQ_FLAT { steps[i] = _mm512_permutex2var_ps(kSteps.lower(), digits[i], kSteps.upper()); });
    each_of([&](size_t i) PQ_FLAT { out[i] = _mm512_add_ps(_mm512_castsi512_ps(x[i]), steps[i]); });
    each_of([&](size_t i) PQ_FLAT { out[i] = _mm512_sub_ps(out[i], steps[i]); });
  }
  PQ_INLINE __m512 number(__m512i state) const {
    constexpr float unit = 1.0f / 8192;
    const __m512i states[1] = {state};
    __m512 sum[1];
    sums(states, sum);
    return _mm512_fmadd_ps(sum[0], _mm512_set1_ps(unit), _mm512_set1_ps(-kOnes * unit));
  }
  // In the lower half of a lane; the upper one meets an input of 0.
  template <size_t n>
  static PQ_INLINE void spread(__m512i (&x)[n]) {
#if defined(__AVX512FP16__)
    constexpr short kUnit = 0x7000;  // 8192, levels of 1, in half precision
    for (__m512i& state : x) {
      const __m512i both = _mm512_ternarylogic_epi32(_mm512_set1_epi32(0x3b603b60), hash(state),
                                                     _mm512_set1_epi32(int(0x8fff8fffu)), kXorOfAnd);
      const __m512h sum = _mm512_add_ph(_mm512_castsi512_ph(both), _mm512_castsi512_ph(_mm512_srli_epi32(both, 16)));
      state = _mm512_cvtph_epi16(_mm512_mul_ph(sum, _mm512_castsi512_ph(_mm512_set1_epi16(kUnit))));
    }
#else
    __m512 sum[n];
    sums(x, sum);
    for (size_t i = 0; i < n; ++i) x[i] = _mm512_castps_si512(sum[i]);
#endif
  }
  PQ_INLINE __m512i level(__m512i state) const {
    __m512i x[1] = {state};
    spread(x);
    return x[0];
  }
  static PQ_INLINE __m512i add(__m512i acc, __m512i level, __m512i a) { return _mm512_dpwssd_epi32(acc, level, a); }
};
using Mcg = Halves<0xCBAC1FED, 0>;
using ThreeInst = Halves<89226354, 64248484>;

template <int k, int N, class B, class Order, bool all>
PQ_INLINE void times_block(const TrellisMatrix& w, const uint8_t* tile, size_t count, const int32_t* inputs,
                           __m256 (&sums)[N][2]) {
  const __m512i mask = _mm512_set1_epi32((1 << w.window) - 1);
  const size_t row_bytes = w.tile_columns() * 32 * k;
  __m512i acc[N][Order::sums];
  for (auto& of_token : acc)
    for (__m512i& a : of_token) a = _mm512_setzero_si512();
  for (size_t r = 0; r < count; ++r, tile += row_bytes, inputs += N * Order::stride) {
    for (int i = 0; i < 32 * k; i += 64)
      _mm_prefetch(reinterpret_cast<const char*>(tile + 8 * row_bytes + i), _MM_HINT_T0);
    const auto some = [&]<int first, size_t... i>(std::index_sequence<i...>) PQ_FLAT {
      __m512i x[] = {states<k, first + int(i), all, B::even>(tile, mask)...};
      B::spread(x);
      for (int n = 0; n < N; ++n)
        ((acc[n][Order::sum(first + int(i))] =
              B::add(acc[n][Order::sum(first + int(i))], x[i], Order::input(inputs + 16 * n, first + int(i)))),
         ...);
    };
    constexpr auto eight = std::make_index_sequence<8>{};
    some.template operator()<0>(eight), some.template operator()<8>(eight);
  }
  for (int n = 0; n < N; ++n) Order::finish(acc[n], sums[n]);
}

template <int k, int N, class B, class Order>
void tokens_times(const TrellisMatrix& w, size_t first, size_t last, const TrellisInput& in, float* y, size_t stride) {
  const size_t rows = w.tile_rows(), blocks = in.padded / 128;
  for (size_t block = 0; block * 8 < rows; ++block) {
    const size_t count = rows - block * 8 < 8 ? rows - block * 8 : 8;
    const float* scales = w.scales_of(block * 128);
    const int32_t* inputs = B::inputs(in) + block * 8 * Order::stride * N;
    for (size_t c = first; c < last; ++c) {
      const uint8_t* tile = w.tile(block * 8, c);
      __m256 sums[N][2];
      if (w.window == 16)
        times_block<k, N, B, Order, true>(w, tile, count, inputs, sums);
      else
        times_block<k, N, B, Order, false>(w, tile, count, inputs, sums);
      for (size_t n = 0; n < in.tokens; ++n) {
        const size_t at = n * blocks + block;
        const __m256 step = _mm256_set1_ps(in.scale[at] * w.step), zero = _mm256_set1_ps(in.sum[at] * w.zero);
        for (int h = 0; h < 2; ++h)
          add_floats(y + n * stride + 16 * (c - first) + 8 * h,
                     _mm256_mul_ps(_mm256_fmadd_ps(sums[n][h], step, zero), _mm256_loadu_ps(scales + 16 * c + 8 * h)));
      }
    }
  }
}

// Without the codebook mul1, and for fragments, decoding takes so long, or so many registers, that one token is best.
template <int k, class B, class Order>
void one(const TrellisMatrix& w, size_t first, size_t last, const TrellisInput& in, float* y, size_t stride) {
  tokens_times<k, 1, B, Order>(w, first, last, in, y, stride);
}

}  // namespace
}  // namespace polyquant
