// The rounding of activations, and the table of packed kernels for one instruction set: included by packed_plain.cpp,
// packed_avx2.cpp and packed_vnni.cpp.
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

// Pairwise sum of halves, as in the reference.
PQ_INLINE float tree8(const F8& e) {
#if defined(__AVX2__)
  return sum8(__m256(e));
#else
  const float four[4] = {e[0] + e[4], e[1] + e[5], e[2] + e[6], e[3] + e[7]};
  return (four[0] + four[2]) + (four[1] + four[3]);
#endif
}

// 32 integers -> codes, their scale, scale * their sums; NaN if the block holds NaN or infinity.
PQ_INLINE void finish_block(const F8* rounded, float scale, bool finite, int8_t* q, float* out_scale, float* sum16,
                            float* sum32) {
  const float s = finite ? scale : std::numeric_limits<float>::quiet_NaN();
  *out_scale = s;
  int low = 0, high = 0;
  if (!finite) {
    std::memset(q, 0, 32);
  } else {
#if defined(__AVX2__)
    const auto whole = [&](int i) { return _mm256_cvtps_epi32(__m256(rounded[i])); };
    const __m256i mixed =
        _mm256_packs_epi16(_mm256_packs_epi32(whole(0), whole(1)), _mm256_packs_epi32(whole(2), whole(3)));
    const __m256i codes = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), codes);
    __m256i sums = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), codes), _mm256_set1_epi16(1));
    sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0x4e));
    sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0xb1));
    low = _mm256_extract_epi32(sums, 0), high = _mm256_extract_epi32(sums, 4);
#else
    for (int j = 0; j < 32; ++j) {
      q[j] = int8_t(int(rounded[j / 8][j % 8]));
      (j < 16 ? low : high) += q[j];
    }
#endif
  }
  sum16[0] = s * float(low), sum16[1] = s * float(high);
  *sum32 = s * float(low + high);
}

PQ_INLINE float largest32(const float* x, bool* finite) {
  F8 v[4];
  std::memcpy(v, x, sizeof v);
  const F8 zeros = (v[0] * 0.0f + v[1] * 0.0f) + (v[2] * 0.0f + v[3] * 0.0f);  // NaN if x is NaN or infinite
  F8 top = {};
  for (int i = 0; i < 4; ++i) {
    const F8 a = v[i] < 0.0f ? -v[i] : v[i];
    top = a > top ? a : top;
  }
#if defined(__AVX2__)
  *finite = *finite && _mm256_movemask_ps(_mm256_cmp_ps(__m256(zeros), __m256(zeros), _CMP_UNORD_Q)) == 0;
  __m128 most = _mm_max_ps(_mm256_castps256_ps128(__m256(top)), _mm256_extractf128_ps(__m256(top), 1));
  most = _mm_max_ps(most, _mm_movehl_ps(most, most));
  return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
#else
  float most = 0, sum = 0;
  for (int l = 0; l < 8; ++l) most = top[l] > most ? top[l] : most, sum += zeros[l];
  *finite = *finite && sum == 0;
  return most;
#endif
}

// tree8 of eight vectors.
PQ_INLINE F8 trees8(const F8 (&e)[8]) {
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
  for (int k = 0; k < 8; ++k) out[k] = tree8(e[k]);
  return out;
#endif
}

// Index of the first of the least errors, -1 if none is below infinity.
PQ_INLINE int first_least(const F8& error) {
#if defined(__AVX2__)
  const __m256 infinity = _mm256_set1_ps(std::numeric_limits<float>::infinity()), x = __m256(error);
  const __m256 below = _mm256_min_ps(x, infinity);  // the second operand for NaN
  __m256 least = _mm256_min_ps(below, _mm256_permute2f128_ps(below, below, 1));
  least = _mm256_min_ps(least, _mm256_permute_ps(least, 0x4e));
  least = _mm256_min_ps(least, _mm256_permute_ps(least, 0xb1));
  const __m256 found = _mm256_and_ps(_mm256_cmp_ps(x, least, _CMP_EQ_OQ), _mm256_cmp_ps(x, infinity, _CMP_LT_OQ));
  const int mask = _mm256_movemask_ps(found);
  return mask ? __builtin_ctz(unsigned(mask)) : -1;
#else
  int best = -1;
  float least = std::numeric_limits<float>::infinity();
  for (int k = 0; k < 8; ++k)
    if (error[k] < least) best = k, least = error[k];
  return best;
#endif
}

// Candidates for the scale of some groups: max|x| / 127 ... max|x| / 120, and their squared errors.
struct Candidates {
  F8 inverses, sizes, errors;
  bool any, finite;
};

template <int groups>
PQ_INLINE Candidates candidates(const float* x) {
  Candidates c{{}, {}, {}, false, true};
  float top = 0;
  for (int g = 0; g < groups; ++g) {
    const float t = largest32(x + 32 * g, &c.finite);
    top = t > top ? t : top;
  }
  F8 v[4 * groups];
  std::memcpy(v, x, sizeof v);
  if (!(top > 1e-30f)) return c;
  const F8 steps = {127, 126, 125, 124, 123, 122, 121, 120};
  c.any = true, c.inverses = steps / top, c.sizes = top / steps;
  F8 errors[8];
  PQ_UNROLL
  for (int k = 0; k < 8; ++k) {
    F8 e = {};
    for (int i = 0; i < 4 * groups; ++i) {
      const F8 x8 = v[i] * c.inverses[k], off = nearest8(x8) - x8;
      e += off * off;
    }
    errors[k] = e;
  }
  c.errors = trees8(errors) * (c.sizes * c.sizes);
  return c;
}

// `count` scales, each of `groups` groups of 32. Each step is a long chain of operations: several at once overlap.
template <int groups, int count>
void round_groups(const float* x, int8_t* q, float* scale, float* sum16, float* sum32) {
  Candidates c[count];
  float inverse[count], size[count];
  for (int i = 0; i < count; ++i) c[i] = candidates<groups>(x + 32 * groups * i);
  for (int i = 0; i < count; ++i) {
    const int k = c[i].any ? first_least(c[i].errors) : -1;
    float both[2][8];
    std::memcpy(both[0], &c[i].inverses, 32), std::memcpy(both[1], &c[i].sizes, 32);
    inverse[i] = k < 0 ? 0.0f : both[0][k], size[i] = k < 0 ? 0.0f : both[1][k];
  }
  for (int i = 0; i < count; ++i)
    for (int g = groups * i; g < groups * (i + 1); ++g) {
      F8 rounded[4];
      std::memcpy(rounded, x + 32 * g, sizeof rounded);
      for (F8& r : rounded) r = nearest8(r * inverse[i]);
      finish_block(rounded, size[i], c[i].finite, q + 32 * g, scale + g, sum16 + 2 * g, sum32 + g);
    }
}

template <int groups>
void round_all(const float* x, size_t blocks, int8_t* q, float* scale, float* sum16, float* sum32) {
  constexpr size_t together = 4 * groups;
  size_t b = 0;
  for (; b + together <= blocks; b += together)
    round_groups<groups, 4>(x + 32 * b, q + 32 * b, scale + b, sum16 + 2 * b, sum32 + b);
  for (; b < blocks; b += groups) round_groups<groups, 1>(x + 32 * b, q + 32 * b, scale + b, sum16 + 2 * b, sum32 + b);
}

void round_blocks(const float* x, size_t blocks, bool wide, int8_t* q, float* scale, float* sum16, float* sum32) {
  (wide ? round_all<4> : round_all<1>)(x, blocks, q, scale, sum16, sum32);
}

// count elements, zero-padded to 32 * blocks, with one scale.
void round_token(const float* x, size_t count, size_t blocks, int8_t* q, float* scale, float* sum16, float* sum32) {
  const auto group = [&](size_t b, float* out) {
    std::memset(out, 0, 32 * sizeof(float));
    if (count > 32 * b) std::memcpy(out, x + 32 * b, (count - 32 * b < 32 ? count - 32 * b : 32) * sizeof(float));
  };
  bool finite = true;
  float top = 1e-5f, some[32];
  for (size_t b = 0; b < blocks; ++b) {
    group(b, some);
    const float t = largest32(some, &finite);
    top = t > top ? t : top;
  }
  const float s = top / 127.0f;
  for (size_t b = 0; b < blocks; ++b) {
    group(b, some);
    F8 rounded[4];
    std::memcpy(rounded, some, sizeof rounded);
    for (F8& r : rounded) r = nearest8(r / s);
    finish_block(rounded, s, finite, q + 32 * b, scale + b, sum16 + 2 * b, sum32 + b);
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
