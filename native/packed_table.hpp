// The rounding of activations, and the table of packed kernels for one instruction set: included by packed_plain.cpp,
// packed_avx2.cpp and packed_vnni.cpp.
#include <bit>
#include <cmath>
#include <utility>

#include "packed_kernels.hpp"

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

// panel [cols][8 rows]
template <int N>
PQ_INLINE void floats_times(const float* panel, size_t rows, size_t cols, const float* x, float* y, size_t stride) {
  __m256 acc[N];
  for (int n = 0; n < N; ++n) acc[n] = _mm256_setzero_ps();
  for (size_t k = 0; k < cols; ++k) {
    const __m256 w = _mm256_load_ps(panel + 8 * k);
    for (int n = 0; n < N; ++n) acc[n] = _mm256_fmadd_ps(w, _mm256_broadcast_ss(x + size_t(n) * cols + k), acc[n]);
  }
  for (int n = 0; n < N; ++n) {
    alignas(32) float out[8];
    _mm256_store_ps(out, acc[n]);
    for (size_t r = 0; r < rows; ++r) y[size_t(n) * stride + r] = out[r];
  }
}

void multiply_floats(const float* w, size_t rows, size_t cols, const float* x, size_t tokens, float* y, size_t stride) {
  if (tokens <= kFewTokens) {
    for (size_t r = 0; r < rows; ++r)
      for (size_t t = 0; t < tokens; ++t) y[t * stride + r] = dot_floats(w + r * cols, x + t * cols, cols);
    return;
  }
  auto* panel = reinterpret_cast<float*>(scratch(8 * cols * sizeof(float)));
  size_t k = 0;
  for (; rows == 8 && k + 8 <= cols; k += 8)
    put_eight(panel + 8 * k, [&](int r) { return _mm256_castps_si256(_mm256_loadu_ps(w + size_t(r) * cols + k)); });
  for (; k < cols; ++k)
    for (size_t r = 0; r < 8; ++r) panel[8 * k + r] = r < rows ? w[r * cols + k] : 0.0f;
  size_t t = 0;
  for (; t + 8 <= tokens; t += 8) floats_times<8>(panel, rows, cols, x + t * cols, y + t * stride, stride);
  const auto rest = [&]<int N>() {  // of the other tokens, at most seven
    if (tokens - t == N) floats_times<N>(panel, rows, cols, x + t * cols, y + t * stride, stride);
  };
  [&]<int... n>(std::integer_sequence<int, n...>) {
    (rest.template operator()<n + 1>(), ...);
  }(std::make_integer_sequence<int, 7>{});
}

#else

void multiply_floats(const float* w, size_t rows, size_t cols, const float* x, size_t tokens, float* y, size_t stride) {
  for (size_t r = 0; r < rows; ++r)
    for (size_t t = 0; t < tokens; ++t) {
      float lanes[8] = {};
      size_t k = 0;
      for (; k + 8 <= cols; k += 8)
        for (size_t l = 0; l < 8; ++l) lanes[l] += w[r * cols + k + l] * x[t * cols + k + l];
      float sum = 0;
      for (; k < cols; ++k) sum += w[r * cols + k] * x[t * cols + k];
      for (float l : lanes) sum += l;
      y[t * stride + r] = sum;
    }
}

#endif

// ---------------------------------------------------------------- rounding of activations

PQ_INLINE F8 nearest8(const F8& x) {
#if defined(__AVX2__)
  return F8(_mm256_round_ps(__m256(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
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
#else
  I8x sums = {};
  for (int i = 0; i < 4; ++i) {
    const F8 whole = nearest8(x[i]);
    for (int l = 0; l < 8; ++l) {
      q[8 * i + l] = std::isfinite(whole[l]) ? int8_t(whole[l]) : int8_t(0);
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

#define PQ_TYPE(name, ...)                                                                         \
  PackedKernel {                                                                                   \
    name, __VA_ARGS__::block, __VA_ARGS__::bytes, int(kLanes<__VA_ARGS__>), multiply<__VA_ARGS__>, \
        dequantize_row<__VA_ARGS__>, nullptr, kAlone<__VA_ARGS__>                                  \
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

}  // namespace
}  // namespace polyquant
