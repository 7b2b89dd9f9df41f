// Products of up to four tokens with VNNI, row by row: a unit of a row is four registers of codes. The bytes of the
// activations are brought into the order in which codes are unpacked with the fewest instructions; where two or four
// registers have the same scales in the same lanes, their products are added as integers. Of signed codes the
// activations are raised by 128, and sums start at -128 times those of the codes. Each token's sums have one order for
// one to four tokens. The activations should fit the first cache: nothing else is stored with them. Included by
// packed/kernels.hpp.

// Types that unpack a unit to four registers; SignsApart: to magnitudes, and masks of the negative ones. Indexed types
// take the indices of the unit, too.
template <class T>
concept SignsApart = requires(const uint8_t* b, __m512i (&codes)[4], __mmask64 (&minus)[4]) {
  T::magnitudes(b, codes, minus);
} || requires(const uint8_t* b, const uint16_t* index, __m512i (&codes)[4], __mmask64 (&minus)[4]) {
  T::magnitudes(b, index, codes, minus);
};
template <class T>
concept InRegisters =
    SignsApart<T> || Indexed<T> || requires(const uint8_t* b, __m512i (&codes)[4]) { T::registers(b, codes); };

template <InRegisters T>
constexpr bool kOrders<T> = false;

// Whether the activations are raised by 128. One token's take the signs of the codes if these are apart.
template <class T, int tokens>
constexpr bool kRaised = T::top == 0 && !(SignsApart<T> && tokens == 1);

PQ_INLINE __m512i negated(__m512i x, __mmask64 where) {
  return _mm512_mask_sub_epi8(x, where, _mm512_setzero_si512(), x);
}

// The sub-block of `sub` columns of lane l (four bytes) of register i.
constexpr int sub_block(Order order, int sub, int i, int l) {
  if (order == Order::pairs) return 16 * l / sub;
  if (order == Order::ternary) return i + l / 8 * 4;
  if (order == Order::alternate || order == Order::eights) return i / 2 * 8 + l / 2;  // of 16 columns
  const int named = i / 2 + l % 4 / 2 * 2, quarter = l / 4;  // a register of the named order, and its sixteen bytes
  if (order == Order::fields) return (named + quarter / 2 * 4) * 32 / sub + (sub == 16 ? quarter % 2 : 0);
  if (sub == 16) return 4 * named + quarter;
  switch (order) {
    case Order::halves:
    case Order::adjacent:
      return named / 2 * 4 + quarter;
    case Order::nibbles:
      return named / 2 * 4 + quarter / 2 * 2 + named % 2;
    default:
      return 2 * named + quarter / 2;
  }
}

// Whether register i has the scales of the register before it. wide: of 128 columns each.
template <class T, bool wide>
constexpr bool continues(int i) {
  constexpr int together = wide ? 128 / T::sub : 1;
  for (int l = 0; l < 16 && i < 4; ++l)
    if (i == 0 || sub_block(T::order, T::sub, i, l) / together != sub_block(T::order, T::sub, i - 1, l) / together)
      return false;
  return i < 4;
}

// The sum to which register i belongs.
template <class T, bool wide>
constexpr int sum_of(int i) {
  int sums = -1;
  for (int k = 0; k <= i; ++k) sums += !continues<T, wide>(k);
  return sums;
}

// 128 columns -> two registers.
template <Order order>
PQ_INLINE void arrange(const int8_t* q, __m512i& x, __m512i& y) {
  x = _mm512_loadu_si512(q), y = _mm512_loadu_si512(q + 64);
  const __m512i a = x, b = y;
  if constexpr (order == Order::halves) {
    x = _mm512_shuffle_i64x2(a, b, 0x88), y = _mm512_shuffle_i64x2(a, b, 0xdd);
  } else if constexpr (order == Order::nibbles) {
    x = _mm512_shuffle_i64x2(a, b, 0x44), y = _mm512_shuffle_i64x2(a, b, 0xee);
  } else if constexpr (order == Order::eights) {
    const __m512i even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
    x = _mm512_permutex2var_epi64(a, even, b);
    y = _mm512_permutex2var_epi64(a, _mm512_add_epi64(even, _mm512_set1_epi64(1)), b);
  } else if constexpr (order == Order::adjacent || order == Order::alternate) {
    const auto even = [](__m512i c, __m512i d) {
      return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(c)), _mm512_cvtepi16_epi8(d), 1);
    };
    x = even(a, b), y = even(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
  }
}

template <class T>
PQ_INLINE void arrange_unit(const int8_t* q, __m512i (&x)[4]) {
  if constexpr (T::order == Order::pairs) {
    const __m512i pairs = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 8, 10, 1, 3, 9, 11, 4, 6, 12, 14, 5, 7, 13, 15));
    PQ_UNROLL
    for (int i = 0; i < 4; ++i) x[i] = _mm512_shuffle_epi8(_mm512_loadu_si512(q + 64 * i), pairs);
    exchange_lanes(x);
    in_quads(x);
  } else if constexpr (T::order == Order::fields || T::order == Order::ternary) {
    PQ_UNROLL
    for (int i = 0; i < 4; i += 2) {
      const __m512i a = _mm512_loadu_si512(q + 32 * i), b = _mm512_loadu_si512(q + 32 * i + 128);
      x[i] = _mm512_shuffle_i64x2(a, b, 0x44), x[i + 1] = _mm512_shuffle_i64x2(a, b, 0xee);
    }
  } else {
    arrange<T::order>(q, x[0], x[1]), arrange<T::order>(q + 128, x[2], x[3]);
  }
  if constexpr (interleaved(T::order)) interleave(x);
}

// out [tokens][padded]
template <class T, bool raised>
PQ_INLINE void put_arranged(const Activations& a, int8_t* out) {
  for (size_t i = 0; i < a.tokens * a.padded; i += kUnit) {
    __m512i x[4];
    arrange_unit<T>(a.q + i, x);
    PQ_UNROLL
    for (int k = 0; k < 4; ++k)
      _mm512_storeu_si512(out + i + 64 * k, raised ? _mm512_xor_si512(x[k], _mm512_set1_epi8(-128)) : x[k]);
  }
}

// Eight numbers of groups in lanes 0 ... 7, or sixteen of sub-blocks.
template <int sub>
PQ_INLINE __m512 per_sub_block(const float* groups) {
  const __m512 eight = _mm512_castps256_ps512(_mm256_loadu_ps(groups));
  if constexpr (sub == 32) return eight;
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), eight);
}

template <class T>
PQ_INLINE UnitScales unit_scales(const Row<T>& row, const uint8_t* b, size_t u) {
  if constexpr (Tabled<T> && T::sub == 16) {
    return {_mm512_loadu_ps(row.d + 16 * u), _mm512_loadu_ps(row.m + 16 * u)};
  } else if constexpr (T::sub == 16) {
    return T::unit_scales(b);
  } else if constexpr (Tabled<T>) {
    return {_mm512_castps256_ps512(_mm256_loadu_ps(row.d + 8 * u)),
            _mm512_castps256_ps512(_mm256_loadu_ps(row.m + 8 * u))};
  } else {
    const Scales s = T::scales(b);
    return {_mm512_castps256_ps512(__m256(s.d)), _mm512_castps256_ps512(__m256(s.m))};
  }
}

// Numbers of sub-blocks, of which eight are used with groups of 32: half a register.
template <int sub>
PQ_INLINE __m512 times(__m512 x, __m512 y) {
  if constexpr (sub == 16) return _mm512_mul_ps(x, y);
  return _mm512_castps256_ps512(_mm256_mul_ps(_mm512_castps512_ps256(x), _mm512_castps512_ps256(y)));
}
template <int sub>
PQ_INLINE __m512 add_product(__m512 x, const float* y, __m512 sum) {
  if constexpr (sub == 16) return _mm512_fmadd_ps(x, _mm512_loadu_ps(y), sum);
  return _mm512_castps256_ps512(
      _mm256_fmadd_ps(_mm512_castps512_ps256(x), _mm256_loadu_ps(y), _mm512_castps512_ps256(sum)));
}

// arranged [N][padded]
template <class T, int N, bool wide>
[[gnu::noinline]] void single_rows(const PackedMatrix& w, size_t first, size_t last, const Activations& a,
                                   const int8_t* arranged, float* y, size_t stride) {
  constexpr size_t bytes = kUnitBytes<T>, subs = 256 / T::sub;
  const size_t units = a.padded / kUnit, whole = w.cols / kUnit;
  const float* const sums = T::sub == 32 ? a.sum32 : a.sum16;
  __m512i lanes[4];
  PQ_UNROLL
  for (int i = 0; i < 4; ++i) {
    alignas(64) int32_t at[16];
    for (int l = 0; l < 16; ++l) at[l] = sub_block(T::order, T::sub, i, l);
    lanes[i] = _mm512_load_si512(at);
  }
  float* const room = Tabled<T> ? table_scratch(table_floats<T>(w.cols)) : nullptr;
  [[maybe_unused]] auto* const indices = reinterpret_cast<uint16_t*>(Indexed<T> ? table_scratch(units * 16) : nullptr);
  for (size_t v = first; v < last; ++v) {
    const Row<T> row = row_at<T>(w, v, room);
    // Before the loop: a function called in it would keep the sums in memory.
    uint8_t padded[bytes];
    const uint8_t* const rest = whole < units ? whole_unit<T>(row.line, whole, w.cols, padded) : nullptr;
    if constexpr (Indexed<T>)
      for (size_t u = 0; u < units; ++u) T::put_indices(u < whole ? row.line + u * bytes : rest, indices + 32 * u);
    __m512 acc[N][2], offsets[N];
    PQ_UNROLL
    for (int n = 0; n < N; ++n) acc[n][0] = acc[n][1] = offsets[n] = _mm512_setzero_ps();
    for (size_t u = 0; u < units; ++u) {
      fetch_ahead<bytes>(row.line + u * bytes);
      const uint8_t* const b = u < whole ? row.line + u * bytes : rest;
      const UnitScales scales = unit_scales<T>(row, b, u);
      constexpr bool raised = kRaised<T, N>;
      __m512i codes[4], start[4];
      [[maybe_unused]] __mmask64 minus[4];
      if constexpr (SignsApart<T> && Indexed<T>)
        T::magnitudes(b, indices + 32 * u, codes, minus);
      else if constexpr (SignsApart<T>)
        T::magnitudes(b, codes, minus);
      else if constexpr (Indexed<T>)
        T::registers(b, indices + 32 * u, codes);
      else
        T::registers(b, codes);
      PQ_UNROLL
      for (int i = 0; i < 4; ++i) {
        start[i] = _mm512_setzero_si512();
        if constexpr (raised) {
          if constexpr (SignsApart<T>) codes[i] = negated(codes[i], minus[i]);
          const __m512i before = continues<T, wide>(i) ? start[i - 1] : start[i];
          start[i] = _mm512_dpbusd_epi32(before, _mm512_set1_epi8(-128), codes[i]);
        }
      }
      each_constant<N>([&]<int n>() PQ_FLAT {
        const size_t at = size_t(n) * units + u;
        if constexpr (T::offset) offsets[n] = add_product<T::sub>(scales.m, sums + at * subs, offsets[n]);
        const __m512 d = times<T::sub>(scales.d, per_sub_block<T::sub>(a.scale + 8 * at));
        const int8_t* const q = arranged + at * kUnit;
        __m512i dot = _mm512_setzero_si512();
        each_constant<4>([&]<int i>() PQ_FLAT {
          if constexpr (!continues<T, wide>(i)) dot = _mm512_setzero_si512();
          __m512i x = _mm512_loadu_si512(q + 64 * i);
          if constexpr (SignsApart<T> && !raised) x = negated(x, minus[i]);
          dot = raised ? _mm512_dpbusd_epi32(dot, x, codes[i]) : _mm512_dpbusd_epi32(dot, codes[i], x);
          if constexpr (!continues<T, wide>(i + 1)) {
            if constexpr (raised) dot = _mm512_sub_epi32(dot, start[i]);
            constexpr int sum = sum_of<T, wide>(i) & 1;
            acc[n][sum] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(lanes[i], d), acc[n][sum]);
          }
        });
      });
    }
    PQ_UNROLL
    for (int n = 0; n < N; ++n) {
      __m512 sum = _mm512_add_ps(acc[n][0], acc[n][1]);
      if constexpr (T::sub == 16) sum = _mm512_add_ps(sum, offsets[n]);
      __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(sum),
                                   _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(sum), 1)));
      if constexpr (T::sub == 32) eight = _mm256_add_ps(eight, _mm512_castps512_ps256(offsets[n]));
      y[size_t(n) * stride + row_of<T>(w, v)] = w.scale * sum8(eight);
    }
  }
}

template <class T, bool wide>
void multiply_single(const PackedMatrix& w, size_t first, size_t last, const Activations& a, float* y, size_t stride) {
  auto* const arranged = reinterpret_cast<int8_t*>(scratch(a.tokens * a.padded));
  with_constant<kFewTokens>(a.tokens, [&]<int N>() {
    put_arranged<T, kRaised<T, N>>(a, arranged);
    single_rows<T, N, wide>(w, first, last, a, arranged, y, stride);
  });
}
