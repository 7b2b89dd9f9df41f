// Trellis-coded matrices with NEON: four values of the stream at a time. Included by trellis/neon.cpp,
// trellis/neon_dotprod.cpp and trellis/neon_i8mm.cpp.
#pragma once

#include <arm_neon.h>

#include <utility>

#include "base/dots_neon.hpp"
#include "base/simd.hpp"
#include "base/unroll.hpp"
#include "trellis/dispatch.hpp"
#include "trellis/matrix.hpp"
#include "trellis/stream.hpp"

namespace polyquant {
namespace {

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kMixedSigns = true;  // products of unsigned and signed bytes
#else
constexpr bool kMixedSigns = false;
#endif

constexpr int kVectors = 64;  // of four values in a tile

// Lane j: at least 16 bits from bit k * (4 v + j) on.
template <int k, int v>
PQ_INLINE uint32x4_t windows(const uint8_t* tile) {
  constexpr auto at = [](int j) { return k * v % 2 * 4 + k * j; };
  constexpr int32_t down[4] = {-at(0), -at(1), -at(2), -at(3)};
  const uint64_t bytes = bytes8<k, k * v / 2>(tile);
  if constexpr (at(3) + 16 <= 32) return vshlq_u32(vdupq_n_u32(uint32_t(bytes)), vld1q_s32(down));
  constexpr auto place = [at](int j, int i) {
    return i < 3 ? uint64_t(at(j) / 8 + i) << (8 * i) : uint64_t(255) << 24;
  };
  constexpr auto lane = [place](int j) { return place(j, 0) | place(j, 1) | place(j, 2) | place(j, 3); };
  const uint8x16_t take = vcombine_u8(vcreate_u8(lane(0) | lane(1) << 32), vcreate_u8(lane(2) | lane(3) << 32));
  constexpr int32_t rest[4] = {-(at(0) % 8), -(at(1) % 8), -(at(2) % 8), -(at(3) % 8)};
  const uint8x16_t all = vcombine_u8(vcreate_u8(bytes), vdup_n_u8(0));
  return vshlq_u32(vreinterpretq_u32_u8(vqtbl1q_u8(all, take)), vld1q_s32(rest));
}

// A codebook: states -> levels, and accumulated products of levels and activations.

PQ_INLINE float32x4_t as_halves(float32x4_t x) { return vcvt_f32_f16(vcvt_f16_f32(x)); }

// An activation is in a lane as 32 bits: TrellisInput::pairs has it in the upper half.
struct Words {
  static PQ_INLINE const int32_t* inputs(const TrellisInput& in) { return in.pairs; }
  static PQ_INLINE int32x4_t add_level(int32x4_t acc, int32x4_t level, int32x4_t pairs) {
    return vmlaq_s32(acc, level, vshrq_n_s32(pairs, 16));
  }
};

struct Mul1 : Words {
  float32x4_t step, zero;
  PQ_INLINE explicit Mul1(const TrellisMatrix& w) : step(vdupq_n_f32(w.step)), zero(vdupq_n_f32(w.zero)) {}
  // A level is the sum of these four bytes.
  static PQ_INLINE uint8x16_t bytes(uint32x4_t state) {
    return vreinterpretq_u8_u32(vmulq_u32(state, vdupq_n_u32(0x83DCD12D)));
  }
  static PQ_INLINE int32x4_t level(uint32x4_t state) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vreinterpretq_s32_u32(vdotq_u32(vdupq_n_u32(0), bytes(state), vdupq_n_u8(1)));
#else
    return vreinterpretq_s32_u32(vpaddlq_u16(vpaddlq_u8(bytes(state))));
#endif
  }
  static PQ_INLINE const int32_t* inputs(const TrellisInput& in) { return kMixedSigns ? in.quads : in.pairs; }
  static PQ_INLINE int32x4_t add(int32x4_t acc, uint32x4_t state, int32x4_t a) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_s32(acc, bytes(state), vreinterpretq_s8_s32(a));
#else
    return add_level(acc, level(state), a);
#endif
  }
  PQ_INLINE float32x4_t number(uint32x4_t state) const {
    // Products and sums of these values with few bits are exact: the order does not matter.
    return as_halves(vfmaq_f32(zero, vcvtq_f32_s32(level(state)), step));
  }
};

struct Grid : Words {
  float32x4_t middle;
  PQ_INLINE explicit Grid(const TrellisMatrix& w) : middle(vdupq_n_f32(float((1 << w.bits) - 1) / 2)) {}
  static PQ_INLINE int32x4_t level(uint32x4_t state) { return vreinterpretq_s32_u32(state); }
  static PQ_INLINE int32x4_t add(int32x4_t acc, uint32x4_t state, int32x4_t a) {
    return add_level(acc, level(state), a);
  }
  PQ_INLINE float32x4_t number(uint32x4_t state) const {
    return vmulq_n_f32(vsubq_f32(vcvtq_f32_u32(state), middle), 1.24371088f);
  }
};

// Two half-precision values hashed from each state, added in half precision.
template <uint32_t factor, uint32_t offset>
struct Halves : Words {
  float unit;  // levels of 1
  PQ_INLINE explicit Halves(const TrellisMatrix& w) : unit(1.0f / w.step) {}
  static PQ_INLINE float32x4_t number(uint32x4_t state) {
    uint32x4_t x = vmlaq_u32(vdupq_n_u32(offset), state, vdupq_n_u32(factor));
    x = veorq_u32(vandq_u32(x, vdupq_n_u32(0x8FFF8FFF)), vdupq_n_u32(0x3B603B60));
    const float16x4_t low = vreinterpret_f16_u16(vmovn_u32(x)), high = vreinterpret_f16_u16(vshrn_n_u32(x, 16));
    return as_halves(vaddq_f32(vcvt_f32_f16(low), vcvt_f32_f16(high)));
  }
  PQ_INLINE int32x4_t level(uint32x4_t state) const { return vcvtnq_s32_f32(vmulq_n_f32(number(state), unit)); }
  PQ_INLINE int32x4_t add(int32x4_t acc, uint32x4_t state, int32x4_t a) const {
    return add_level(acc, level(state), a);
  }
};
using Mcg = Halves<0xCBAC1FED, 0>;
using ThreeInst = Halves<89226354, 64248484>;

struct Table : Words {
  const int16_t* levels;
  const float* numbers;
  PQ_INLINE explicit Table(const TrellisMatrix& w) : levels(w.levels), numbers(w.numbers) {}
  template <class Vector, class T>
  static PQ_INLINE Vector look_up(const T* table, uint32x4_t state) {
    return Vector{table[vgetq_lane_u32(state, 0)], table[vgetq_lane_u32(state, 1)], table[vgetq_lane_u32(state, 2)],
                  table[vgetq_lane_u32(state, 3)]};
  }
  PQ_INLINE int32x4_t level(uint32x4_t state) const { return look_up<int32x4_t>(levels, state); }
  PQ_INLINE int32x4_t add(int32x4_t acc, uint32x4_t state, int32x4_t a) const {
    return add_level(acc, level(state), a);
  }
  PQ_INLINE float32x4_t number(uint32x4_t state) const { return look_up<float32x4_t>(numbers, state); }
};

PQ_INLINE uint32x4_t mask_of(const TrellisMatrix& w) { return vdupq_n_u32((1u << w.window) - 1); }

// f(v, states) for the vectors of a tile
template <int k, class F, size_t... v>
PQ_INLINE void each(const uint8_t* tile, uint32x4_t mask, const F& f, std::index_sequence<v...>) {
  (f(std::integral_constant<int, int(v)>{}, vandq_u32(windows<k, int(v)>(tile), mask)), ...);
}
template <int k, class F>
PQ_INLINE void each(const uint8_t* tile, uint32x4_t mask, const F& f) {
  each<k>(tile, mask, f, std::make_index_sequence<kVectors>{});
}

// y += (sums * step + zero) * scales, of four outputs.
PQ_INLINE void add_outputs(float* y, int32x4_t sums, float step, float zero, const float* scales) {
  const float32x4_t x = vfmaq_n_f32(vdupq_n_f32(zero), vcvtq_f32_s32(sums), step);
  vst1q_f32(y, vfmaq_f32(vld1q_f32(y), x, vld1q_f32(scales)));
}

// The order of vector v's lanes in a tile. Rows: 16 outputs of one input. Tensor-core fragments: 4 inputs of an output.
struct Rows {
  static constexpr int sums = 4;
  static constexpr int sum(int v) { return v % 4; }
  static PQ_INLINE int32x4_t input(const int32_t* inputs, int v) { return vdupq_n_s32(inputs[v / 4]); }
  static constexpr size_t stride = 16;
  static PQ_INLINE int32x4_t finish(const int32x4_t* acc, int four) { return acc[four]; }
};

struct Fragments {
  static constexpr int sums = 16;
  static constexpr int sum(int v) { return (31 - v / 2) / 4 + (v % 2 ? 0 : 8); }
  static PQ_INLINE int32x4_t input(const int32_t* inputs, int v) { return vld1q_s32(inputs + v % 8 * 4); }
  static constexpr size_t stride = 32;
  static PQ_INLINE int32x4_t finish(const int32x4_t* acc, int four) {
    const int32x4_t* a = acc + 4 * four;
    return vpaddq_s32(vpaddq_s32(a[0], a[1]), vpaddq_s32(a[2], a[3]));
  }
};

template <int k, class B, class Order>
void one(const TrellisMatrix& w, size_t first, size_t last, const TrellisInput& in, float* y, size_t) {
  const B book(w);
  const uint32x4_t mask = mask_of(w);
  const size_t rows = w.tile_rows(), row_bytes = w.tile_columns() * 32 * k;
  for (size_t block = 0; block * 8 < rows; ++block) {
    const size_t count = rows - block * 8 < 8 ? rows - block * 8 : 8;
    const float* scales = w.scales_of(block * 128);
    for (size_t c = first; c < last; ++c) {
      const uint8_t* tile = w.tile(block * 8, c);
      const int32_t* inputs = B::inputs(in) + block * 8 * Order::stride;
      int32x4_t acc[Order::sums];
      PQ_UNROLL
      for (int32x4_t& a : acc) a = vdupq_n_s32(0);
      for (size_t r = 0; r < count; ++r, tile += row_bytes, inputs += Order::stride) {
        for (int i = 0; i < 32 * k; i += 64) __builtin_prefetch(tile + 8 * row_bytes + i);
        each<k>(tile, mask, [&](auto v, uint32x4_t state) PQ_FLAT {
          acc[Order::sum(v)] = book.add(acc[Order::sum(v)], state, Order::input(inputs, v));
        });
      }
      PQ_UNROLL
      for (int i = 0; i < 4; ++i)
        add_outputs(y + 16 * (c - first) + 4 * i, Order::finish(acc, i), in.scale[block] * w.step,
                    in.sum[block] * w.zero, scales + 16 * c + 4 * i);
    }
  }
}

// The numbers that `of` makes from states of tensor-core fragments, by input: row(input, output, numbers of outputs
// output ... output + 3). Vectors hold one output and four inputs, which are those of every eighth vector.
// together(rows): what becomes of those of four inputs, from the last one.
template <int k, class Of, class Together, class Row>
PQ_INLINE void fragment_rows(const uint8_t* tile, uint32x4_t mask, const Of& of, const Together& together,
                             const Row& row) {
  const auto square = [&]<int from>() PQ_FLAT {
    float32x4_t x[4];
    each<k>(
        tile, mask, [&](auto v, uint32x4_t state) PQ_FLAT { x[3 - v / 8 % 4] = of(state); },
        std::index_sequence<from, from + 8, from + 16, from + 24>{});
    transpose4(x);
    together(x);
    PQ_UNROLL
    for (int q = 0; q < 4; ++q)
      row(size_t(15 - from / 2 % 4 * 2 - q % 2 - q / 2 * 8), size_t(from % 2 ? 0 : 8) + size_t(from < 32 ? 4 : 0),
          x[q]);
  };
  [&]<size_t... n>(std::index_sequence<n...>)
      PQ_FLAT { (square.template operator()<int(n / 8 * 32 + n % 8)>(), ...); }(std::make_index_sequence<16>{});
}

template <int k, class B>
void levels(const TrellisMatrix& w, const uint8_t* tile, int16_t* panel) {
  const B book(w);
  const auto paired = [](int32x4_t even, int32x4_t odd) PQ_FLAT { return vsliq_n_s32(even, odd, 16); };
  const auto store = [&](size_t input, size_t output, int32x4_t pairs)
                         PQ_FLAT { vst1q_s16(panel + input / 2 * 32 + output * 2, vreinterpretq_s16_s32(pairs)); };
  if (w.order == nullptr) {
    int32x4_t even[4];
    return each<k>(tile, mask_of(w), [&](auto v, uint32x4_t state) PQ_FLAT {
      if constexpr (v / 4 % 2 == 0)
        even[v % 4] = book.level(state);
      else
        store(size_t(v) / 4, v % 4 * 4, paired(even[v % 4], book.level(state)));
    });
  }
  fragment_rows<k>(
      tile, mask_of(w), [&](uint32x4_t state) PQ_FLAT { return vreinterpretq_f32_s32(book.level(state)); },
      [&](float32x4_t(&x)[4]) PQ_FLAT {
        PQ_UNROLL
        for (int q = 0; q < 4; q += 2)
          x[q] = vreinterpretq_f32_s32(paired(vreinterpretq_s32_f32(x[q + 1]), vreinterpretq_s32_f32(x[q])));
      },
      [&](size_t input, size_t output, float32x4_t pairs) PQ_FLAT {
        if (input % 2 == 1) store(input, output, vreinterpretq_s32_f32(pairs));
      });
}

template <int k, class B>
void numbers(const TrellisMatrix& w, const uint8_t* tile, const float* scales, float* out, size_t stride) {
  const B book(w);
  const auto store = [&](size_t input, size_t output, float32x4_t x) PQ_FLAT {
    vst1q_f32(out + input * stride + output, vmulq_f32(x, vld1q_f32(scales + output)));
  };
  if (w.order == nullptr)
    return each<k>(tile, mask_of(w),
                   [&](auto v, uint32x4_t state) PQ_FLAT { store(size_t(v) / 4, v % 4 * 4, book.number(state)); });
  fragment_rows<k>(
      tile, mask_of(w), [&](uint32x4_t state) PQ_FLAT { return book.number(state); }, [](float32x4_t(&)[4]) {}, store);
}

// Only the products of `mul1` have instructions of their own; `all`: those of the other books are compiled too.
template <bool all>
TrellisKernel find(unsigned bits, Book book, bool row_major) {
  const auto kernel_of = [&]<class B>() {
    return with_bits(bits, [&]<int k>() {
      return TrellisKernel{row_major ? one<k, B, Rows> : one<k, B, Fragments>, levels<k, B>, numbers<k, B>, 1};
    });
  };
  if constexpr (all)
    return with_book<Mul1, Grid, Mcg, ThreeInst, Table>(book, kernel_of);
  else
    return book == Book::mul1 ? kernel_of.template operator()<Mul1>() : trellis_neon().find(bits, book, row_major);
}

// N tokens against a panel of 128 inputs and 16 outputs
template <int N>
PQ_INLINE void times_tokens(const int16_t* panel, const TrellisInput& in, size_t t, size_t block, float step,
                            float zero, const float* scales, float* y, size_t stride) {
  const int16_t* a = in.codes + (block * in.tokens + t) * 128;
  int32x4_t acc[N][4];
  PQ_UNROLL
  for (int i = 0; i < 4 * N; ++i) acc[i / 4][i % 4] = vdupq_n_s32(0);
  for (size_t p = 0; p < 64; ++p) {
    const int16x8x2_t w[2] = {vld2q_s16(panel + 32 * p), vld2q_s16(panel + 32 * p + 16)};
    PQ_UNROLL
    for (size_t n = 0; n < N; ++n) PQ_UNROLL
    for (size_t i = 0; i < 2; ++i) {
      const int16_t x = a[n * 128 + 2 * p + i];
      acc[n][0] = vmlal_n_s16(acc[n][0], vget_low_s16(w[0].val[i]), x);
      acc[n][1] = vmlal_high_n_s16(acc[n][1], w[0].val[i], x);
      acc[n][2] = vmlal_n_s16(acc[n][2], vget_low_s16(w[1].val[i]), x);
      acc[n][3] = vmlal_high_n_s16(acc[n][3], w[1].val[i], x);
    }
  }
  PQ_UNROLL
  for (size_t n = 0; n < N; ++n) {
    const size_t at = (t + n) * (in.padded / 128) + block;
    PQ_UNROLL
    for (size_t i = 0; i < 4; ++i)
      add_outputs(y + (t + n) * stride + 4 * i, acc[n][i], in.scale[at] * step, in.sum[at] * zero, scales + 4 * i);
  }
}

void times(const int16_t* panel, const TrellisInput& in, size_t block, float step, float zero, const float* scales,
           float* y, size_t stride) {
  size_t t = 0;
  for (; t + 4 <= in.tokens; t += 4) times_tokens<4>(panel, in, t, block, step, zero, scales, y, stride);
  for (; t < in.tokens; ++t) times_tokens<1>(panel, in, t, block, step, zero, scales, y, stride);
}

void transpose(const float* x, float* out) {
  for (size_t i = 0; i < 128; i += 4)
    for (size_t j = 0; j < 128; j += 4) {
      float32x4_t v[4];
      PQ_UNROLL
      for (size_t r = 0; r < 4; ++r) v[r] = vld1q_f32(x + (i + r) * kLine + j);
      transpose4(v);
      PQ_UNROLL
      for (size_t r = 0; r < 4; ++r) vst1q_f32(out + (j + r) * kLine + i, v[r]);
    }
}

// The loops over floats that any compiler vectorizes are those of the portable set.
template <bool all>
const TrellisSet& neon_set() {
  static const TrellisSet set = [] {
    TrellisSet s = trellis_plain();
    s.find = find<all>, s.times = times, s.transpose = transpose;
    return s;
  }();
  return set;
}

}  // namespace
}  // namespace polyquant
