// The rounding of activations, and the table of packed kernels for one instruction set: included by packed/plain.cpp,
// packed/avx2.cpp and packed/vnni.cpp.
#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "base/with_constant.hpp"
#include "packed/kernels.hpp"

namespace polyquant {
namespace {

// ---------------------------------------------------------------- float32

#if defined(__AVX2__)

PQ_INLINE float dot_floats(const float* w, const float* x, size_t cols) {
  __m256 acc[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
  size_t k = 0;
  for (; k + 32 <= cols; k += 32)
    for (int i = 0; i < 4; ++i)
      acc[i] = _mm256_fmadd_ps(_mm256_loadu_ps(w + k + 8 * i), _mm256_loadu_ps(x + k + 8 * i), acc[i]);
  float rest = 0;
  for (; k < cols; ++k) rest += w[k] * x[k];
  return sum8(_mm256_add_ps(_mm256_add_ps(acc[0], acc[1]), _mm256_add_ps(acc[2], acc[3]))) + rest;
}

// The number at `p` of two bytes.
template <bool bfloat>
PQ_INLINE float half_number(const uint8_t* p) {
  const auto bits = load<uint16_t>(p);
  return bfloat ? bfloat_to_float(bits) : half_to_float(bits);
}

// 32 columns of a row are kChains vectors, whose lanes are those of dot_floats.
#if defined(__AVX512F__)
using Chain = __m512;
constexpr int kChains = 2, kChainRows = 4, kChainTokens = 4;
PQ_INLINE Chain halves_of(const uint8_t* p) { return _mm512_cvtph_ps(__m256i(load<B32>(p))); }
PQ_INLINE Chain add_product(Chain sum, Chain w, Chain x) { return _mm512_fmadd_ps(w, x, sum); }
PQ_INLINE float sum_of(const Chain (&chains)[kChains]) {
  const auto halves = [](__m512 x) PQ_FLAT {
    return _mm256_add_ps(_mm512_castps512_ps256(x), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
  };
  return sum8(_mm256_add_ps(halves(chains[0]), halves(chains[1])));
}
#else
using Chain = __m256;
constexpr int kChains = 4, kChainRows = 2, kChainTokens = 2;
PQ_INLINE Chain halves_of(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
PQ_INLINE Chain add_product(Chain sum, Chain w, Chain x) { return _mm256_fmadd_ps(w, x, sum); }
PQ_INLINE float sum_of(const Chain (&chains)[kChains]) {
  return sum8(_mm256_add_ps(_mm256_add_ps(chains[0], chains[1]), _mm256_add_ps(chains[2], chains[3])));
}
#endif

template <bool bfloat>
PQ_INLINE Chain half_numbers(const uint8_t* p) {
  if constexpr (!bfloat) return halves_of(p);
  using Shorts = uint16_t __attribute__((vector_size(sizeof(Chain) / 2)));
  using Words = uint32_t __attribute__((vector_size(sizeof(Chain))));
  return Chain(__builtin_convertvector(load<Shorts>(p), Words) << 16);
}

// R rows times N tokens, with the sums of dot_floats.
template <bool bfloat, int R, int N>
void halves_block(const uint8_t* w, size_t cols, const float* x, float* y, size_t stride) {
  constexpr size_t each = 32 / kChains;
  Chain sums[R][N][kChains];
  each_constant<R * N * kChains>([&]<int i>()
                                     PQ_FLAT { sums[i / kChains / N][i / kChains % N][i % kChains] = Chain{}; });
  size_t k = 0;
  for (; k + 32 <= cols; k += 32)
    each_constant<kChains>([&]<int c>() PQ_FLAT {
      const size_t at = k + c * each;
      Chain numbers[R];
      each_constant<R>([&]<int r>() PQ_FLAT { numbers[r] = half_numbers<bfloat>(w + 2 * (r * cols + at)); });
      each_constant<N>([&]<int n>() PQ_FLAT {
        const auto inputs = load<Chain>(reinterpret_cast<const uint8_t*>(x + n * cols + at));
        each_constant<R>([&]<int r>() PQ_FLAT { sums[r][n][c] = add_product(sums[r][n][c], numbers[r], inputs); });
      });
    });
  each_constant<R * N>([&]<int i>() PQ_FLAT {
    constexpr size_t r = i / N, n = i % N;
    float rest = 0;
    for (size_t j = k; j < cols; ++j) rest += half_number<bfloat>(w + 2 * (r * cols + j)) * x[n * cols + j];
    y[n * stride + r] = sum_of(sums[r][n]) + rest;
  });
}

template <bool bfloat>
void halves_rows(const uint8_t* w, size_t rows, size_t cols, const float* x, size_t tokens, float* y, size_t stride) {
  for (size_t t = 0; t < tokens; t += kChainTokens)
    with_constant<kChainTokens>(std::min<size_t>(tokens - t, kChainTokens), [&]<int N>() {
      const auto times = [&]<int R>(size_t r) {
        halves_block<bfloat, R, N>(w + 2 * r * cols, cols, x + t * cols, y + t * stride + r, stride);
      };
      constexpr size_t together = N == 1 ? 1 : kChainRows;
      size_t r = 0;
      for (; r + together <= rows; r += together) times.template operator()<together>(r);
      for (; r < rows; ++r) times.template operator()<1>(r);
    });
}

void multiply_halves(const uint8_t* w, bool bfloat, size_t rows, size_t cols, const float* x, size_t tokens, float* y,
                     size_t stride) {
  (bfloat ? halves_rows<true> : halves_rows<false>)(w, rows, cols, x, tokens, y, stride);
}

constexpr auto kMultiplyHalves = multiply_halves;

// out [vectors][8 rows][kLaneWidth] of a panel [cols][8 rows] and vectors of lanes. Each sum is one chain over the
// columns: the same bits for any number of tokens.
template <int vectors>
[[gnu::noinline]] void floats_tile(const float* panel, size_t cols, const float* lanes, float* out) {
  static_assert(kLaneWidth == 16);
#if defined(__AVX512F__)
  __m512 acc[vectors][8];
  PQ_UNROLL
  for (int i = 0; i < 8 * vectors; ++i) acc[i / 8][i % 8] = _mm512_setzero_ps();
  for (size_t k = 0; k < cols; ++k) {
    __m512 x[vectors];
    PQ_UNROLL
    for (int v = 0; v < vectors; ++v) x[v] = _mm512_loadu_ps(lanes + (size_t(v) * cols + k) * kLaneWidth);
    PQ_UNROLL
    for (int r = 0; r < 8; ++r) {
      const __m512 w = _mm512_set1_ps(panel[8 * k + size_t(r)]);
      PQ_UNROLL
      for (int v = 0; v < vectors; ++v) acc[v][r] = _mm512_fmadd_ps(w, x[v], acc[v][r]);
    }
  }
  PQ_UNROLL
  for (int i = 0; i < 8 * vectors; ++i) _mm512_store_ps(out + 16 * i, acc[i / 8][i % 8]);
#else
  for (int v = 0; v < vectors; ++v, lanes += cols * kLaneWidth)
    for (int half = 0; half < 2; ++half, out += 4 * kLaneWidth) {  // 16 registers hold the sums of four rows
      __m256 acc[4][2];
      PQ_UNROLL
      for (int i = 0; i < 8; ++i) acc[i / 2][i % 2] = _mm256_setzero_ps();
      for (size_t k = 0; k < cols; ++k) {
        const __m256 low = _mm256_loadu_ps(lanes + k * kLaneWidth), high = _mm256_loadu_ps(lanes + k * kLaneWidth + 8);
        PQ_UNROLL
        for (int r = 0; r < 4; ++r) {
          const __m256 w = _mm256_broadcast_ss(panel + 8 * k + size_t(4 * half + r));
          acc[r][0] = _mm256_fmadd_ps(w, low, acc[r][0]), acc[r][1] = _mm256_fmadd_ps(w, high, acc[r][1]);
        }
      }
      PQ_UNROLL
      for (int i = 0; i < 8; ++i) _mm256_store_ps(out + 8 * i, acc[i / 2][i % 2]);
    }
#endif
}

// A tile [8 rows][kLaneWidth] -> y of `count` tokens.
PQ_INLINE void put_floats(const float* tile, size_t rows, size_t count, float* y, size_t stride) {
  for (size_t t = 0; rows == 8 && t < count; t += 8) {
    alignas(32) float out[64];
    put_eight(out, [&](int r) { return _mm256_castps_si256(_mm256_load_ps(tile + size_t(r) * kLaneWidth + t)); });
    for (size_t i = t; i < count && i < t + 8; ++i) _mm256_storeu_ps(y + i * stride, _mm256_load_ps(out + 8 * (i - t)));
  }
  for (size_t r = 0; rows < 8 && r < rows; ++r)
    for (size_t t = 0; t < count; ++t) y[t * stride + r] = tile[r * kLaneWidth + t];
}

// w [rows][cols] -> [cols][8 rows], zeros after the last row.
PQ_INLINE void float_panel(const float* w, size_t rows, size_t cols, float* panel) {
  size_t k = 0;
  for (; rows == 8 && k + 8 <= cols; k += 8)
    put_eight(panel + 8 * k, [&](int r) { return _mm256_castps_si256(_mm256_loadu_ps(w + size_t(r) * cols + k)); });
  for (; k < cols; ++k)
    for (size_t r = 0; r < 8; ++r) panel[8 * k + r] = r < rows ? w[r * cols + k] : 0.0f;
}

void multiply_floats(const float* w, size_t rows, size_t cols, const FloatInputs& in, float* y, size_t stride) {
  if (in.tokens <= kFewTokens) {
    for (size_t r = 0; r < rows; ++r)
      for (size_t t = 0; t < in.tokens; ++t) y[t * stride + r] = dot_floats(w + r * cols, in.x + t * cols, cols);
    return;
  }
  auto* const panels = reinterpret_cast<float*>(scratch((rows + 7) / 8 * 8 * cols * sizeof(float)));
  const auto rows_from = [=](size_t r) { return rows - r < 8 ? rows - r : 8; };
  for (size_t r = 0; r < rows; r += 8) float_panel(w + r * cols, rows_from(r), cols, panels + r * cols);
  const auto times = [&]<int vectors>(std::integral_constant<int, vectors>, size_t token) {
    for (size_t r = 0; r < rows; r += 8) {
      alignas(64) float out[vectors][8 * kLaneWidth];
      floats_tile<vectors>(panels + r * cols, cols, in.lanes + token * cols, out[0]);
      for (size_t v = 0, t = token; v < vectors; ++v, t += kLaneWidth)
        put_floats(out[v], rows_from(r), in.tokens - t < kLaneWidth ? in.tokens - t : kLaneWidth, y + t * stride + r,
                   stride);
    }
  };
  size_t t = 0;
  for (; t + kLaneWidth < in.tokens; t += 2 * kLaneWidth) times(std::integral_constant<int, 2>{}, t);
  if (t < in.tokens) times(std::integral_constant<int, 1>{}, t);
}

void put_float_lanes(const float* x, size_t tokens, size_t cols, float* lanes) {
  for (size_t half = 0; half < kLaneWidth; half += 8) {
    size_t k = 0;
    for (; half + 8 <= tokens && k + 8 <= cols; k += 8) {
      __m256i v[8];
      for (size_t t = 0; t < 8; ++t) v[t] = _mm256_castps_si256(_mm256_loadu_ps(x + (half + t) * cols + k));
      transpose8(v);
      for (size_t i = 0; i < 8; ++i) _mm256_store_ps(lanes + (k + i) * kLaneWidth + half, _mm256_castsi256_ps(v[i]));
    }
    for (; k < cols; ++k)
      for (size_t t = half; t < half + 8; ++t) lanes[k * kLaneWidth + t] = t < tokens ? x[t * cols + k] : 0.0f;
  }
}

constexpr auto kPutFloatLanes = put_float_lanes;

// from(t): eight numbers of token t. -> lanes of tokens first ... first + 7, a register per number.
template <class From, class To>
PQ_INLINE void put_lanes(size_t first, size_t tokens, const From& from, const To& to) {
  __m256i v[8];
  PQ_UNROLL
  for (size_t t = 0; t < 8; ++t) v[t] = first + t < tokens ? bytes32(from(first + t)) : _mm256_setzero_si256();
  transpose8(v);
  PQ_UNROLL
  for (size_t i = 0; i < 8; ++i) _mm256_store_si256(reinterpret_cast<__m256i*>(to(i)), v[i]);
}

void put_side_by_side(const Activations& a, const SideBySide& to, size_t unit) {
  constexpr size_t width = kLaneWidth;
  const size_t k = a.padded, begin = unit * kUnit;
  const __m256i ones = _mm256_set1_epi8(1);
  for (size_t first = 0; first < (a.tokens + width - 1) / width * width; first += 8) {
    const size_t at = first / width * k + begin, lane = first % width;
    for (size_t i = 0; i < kUnit; i += 32) {
      int8_t* const q = to.q + width * (at + i) + 4 * lane;
      put_lanes(
          first, a.tokens, [&](size_t t) { return a.q + t * k + begin + i; },
          [&](size_t j) { return q + 4 * width * j; });
      for (size_t h = 0; h < 2; ++h) {
        __m256i sum = _mm256_setzero_si256();
        for (size_t j = 4 * h; j < 4 * h + 4; ++j) sum = dot4(sum, ones, bytes32(q + 4 * width * j));
        const __m128i total = _mm_packs_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
        _mm_store_si128(reinterpret_cast<__m128i*>(to.total16 + width * ((at + i) / 16 + h) + lane), total);
      }
    }
    const auto put = [&](const float* from, float* out, size_t per) {
      for (size_t i = 0; i < kUnit / per; i += 8)
        put_lanes(
            first, a.tokens, [&](size_t t) { return from + (t * k + begin) / per + i; },
            [&](size_t j) { return out + width * (at / per + i + j) + lane; });
    };
    put(a.scale, to.scale, 32), put(a.sum16, to.sum16, 16), put(a.sum32, to.sum32, 32);
  }
}

constexpr auto kPutSideBySide = put_side_by_side;

#elif defined(PQ_NEON)

// R rows times N tokens. Each sum has four lanes, one chain each, whatever R and N are.
template <int R, int N, class Load>
PQ_INLINE void floats_block(const uint8_t* w, size_t line, size_t size, const Load& load, size_t cols, const float* x,
                            float* y, size_t stride) {
  float32x4_t acc[R][N];
  PQ_UNROLL
  for (int i = 0; i < R * N; ++i) acc[i / N][i % N] = vdupq_n_f32(0);
  for (size_t k = 0; k < cols; k += 4) {
    float32x4_t numbers[R], inputs[N];
    uint8_t last[R][16];
    float rest[N][4];
    const bool whole = k + 4 <= cols;
    PQ_UNROLL
    for (size_t r = 0; r < R; ++r) {
      const uint8_t* from = w + r * line + size * k;
      if (!whole) [[unlikely]]
        std::memset(last[r], 0, sizeof last[r]), std::memcpy(last[r], from, size * (cols - k)), from = last[r];
      numbers[r] = load(from);
    }
    PQ_UNROLL
    for (size_t n = 0; n < N; ++n) {
      const float* from = x + n * cols + k;
      if (!whole) [[unlikely]]
        std::memset(rest[n], 0, sizeof rest[n]), std::memcpy(rest[n], from, sizeof(float) * (cols - k)), from = rest[n];
      inputs[n] = vld1q_f32(from);
    }
    PQ_UNROLL
    for (int r = 0; r < R; ++r) PQ_UNROLL
    for (int n = 0; n < N; ++n) acc[r][n] = vfmaq_f32(acc[r][n], numbers[r], inputs[n]);
  }
  PQ_UNROLL
  for (size_t r = 0; r < R; ++r) PQ_UNROLL
  for (size_t n = 0; n < N; ++n) y[n * stride + r] = vaddvq_f32(acc[r][n]);
}

// Rows of numbers of `size` bytes, by fours of rows and tokens.
template <class Load>
PQ_INLINE void floats_rows(const uint8_t* w, size_t size, const Load& load, size_t rows, size_t cols, const float* x,
                           size_t tokens, float* y, size_t stride) {
  const size_t line = size * cols;
  for (size_t t = 0; t < tokens; t += 4) {
    const size_t some = tokens - t < 4 ? tokens - t : 4;
    const auto times = [&]<int R>(std::integral_constant<int, R>, size_t r) PQ_FLAT {
      const uint8_t* from = w + r * line;
      float* to = y + t * stride + r;
      const float* in = x + t * cols;
      if (some == 4) return floats_block<R, 4>(from, line, size, load, cols, in, to, stride);
      if (some >= 2) floats_block<R, 2>(from, line, size, load, cols, in, to, stride);
      if (some % 2)
        floats_block<R, 1>(from, line, size, load, cols, in + (some - 1) * cols, to + (some - 1) * stride, stride);
    };
    size_t r = 0;
    for (; r + 4 <= rows; r += 4) times(std::integral_constant<int, 4>{}, r);
    for (; r < rows; ++r) times(std::integral_constant<int, 1>{}, r);
  }
}

void multiply_floats(const float* w, size_t rows, size_t cols, const FloatInputs& in, float* y, size_t stride) {
  const auto load = [](const uint8_t* p) PQ_FLAT { return vreinterpretq_f32_u8(vld1q_u8(p)); };
  floats_rows(reinterpret_cast<const uint8_t*>(w), sizeof(float), load, rows, cols, in.x, in.tokens, y, stride);
}

void multiply_halves(const uint8_t* w, bool bfloat, size_t rows, size_t cols, const float* x, size_t tokens, float* y,
                     size_t stride) {
  const auto halves = [](const uint8_t* p) PQ_FLAT { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); };
  const auto bfloats = [](const uint8_t* p)
                           PQ_FLAT { return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16)); };
  bfloat ? floats_rows(w, 2, bfloats, rows, cols, x, tokens, y, stride)
         : floats_rows(w, 2, halves, rows, cols, x, tokens, y, stride);
}

constexpr auto kMultiplyHalves = multiply_halves;
constexpr decltype(PackedSet::put_float_lanes) kPutFloatLanes = nullptr;
constexpr decltype(PackedSet::put_side_by_side) kPutSideBySide = nullptr;

#else

void multiply_floats(const float* w, size_t rows, size_t cols, const FloatInputs& in, float* y, size_t stride) {
  for (size_t r = 0; r < rows; ++r)
    for (size_t t = 0; t < in.tokens; ++t) {
      float lanes[8] = {};
      size_t k = 0;
      for (; k + 8 <= cols; k += 8)
        for (size_t l = 0; l < 8; ++l) lanes[l] += w[r * cols + k + l] * in.x[t * cols + k + l];
      float sum = 0;
      for (; k < cols; ++k) sum += w[r * cols + k] * in.x[t * cols + k];
      for (float l : lanes) sum += l;
      y[t * stride + r] = sum;
    }
}

constexpr decltype(PackedSet::multiply_halves) kMultiplyHalves = nullptr;
constexpr decltype(PackedSet::put_float_lanes) kPutFloatLanes = nullptr;
constexpr decltype(PackedSet::put_side_by_side) kPutSideBySide = nullptr;

#endif

// ---------------------------------------------------------------- rounding of activations

#if defined(PQ_NEON)
struct Eight {
  float32x4_t of[2];
};
#endif

PQ_INLINE F8 nearest8(const F8& x) {
#if defined(__AVX2__)
  return F8(_mm256_round_ps(__m256(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(PQ_NEON)
  const auto half = std::bit_cast<Eight>(x);
  return std::bit_cast<F8>(Eight{{vrndnq_f32(half.of[0]), vrndnq_f32(half.of[1])}});
#else
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds to integer, half to even
  return (x + magic) - magic;
#endif
}

// The largest element of each of eight vectors.
PQ_INLINE I8x largest8(const I8x (&v)[8]) {
#if defined(__AVX2__)
  __m256i half[4], pair[2];
  PQ_UNROLL
  for (int k = 0; k < 4; ++k) {
    const __m256i a = __m256i(v[k]), b = __m256i(v[k + 4]);
    half[k] = _mm256_max_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
  }
  PQ_UNROLL
  for (int k = 0; k < 2; ++k)
    pair[k] = _mm256_max_epi32(_mm256_unpacklo_epi64(half[2 * k], half[2 * k + 1]),
                               _mm256_unpackhi_epi64(half[2 * k], half[2 * k + 1]));
  const __m256 a = _mm256_castsi256_ps(pair[0]), b = _mm256_castsi256_ps(pair[1]);
  return I8x(_mm256_max_epi32(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)),
                              _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd))));
#else
  I8x out = {};
  for (int k = 0; k < 8; ++k)
    for (int l = 0; l < 8; ++l) out[k] = v[k][l] > out[k] ? v[k][l] : out[k];
  return out;
#endif
}

// Sums of the elements of each of eight vectors: halves are added to each other, then halves of these, as in the
// reference.
PQ_INLINE F8 sums8(const F8 (&e)[8]) {
#if defined(__AVX2__)
  // Halves of vectors k and k + 4 are added side by side, then pairs of their elements, then elements.
  __m256 half[4], pair[2];
  PQ_UNROLL
  for (int k = 0; k < 4; ++k) {
    const __m256 a = __m256(e[k]), b = __m256(e[k + 4]);
    half[k] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  }
  PQ_UNROLL
  for (int k = 0; k < 2; ++k)
    pair[k] = _mm256_add_ps(_mm256_shuffle_ps(half[2 * k], half[2 * k + 1], 0x44),
                            _mm256_shuffle_ps(half[2 * k], half[2 * k + 1], 0xee));
  return F8(_mm256_add_ps(_mm256_shuffle_ps(pair[0], pair[1], 0x88), _mm256_shuffle_ps(pair[0], pair[1], 0xdd)));
#else
  F8 out;
  for (int k = 0; k < 8; ++k) {
    const float four[4] = {e[k][0] + e[k][4], e[k][1] + e[k][5], e[k][2] + e[k][6], e[k][3] + e[k][7]};
    out[k] = (four[0] + four[2]) + (four[1] + four[3]);
  }
  return out;
#endif
}

// 32 floats -> codes; the sums of the first and of the last sixteen are those of the halves of the result.
PQ_INLINE I8x put_codes(const F8 (&x)[4], int8_t* q) {
#if defined(__AVX2__)
  const auto whole = [&](int i) { return _mm256_cvtps_epi32(__m256(x[i])); };
  const __m256i mixed =
      _mm256_packs_epi16(_mm256_packs_epi32(whole(0), whole(1)), _mm256_packs_epi32(whole(2), whole(3)));
  const __m256i codes = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), codes);
  return I8x(dot4(_mm256_setzero_si256(), _mm256_set1_epi8(1), codes));
#elif defined(PQ_NEON)
  int32x4_t sums[2];
  PQ_UNROLL
  for (int h = 0; h < 2; ++h) {
    const auto words = [&](int i) PQ_FLAT {
      const auto eight = std::bit_cast<Eight>(x[i]);
      return vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(eight.of[0])), vqmovn_s32(vcvtnq_s32_f32(eight.of[1])));
    };
    const int8x16_t codes = vcombine_s8(vqmovn_s16(words(2 * h)), vqmovn_s16(words(2 * h + 1)));
    vst1q_s8(q + 16 * h, codes);
    sums[h] = dot4(vdupq_n_s32(0), vdupq_n_s8(1), codes);
  }
  I8x out;
  std::memcpy(&out, sums, sizeof out);
  return out;
#else
  I8x sums = {};
  for (int i = 0; i < 4; ++i) {
    const F8 whole = nearest8(x[i]);
    for (int l = 0; l < 8; ++l) {
      q[8 * i + l] = std::fabs(whole[l]) <= 127 ? int8_t(whole[l]) : int8_t(0);  // NaN in the row: any number
      sums[i < 2 ? 0 : 4] += q[8 * i + l];
    }
  }
  return sums;
#endif
}

// Sums of the halves of eight vectors.
PQ_INLINE void sum_halves(const I8x (&v)[8], I8x* low, I8x* high) {
#if defined(__AVX2__)
  const auto four = [&](int k) {
    return _mm256_hadd_epi32(_mm256_hadd_epi32(__m256i(v[k]), __m256i(v[k + 1])),
                             _mm256_hadd_epi32(__m256i(v[k + 2]), __m256i(v[k + 3])));
  };
  const __m256i a = four(0), b = four(4);
  *low = I8x(_mm256_permute2x128_si256(a, b, 0x20)), *high = I8x(_mm256_permute2x128_si256(a, b, 0x31));
#else
  for (int k = 0; k < 8; ++k) {
    (*low)[k] = (v[k][0] + v[k][1]) + (v[k][2] + v[k][3]);
    (*high)[k] = (v[k][4] + v[k][5]) + (v[k][6] + v[k][7]);
  }
#endif
}

// Codes, scales and scales * sums of at most eight groups of 32, whose scaled elements are x(group, vector). A group
// with a scale of NaN has codes of zero.
template <class X>
PQ_INLINE void put_groups(size_t count, const F8& scales, X&& x, int8_t* q, float* scale, float* sum16, float* sum32) {
  I8x sums[8] = {}, low, high;
  for (size_t g = 0; g < count; ++g) {
    const F8 scaled[4] = {x(g, 0), x(g, 1), x(g, 2), x(g, 3)};
    sums[g] = put_codes(scaled, q + 32 * g);
  }
  sum_halves(sums, &low, &high);
  const F8 a = scales * to_floats(low), b = scales * to_floats(high), both = scales * to_floats(low + high);
  float pairs[16];
  for (int g = 0; g < 8; ++g) pairs[2 * g] = a[g], pairs[2 * g + 1] = b[g];
  std::memcpy(scale, &scales, count * sizeof(float)), std::memcpy(sum32, &both, count * sizeof(float));
  std::memcpy(sum16, pairs, 2 * count * sizeof(float));
  for (size_t g = 0; g < count; ++g)
    if (scales[g] != scales[g]) std::memset(q + 32 * g, 0, 32);
}

constexpr int32_t kInfinity = 0x7f800000;

PQ_INLINE F8 floats_at(const float* x) {
  F8 v;
  std::memcpy(&v, x, sizeof v);
  return v;
}

// |x|, as integers that are ordered alike; NaN is above kInfinity.
PQ_INLINE I8x magnitudes(const float* x) {
  I8x v;
  std::memcpy(&v, x, sizeof v);
  return v & 0x7fffffff;
}

PQ_INLINE I8x larger(const I8x& a, const I8x& b) { return a > b ? a : b; }

// At most eight parts of `groups` groups of 32 with one scale each: of max|x| / 127 ... max|x| / 120, the first with
// the least squared error. Part p has lane p in each vector of scales and errors.
template <int groups>
void round_parts(size_t parts, const float* x, int8_t* q, float* scale, float* sum16, float* sum32) {
  constexpr int vectors = 4 * groups;
  I8x tops[8] = {};
  for (size_t p = 0; p < parts; ++p)
    for (int i = 0; i < vectors; ++i) tops[p] = larger(tops[p], magnitudes(x + 8 * (vectors * p + size_t(i))));
  const I8x bits = largest8(tops);
  const F8 top = F8(bits);
  F8 inverses[8], errors[8][8];
  PQ_UNROLL
  for (int k = 0; k < 8; ++k) inverses[k] = float(127 - k) / top;
  for (size_t p = 0; p < 8; ++p) {
    F8 e[8] = {};
    for (int i = 0; p < parts && i < vectors; ++i) {
      const F8 v = floats_at(x + 8 * (vectors * p + size_t(i)));
      PQ_UNROLL
      for (int k = 0; k < 8; ++k) {
        const F8 scaled = v * inverses[k][p], off = nearest8(scaled) - scaled;
        e[k] += off * off;
      }
    }
    PQ_UNROLL
    for (int k = 0; k < 8; ++k) errors[k][p] = e[k];
  }
  F8 least = all(std::numeric_limits<float>::infinity()), inverse = {}, size = {};
  PQ_UNROLL
  for (int k = 0; k < 8; ++k) {
    const F8 s = top / float(127 - k), error = sums8(errors[k]) * (s * s);
    const auto less = error < least;
    least = less ? error : least, inverse = less ? inverses[k] : inverse, size = less ? s : size;
  }
  const F8 zero = {};
  inverse = top > 1e-30f ? inverse : zero, size = top > 1e-30f ? size : zero;
  size = bits < kInfinity ? size : all(std::numeric_limits<float>::quiet_NaN());
  constexpr size_t together = 8 / groups;  // parts
  for (size_t p = 0; p < parts; p += together) {
    const size_t count = groups * (parts - p < together ? parts - p : together);
    F8 scales = {};
    for (size_t g = 0; g < 8; ++g) scales[g] = size[p + g / groups];
    const auto scaled = [&](size_t g, size_t i) {
      return floats_at(x + 8 * (vectors * p + 4 * g + i)) * inverse[p + g / groups];
    };
    const size_t b = groups * p;
    put_groups(count, scales, scaled, q + 32 * b, scale + b, sum16 + 2 * b, sum32 + b);
  }
}

template <int groups>
void round_all(const float* x, size_t blocks, int8_t* q, float* scale, float* sum16, float* sum32) {
  for (size_t b = 0; b < blocks; b += 8 * groups) {
    const size_t parts = (blocks - b) / groups < 8 ? (blocks - b) / groups : 8;
    round_parts<groups>(parts, x + 32 * b, q + 32 * b, scale + b, sum16 + 2 * b, sum32 + b);
  }
}

void round_blocks(const float* x, size_t blocks, bool wide, int8_t* q, float* scale, float* sum16, float* sum32) {
  (wide ? round_all<4> : round_all<1>)(x, blocks, q, scale, sum16, sum32);
}

// count elements, zero-padded to 32 * blocks, with one scale.
void round_token(const float* x, size_t count, size_t blocks, int8_t* q, float* scale, float* sum16, float* sum32) {
  const size_t whole = count / 256 * 8;
  float rest[256] = {};
  std::memcpy(rest, x + 32 * whole, (count - 32 * whole) * sizeof(float));
  I8x tops[8] = {};
  for (size_t i = 0; i < 4 * whole; ++i) tops[i % 8] = larger(tops[i % 8], magnitudes(x + 8 * i));
  for (size_t i = 0; i < 32; ++i) tops[i % 8] = larger(tops[i % 8], magnitudes(rest + 8 * i));
  const I8x some = largest8(tops);
  int32_t bits = 0;
  for (int l = 0; l < 8; ++l) bits = some[l] > bits ? some[l] : bits;
  const float top = std::bit_cast<float>(bits), s = (top > 1e-5f ? top : 1e-5f) / 127.0f;
  const F8 scales = all(bits < kInfinity ? s : std::numeric_limits<float>::quiet_NaN());
  for (size_t b = 0; b < blocks; b += 8) {
    const float* from = b < whole ? x + 32 * b : rest;
    put_groups(
        blocks - b < 8 ? blocks - b : 8, scales,
        [&](size_t g, size_t i) { return floats_at(from + 32 * g + 8 * i) / s; }, q + 32 * b, scale + b, sum16 + 2 * b,
        sum32 + b);
  }
}

// ---------------------------------------------------------------- the table

#define PQ_TYPE(name, ...)                                                                                   \
  PackedKernel {                                                                                             \
    name, __VA_ARGS__::block, __VA_ARGS__::bytes, int(kLanes<__VA_ARGS__>), multiply<__VA_ARGS__>,           \
        dequantize_row<__VA_ARGS__>, nullptr, kAlone<__VA_ARGS__>, kTiled<__VA_ARGS__>, kOrders<__VA_ARGS__> \
  }

constexpr PackedKernel kKernels[] = {
    PQ_TYPE("q4_0", NibbleCodes<false, false>),
    PQ_TYPE("q4_1", NibbleCodes<true, false>),
    PQ_TYPE("q5_0", NibbleCodes<false, true>),
    PQ_TYPE("q5_1", NibbleCodes<true, true>),
    PQ_TYPE("q8_0", ByteCodes<2>),
    PQ_TYPE("q8_1", ByteCodes<4>),
    PQ_TYPE("q1_0", Q1_0Codes),
    PQ_TYPE("q2_0", Q2_0Codes),
    PQ_TYPE("q2_k", Q2_KCodes),
    PQ_TYPE("q3_k", Q3_KCodes),
    PQ_TYPE("q4_k", Q4_KCodes),
    PQ_TYPE("q5_k", Q5_KCodes),
    PQ_TYPE("q6_k", Q6_KCodes),
    PQ_TYPE("q8_k", Q8_KCodes),
    PQ_TYPE("iq1_s", Iq1SCodes),
    PQ_TYPE("iq1_m", Iq1MCodes),
    PQ_TYPE("iq2_xxs", Iq2XxsCodes),
    PQ_TYPE("iq2_xs", Iq2XsCodes),
    PQ_TYPE("iq2_s", Iq2SCodes),
    PQ_TYPE("iq3_xxs", Iq3XxsCodes),
    PQ_TYPE("iq3_s", Iq3SCodes),
    PQ_TYPE("iq4_nl", Iq4NlCodes),
    PQ_TYPE("iq4_xs", Iq4XsCodes),
    PQ_TYPE("mxfp4", Mxfp4Codes),
    PQ_TYPE("nvfp4", Nvfp4Codes),
    PQ_TYPE("tq1_0", Tq1Codes),
    PQ_TYPE("tq2_0", Tq2Codes),
    PQ_TYPE("i2_s.x86", I2SX86Codes),
    PQ_TYPE("i2_s.arm", I2SArmCodes),
    PQ_TYPE("i2_s.x4", QuadCodes<true>),
    PQ_TYPE("hf_bitnet", QuadCodes<false>),
    PQ_TYPE("trinity.i2_s", TrinityCodes<0>),
    PQ_TYPE("trinity.tq2_0", TrinityCodes<2>),
};

#undef PQ_TYPE

constexpr PackedSet kSet{kKernels,        round_blocks,   round_token,   multiply_floats,
                         kMultiplyHalves, kPutFloatLanes, kPutSideBySide};

}  // namespace
}  // namespace polyquant
