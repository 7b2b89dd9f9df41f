// The products of packed weights for one instruction set: included by the packed_* and grouped_* files of each,
// compiled with its flags. Everything is in an unnamed namespace: no two sets share a function.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#if defined(__AVX2__)
#include "base/dots.hpp"
#elif defined(PQ_NEON)
#include "base/dots_neon.hpp"
#endif

#define PQ_UNROLL _Pragma("GCC unroll 8")
#define PQ_IN_MEMORY(array) asm("" : "+m"(array))  // or the compiler extracts elements from a register

#include "base/with_constant.hpp"
#include "packed/codes_iq.hpp"
#include "packed/packed.hpp"
#include "packed/table_rows.hpp"

namespace polyquant {
namespace {

// Codes whose scales are in tables (grouped/codes.hpp).
template <class T>
concept Tabled = requires { T::slack; };

// Rows that share a line: a compile-time constant, because a division would take a fair part of the time of a short
// row.
template <class T>
constexpr size_t kLanes = 1;
template <class T>
  requires(T::lanes > 0)
constexpr size_t kLanes<T> = T::lanes;

// Every offset is -kCentre * d; 0: offsets are separate.
template <class T>
constexpr int kCentre = 0;
template <class T>
  requires(T::centre > 0)
constexpr int kCentre<T> = T::centre;
template <class T>
  requires(T::zero > 0)
constexpr int kCentre<T> = T::zero;

// The largest number of tokens that need no Activations::lanes.
template <class T>
constexpr size_t kAlone = kFewTokens;

// Whether few tokens are read in the orders of Activations::paired and apart.
template <class T>
constexpr bool kOrders = true;

// The least number of tokens that are multiplied in tiles. Fewer are faster while they are unpacked, and sums of 16
// columns are stored so often that tiles gain nothing.
template <class T>
constexpr size_t kTiled = T::sub == 32 ? 9 : kNever;

template <class T>
PQ_INLINE const uint8_t* line_of(const PackedMatrix& w, size_t v) {
  return w.data + v / kLanes<T> * w.line_bytes;
}

template <class T>
PQ_INLINE size_t row_of(const PackedMatrix& w, size_t v) {
  return kLanes<T> == 1 ? v : v / kLanes<T> * w.row_step + v % kLanes<T> * w.lane_step;
}

// A row, to take its codes from.
template <class T>
struct Row {
  const uint8_t* line;
  int lane;
};

// With its scales and offsets, one per sub-block of the padded row, and the end of all codes.
template <Tabled T>
struct Row<T> {
  const uint8_t* line;
  size_t whole;  // units that may be read in place
  const float *d, *m;
};

template <class T>
constexpr size_t kUnitBytes = size_t(256 / T::block * T::bytes);

// Floats that `row_at` needs per row.
template <class T>
PQ_INLINE size_t table_floats(size_t) {
  return 0;
}
template <Tabled T>
PQ_INLINE size_t table_floats(size_t cols) {
  return kTableRows * ((cols + kUnit - 1) / kUnit * size_t(256 / T::sub) + kMore);
}

// `take` reads up to T::slack bytes beyond a unit: not beyond the codes.
template <Tabled T>
PQ_INLINE size_t whole_units(const PackedMatrix& w, size_t v) {
  const size_t full = w.cols / kUnit, left = w.owned - v * w.line_bytes;
  return full && T::slack && full * kUnitBytes<T> + T::slack > left ? full - 1 : full;
}

template <class T>
PQ_INLINE Row<T> row_at(const PackedMatrix& w, size_t v, float*) {
  return {line_of<T>(w, v), int(v % kLanes<T>)};
}
template <Tabled T>
PQ_INLINE Row<T> row_at(const PackedMatrix& w, size_t v, float* room) {
  const size_t each = table_floats<T>(w.cols) / kTableRows;
  fill_tables(w, v, T::sub, T::shift, T::halved, room, each);
  return {w.data + v * w.line_bytes, whole_units<T>(w, v), room, room + each};
}

// The bytes of unit `u` (256 weights) of a row. A partial unit is completed with zero bytes in `room`: the activations
// are 0 there.
template <class T>
PQ_INLINE const uint8_t* whole_unit(const uint8_t* line, size_t u, size_t cols, uint8_t (&room)[kUnitBytes<T>]) {
  const uint8_t* b = line + u * sizeof room;
  if (cols >= (u + 1) * kUnit) [[likely]]
    return b;
  std::memset(room, 0, sizeof room);
  std::memcpy(room, b, (cols - u * kUnit) / size_t(T::block) * size_t(T::bytes));
  return room;
}

template <class T>
PQ_INLINE const uint8_t* unit_at(const Row<T>& row, size_t u) {
  return row.line + u * kUnitBytes<T>;
}

// Codebook types, whose blocks are units.
template <class T>
concept LooksUp = T::block == kUnit && requires(const uint8_t* b, Lookups& at) { T::look(b, at); };

// Codes of unit `u` of a row. apart: by `take_apart`.
template <class T, bool apart = false>
PQ_INLINE void take_unit(const Row<T>& row, size_t u, size_t cols, Codes& c) {
  if constexpr (LooksUp<T>) {
    const uint8_t* const b = unit_at(row, u);
    Lookups at;
    T::look(b, at);
    PQ_IN_MEMORY(at);
    T::take(b, at, c);
  } else {
    uint8_t room[kUnitBytes<T>];
    T::take(whole_unit<T>(row.line, u, cols, room), row.lane, c);
  }
}

// Types whose codes are multiplied in the order of Activations::apart, which costs less to unpack.
template <class T>
concept Apart = requires(const uint8_t* b, Codes& c) { T::take_apart(b, c); };

template <Tabled T, bool apart = false>
PQ_INLINE void take_unit(const Row<T>& row, size_t u, size_t cols, Codes& c) {
  constexpr size_t size = kUnitBytes<T>, subs = 256 / T::sub;
  const uint8_t* b = row.line + u * size;
  std::memcpy(c.d, row.d + u * subs, subs * sizeof(float));
  std::memcpy(c.m, row.m + u * subs, subs * sizeof(float));
  uint8_t padded[size + T::slack];
  if (u >= row.whole) [[unlikely]] {
    const size_t left = cols - u * kUnit;
    std::memset(padded, 0, sizeof padded);
    std::memcpy(padded, b, (left < kUnit ? left : kUnit) / size_t(T::block) * size_t(T::bytes));
    b = padded;
  }
  if constexpr (apart)
    T::take_apart(b, c);
  else
    T::take(b, c);
}

// Units one after another, of one or several rows. Indices are made one unit ahead: loads that wait for the
// instructions that make their addresses would fill the queue of loads.
template <class T, bool apart = false>
class OneAhead {
 public:
  PQ_INLINE explicit OneAhead(const uint8_t* first) { look(first); }
  // next: the unit that is taken next; null after the last.
  PQ_INLINE void take(const Row<T>& row, size_t u, size_t cols, const uint8_t* next, Codes& c) {
    if constexpr (LooksUp<T>) {
      const Lookups& now = at_[turn_];
      turn_ ^= 1;
      if (next) look(next);
      PQ_IN_MEMORY(at_);
      T::take(unit_at(row, u), now, c);
    } else {
      take_unit<T, apart>(row, u, cols, c);
    }
  }

 private:
  PQ_INLINE void look(const uint8_t* b) {
    if constexpr (LooksUp<T>) T::look(b, at_[turn_]);
  }

  Lookups at_[LooksUp<T> ? 2 : 1];
  size_t turn_ = 0;
};

// Position of weight j of a unit among its codes: paired types exchange the second and third quarter of each 64.
template <class T>
constexpr int place(int j) {
  return !T::paired || ((j >> 4 & 1) == (j >> 5 & 1)) ? j : j ^ 48;
}

template <class T>
void dequantize_row(const PackedMatrix& w, size_t v, float* row) {
  const Row<T> from = row_at<T>(w, v, nullptr);
  for (size_t u = 0; u * kUnit < w.cols; ++u) {
    Codes c;
    take_unit(from, u, w.cols, c);
    const int count = w.cols - u * kUnit < kUnit ? int(w.cols - u * kUnit) : 256;
    for (int j = 0; j < count; ++j) {
      const float x = c.d[j / T::sub] * float(c.q[place<T>(j)]);
      row[u * kUnit + j] = T::offset ? x + c.m[j / T::sub] : x;
    }
  }
}

// The hardware prefetcher stops at the end of each 4 KiB page: without this, every page starts with a wait for memory.
// To the second cache: the first is for the activations, and a row of 14336 columns is up to 1.7 times as fast so.
template <size_t bytes>
PQ_INLINE void fetch_ahead(const uint8_t* p) {
  constexpr size_t ahead = 12288;
  PQ_UNROLL
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + ahead + i, 0, 2);
}

#if defined(__AVX2__)

PQ_INLINE __m256i bytes32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

PQ_INLINE float sum8(__m256 x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

// As dot4, for codes that may be negative: |w| times a with the sign of w. |w| = 128 and |a| = 127 still fit.
template <class T>
PQ_INLINE __m256i dot32(__m256i w, __m256i a) {
  const __m256i zero = _mm256_setzero_si256();
  return T::top ? dot4(zero, w, a) : dot4(zero, _mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
}

// As dot32, for two vectors of codes; two pairs of products of unsigned codes fit 16 bits.
template <class T>
PQ_INLINE __m256i dot64(__m256i w, __m256i a, __m256i w2, __m256i a2) {
  constexpr bool in_16 = !kDotsBytes && T::top != 0 && T::top <= 63;
  if constexpr (in_16) {
    const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(w, a), _mm256_maddubs_epi16(w2, a2));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  } else if constexpr (T::top != 0) {
    return dot4(dot4(_mm256_setzero_si256(), w, a), w2, a2);
  } else {
    return dot4(dot4(_mm256_setzero_si256(), _mm256_abs_epi8(w), _mm256_sign_epi8(a, w)), _mm256_abs_epi8(w2),
                _mm256_sign_epi8(a2, w2));
  }
}

// Element i in the lower half, element i + 1 in the upper. Where unpacking leaves the shuffle ports free, this is
// faster than to store the elements and to load them as pairs.
PQ_INLINE __m256 two_lanes(__m256 x, int i) {
  return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(i, i, i, i, i + 1, i + 1, i + 1, i + 1));
}

// The first scale for the lower half, that `step` further for the upper: as loads, where the shuffle ports are busy.
PQ_INLINE __m256 two_scales(const float* s, int step) {
  return _mm256_blend_ps(_mm256_broadcast_ss(s), _mm256_broadcast_ss(s + step), 0xf0);
}

// Of sub-blocks of 16, the first in vector b of a unit.
template <class T>
constexpr int first_of(int b) {
  return T::paired ? b / 2 * 4 + b % 2 : 2 * b;
}

// Sums of products of 128 small codes, at most 3 each.
PQ_INLINE __m256i dot128(const int8_t* w, const int8_t* a) {
  if constexpr (kDotsBytes) {
    __m256i sum = _mm256_setzero_si256();
    for (int g = 0; g < 4; ++g) sum = dot4(sum, bytes32(w + 32 * g), bytes32(a + 32 * g));
    return sum;
  }
  const auto pairs = [&](int g) { return _mm256_maddubs_epi16(bytes32(w + 32 * g), bytes32(a + 32 * g)); };
  const __m256i sum = _mm256_add_epi16(_mm256_add_epi16(pairs(0), pairs(1)), _mm256_add_epi16(pairs(2), pairs(3)));
  return _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
}

// Rows times up to four tokens: the codes of a unit are made once and stay in L1.
template <class T, int N, bool wide>
void rows_times(const PackedMatrix& w, size_t first, size_t last, const Activations& a, size_t token, float* y,
                size_t stride) {
  constexpr size_t unit_bytes = kUnitBytes<T>;
  const size_t cols = w.cols, units = a.padded / kUnit, blocks = a.padded / 32;
  float* const room = Tabled<T> ? table_scratch(table_floats<T>(cols)) : nullptr;
  const int8_t* const q0 = (Apart<T> ? a.apart : T::paired ? a.paired : a.q) + token * a.padded;
  const float *const scale0 = a.scale + token * blocks, *const sum0 = (T::sub == 32 ? a.sum32 : a.sum16) +
                                                                      token * blocks * size_t(32 / T::sub);
  for (size_t v = first; v < last; ++v) {
    const Row<T> row = row_at<T>(w, v, room);
    __m256 acc[N][4];
    PQ_UNROLL
    for (int n = 0; n < N; ++n) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = _mm256_setzero_ps();
    OneAhead<T, Apart<T>> codes(row.line);
    for (size_t u = 0; u < units; ++u) {
      Codes c;
      fetch_ahead<unit_bytes>(row.line + u * unit_bytes);
      codes.take(row, u, cols, u + 1 < units ? unit_at(row, u + 1) : nullptr, c);
      PQ_UNROLL
      for (int n = 0; n < N; ++n) {
        const int8_t* q = q0 + size_t(n) * a.padded + u * kUnit;
        const float *scale = scale0 + size_t(n) * blocks + 8 * u,
                    *sums = sum0 + (size_t(n) * blocks + 8 * u) * size_t(32 / T::sub);
        if constexpr (wide) {
          // One scale per 128: the products of four groups are added in 16 bits.
          PQ_UNROLL
          for (int h = 0; h < 2; ++h) {
            const __m256i dot = dot128(c.q + 128 * h, q + 128 * h);
            acc[n][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(c.d[4 * h] * scale[4 * h]), acc[n][h]);
          }
          if (T::offset) acc[n][2] = _mm256_fmadd_ps(_mm256_load_ps(c.m), _mm256_loadu_ps(sums), acc[n][2]);
        } else if constexpr (Tabled<T>) {
          // The halves of a vector belong to two groups: of 32, or of 16 for one product each. Of codes in two parts
          // the quarters belong to four groups of 16.
          constexpr int per = 32 / T::sub;
          const float *d = row.d + u * size_t(8 * per), *m = row.m + u * size_t(8 * per);
          __m256 s[per];
          const __m256 as = _mm256_loadu_ps(scale);
          if constexpr (per == 1) {
            s[0] = _mm256_mul_ps(_mm256_loadu_ps(d), as);
          } else {
            const __m256i low = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
            s[0] = _mm256_mul_ps(_mm256_loadu_ps(d), _mm256_permutevar8x32_ps(as, low));
            s[1] = _mm256_mul_ps(_mm256_loadu_ps(d + 8),
                                 _mm256_permutevar8x32_ps(as, _mm256_add_epi32(low, _mm256_set1_epi32(4))));
          }
          PQ_UNROLL
          for (int b = 0; b < 8; b += 2) {
            const __m256i first = bytes32(c.q + 32 * b), second = bytes32(c.q + 32 * b + 32);
            const __m256i low = bytes32(q + 32 * b), high = bytes32(q + 32 * b + 32);
            const int k = 2 * b % 8;
            const __m256 scales = s[per == 1 ? 0 : b / 4];
            if constexpr (per == 1 || Apart<T>) {
              const __m256i quarters = _mm256_setr_epi32(k, k, k + 1, k + 1, k + 2, k + 2, k + 3, k + 3);
              acc[n][b / 2] = _mm256_fmadd_ps(
                  _mm256_cvtepi32_ps(dot64<T>(first, low, second, high)),
                  per == 1 ? two_lanes(scales, b) : _mm256_permutevar8x32_ps(scales, quarters), acc[n][b / 2]);
            } else {
              const __m256i which = _mm256_setr_epi32(k, k, k, k, k + 2, k + 2, k + 2, k + 2);
              const __m256i next = _mm256_add_epi32(which, _mm256_set1_epi32(1));
              acc[n][b / 2] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot32<T>(first, low)),
                                              _mm256_permutevar8x32_ps(scales, which), acc[n][b / 2]);
              acc[n][b / 2] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot32<T>(second, high)),
                                              _mm256_permutevar8x32_ps(scales, next), acc[n][b / 2]);
            }
          }
          PQ_UNROLL
          for (int i = 0; i < per; ++i)
            acc[n][i] = _mm256_fmadd_ps(_mm256_loadu_ps(m + 8 * i), _mm256_loadu_ps(sums + 8 * i), acc[n][i]);
        } else if constexpr (T::paired && T::sub == 32) {
          const __m256 s = _mm256_mul_ps(_mm256_load_ps(c.d), _mm256_loadu_ps(scale));
          PQ_UNROLL
          for (int b = 0; b < 8; b += 2) {
            const __m256i low = bytes32(q + 32 * b), high = bytes32(q + 32 * b + 32);
            const __m256 dot =
                _mm256_cvtepi32_ps(dot64<T>(bytes32(c.q + 32 * b), low, bytes32(c.q + 32 * b + 32), high));
            acc[n][b / 2] = _mm256_fmadd_ps(dot, two_lanes(s, b), acc[n][b / 2]);
          }
          if (T::offset) acc[n][0] = _mm256_fmadd_ps(_mm256_load_ps(c.m), _mm256_loadu_ps(sums), acc[n][0]);
        } else if constexpr (T::whole) {
          // The integer scales are applied when pairs are added, which leaves one float per group.
          alignas(32) float s[8];
          _mm256_store_ps(s, _mm256_mul_ps(_mm256_set1_ps(c.unit), _mm256_loadu_ps(scale)));
          PQ_UNROLL
          for (int b = 0; b < 8; ++b) {
            const __m256i scales = _mm256_shuffle_epi8(c.whole, _mm256_set1_epi16(short(0x0100 + 0x0202 * b)));
            const __m256i dot =
                _mm256_madd_epi16(_mm256_maddubs_epi16(bytes32(c.q + 32 * b), bytes32(q + 32 * b)), scales);
            acc[n][b & 3] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(s[b]), acc[n][b & 3]);
          }
          if constexpr (T::zero) {
            const __m256 k = _mm256_set1_ps(-float(T::zero) * c.unit);
            const __m256 x = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(c.natural)),
                         y8 = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(c.natural, c.natural)));
            acc[n][0] = _mm256_fmadd_ps(_mm256_mul_ps(x, _mm256_loadu_ps(sums)), k, acc[n][0]);
            acc[n][1] = _mm256_fmadd_ps(_mm256_mul_ps(y8, _mm256_loadu_ps(sums + 8)), k, acc[n][1]);
          } else {
            acc[n][0] = _mm256_fmadd_ps(_mm256_load_ps(c.m), _mm256_loadu_ps(sums), acc[n][0]);
            acc[n][1] = _mm256_fmadd_ps(_mm256_load_ps(c.m + 8), _mm256_loadu_ps(sums + 8), acc[n][1]);
          }
        } else if constexpr (T::sub == 32) {
          alignas(32) float s[8];
          _mm256_store_ps(s, _mm256_mul_ps(_mm256_load_ps(c.d), _mm256_loadu_ps(scale)));
          PQ_UNROLL
          for (int b = 0; b < 8; ++b) {
            const __m256 dot = _mm256_cvtepi32_ps(dot32<T>(bytes32(c.q + 32 * b), bytes32(q + 32 * b)));
            acc[n][b & 3] = _mm256_fmadd_ps(dot, _mm256_set1_ps(s[b]), acc[n][b & 3]);
          }
          if (T::offset) acc[n][0] = _mm256_fmadd_ps(_mm256_load_ps(c.m), _mm256_loadu_ps(sums), acc[n][0]);
        } else {
          alignas(32) float s[16];
          const __m256 as = _mm256_loadu_ps(scale);
          const __m256 low = _mm256_permutevar8x32_ps(as, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
          const __m256 high = _mm256_permutevar8x32_ps(as, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7));
          _mm256_store_ps(s, _mm256_mul_ps(_mm256_load_ps(c.d), low));
          _mm256_store_ps(s + 8, _mm256_mul_ps(_mm256_load_ps(c.d + 8), high));
          PQ_IN_MEMORY(s);
          PQ_UNROLL
          for (int b = 0; b < 8; ++b) {
            const __m256 dot = _mm256_cvtepi32_ps(dot32<T>(bytes32(c.q + 32 * b), bytes32(q + 32 * b)));
            acc[n][b & 3] = _mm256_fmadd_ps(dot, two_scales(s + first_of<T>(b), T::paired ? 2 : 1), acc[n][b & 3]);
          }
          if (T::offset) {
            acc[n][0] = _mm256_fmadd_ps(_mm256_load_ps(c.m), _mm256_loadu_ps(sums), acc[n][0]);
            acc[n][1] = _mm256_fmadd_ps(_mm256_load_ps(c.m + 8), _mm256_loadu_ps(sums + 8), acc[n][1]);
          }
        }
      }
    }
    PQ_UNROLL
    for (int n = 0; n < N; ++n) {
      const __m256 sum = _mm256_add_ps(_mm256_add_ps(acc[n][0], acc[n][1]), _mm256_add_ps(acc[n][2], acc[n][3]));
      y[(token + size_t(n)) * stride + row_of<T>(w, v)] = w.scale * sum8(sum);
    }
  }
}

// Transposes eight registers of eight 32-bit elements.
PQ_INLINE void transpose8(__m256i v[8]) {
  __m256i a[8], b[8];
  PQ_UNROLL
  for (int i = 0; i < 8; i += 2)
    a[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]), a[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
  PQ_UNROLL
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = _mm256_unpacklo_epi64(a[i + j], a[i + j + 2]);
      b[i + 2 * j + 1] = _mm256_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
  PQ_UNROLL
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
    v[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
  }
}

PQ_INLINE __m256i halves16(const int8_t* low, const int8_t* high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(low))),
                                 _mm_loadu_si128(reinterpret_cast<const __m128i*>(high)), 1);
}

// take(r): eight elements of row r. They go to out[8 elements][8 rows].
template <class F>
PQ_INLINE void put_eight(void* out, const F& take) {
  __m256i v[8];
  PQ_UNROLL
  for (int r = 0; r < 8; ++r) v[r] = take(r);
  transpose8(v);
  PQ_UNROLL
  for (int i = 0; i < 8; ++i) _mm256_storeu_si256(static_cast<__m256i*>(out) + i, v[i]);
}

PQ_INLINE __m256i four(const int8_t* a) {
  int32_t x;
  std::memcpy(&x, a, 4);
  return _mm256_set1_epi32(x);
}

PQ_INLINE __m256i eight_words(const int16_t* p) {
  return _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

#include "packed/tiles.hpp"
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#include "packed/rows_vnni.hpp"
#include "packed/single_rows_vnni.hpp"
#include "packed/tiles_amx.hpp"
#endif

// One to four tokens.
template <class T, bool wide>
void multiply_few(const PackedMatrix& w, size_t first, size_t last, const Activations& a, float* y, size_t stride) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  if constexpr (InRegisters<T>)
    multiply_single<T, wide>(w, first, last, a, y, stride);
  else  // 32 registers hold the sums of four tokens
    with_constant<kFewTokens>(a.tokens, [&]<int N>() { rows_times<T, N, wide>(w, first, last, a, 0, y, stride); });
#else
  for (size_t t = 0; t < a.tokens; t += 2)
    with_constant<2>(a.tokens - t < 2 ? 1 : 2,
                     [&]<int N>() { rows_times<T, N, wide>(w, first, last, a, t, y, stride); });
#endif
}

template <class T, bool wide>
void multiply_as(const PackedMatrix& w, size_t first, size_t last, const Activations& a, float* y, size_t stride) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  if constexpr (kTiled<T> != kNever)
    if (a.tiles && a.tokens >= kTiled<T>) return multiply_tiles<T, wide>(w, first, last, a, y, stride);
  if constexpr (Sixteen<T>)
    if (a.tokens > kFewTokens && a.tokens <= kMostSixteen)
      return multiply_sixteen<T, wide>(w, first, last, a, y, stride);
#endif
  (a.tokens <= kFewTokens ? multiply_few<T, wide> : multiply_many<T, wide>)(w, first, last, a, y, stride);
}

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
template <Sixteen T>
constexpr size_t kAlone<T> = kMostSixteen;
#endif

#elif defined(PQ_NEON)

#include "packed/rows_neon.hpp"
#include "packed/tiles.hpp"

template <class T, bool wide>
void multiply_as(const PackedMatrix& w, size_t first, size_t last, const Activations& a, float* y, size_t stride) {
  if (a.tokens > kFewTokens) return multiply_many<T, wide>(w, first, last, a, y, stride);
  with_constant<kFewTokens>(a.tokens, [&]<int N>() { rows_times<T, N, wide>(w, first, last, a, y, stride); });
}

#endif

#if defined(__AVX2__) || defined(PQ_NEON)

template <class T>
void multiply(const PackedMatrix& w, size_t first, size_t last, const Activations& a, float* y, size_t stride) {
  if constexpr (T::wide)
    if (a.wide) return multiply_as<T, true>(w, first, last, a, y, stride);
  multiply_as<T, false>(w, first, last, a, y, stride);
}

#else  // no known vector extension: loops that most compilers vectorize partially

template <class T>
void multiply(const PackedMatrix& w, size_t first, size_t last, const Activations& a, float* y, size_t stride) {
  const size_t units = a.padded / kUnit;
  float* const room = Tabled<T> ? table_scratch(table_floats<T>(w.cols)) : nullptr;
  for (size_t v = first; v < last; ++v) {
    const Row<T> row = row_at<T>(w, v, room);
    for (size_t t = 0; t < a.tokens; ++t) y[t * stride + row_of<T>(w, v)] = 0;
    for (size_t u = 0; u < units; ++u) {
      Codes c;
      take_unit(row, u, w.cols, c);
      for (size_t t = 0; t < a.tokens; ++t) {
        const int8_t* q = a.q + t * a.padded + u * kUnit;
        const float* scale = a.scale + t * (a.padded / 32) + 8 * u;
        const float* sums = (T::sub == 32 ? a.sum32 : a.sum16) + (t * units + u) * size_t(256 / T::sub);
        float total = 0;
        for (int s = 0; s < 256 / T::sub; ++s) {
          int dot = 0;
          for (int j = 0; j < T::sub; ++j) dot += int(c.q[place<T>(s * T::sub + j)]) * int(q[s * T::sub + j]);
          total += c.d[s] * scale[s * T::sub / 32] * float(dot);
          if (T::offset) total += c.m[s] * sums[s];
        }
        y[t * stride + row_of<T>(w, v)] += w.scale * total;
      }
    }
  }
}

#endif

}  // namespace
}  // namespace polyquant
