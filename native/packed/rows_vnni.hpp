// Products of five to twelve tokens with VNNI: lane l of every vector belongs to row l of sixteen. A unit of the rows
// is unpacked to a panel that stays in L1, four adjacent columns of every row side by side, and the activations are
// broadcast. Sums have the order of packed/tiles.hpp: results are the same bits for any number of tokens above four.
// Included by packed/kernels.hpp.

// With more tokens a panel of packed/tiles.hpp is as fast.
constexpr size_t kMostSixteen = 12;

// Types that unpack a unit of sixteen lines at once.
template <class T>
concept Sixteen = requires(SixteenLines b, RowPanel& p) { T::sixteen(b, p); };
template <class T>
concept SixteenScales = requires(SixteenLines b, RowPanel& p) { T::sixteen_scales(b, p); };

// A token's activations of one unit, and -centre times the sums of their codes per `span` columns. Those of several
// tokens are adjacent: one pointer reaches all, with constant offsets.
struct alignas(64) TokenUnit {
  int8_t q[kUnit];
  float scale[8], sums[16];
  int32_t start[16];
};

// acc += the products of 32 columns of the panel with four adjacent codes of a token at a time.
template <int from, int count>
PQ_INLINE __m512i quads_times(__m512i acc, const __m512i (&w)[8], const int8_t* q) {
  PQ_UNROLL
  for (int j = from; j < from + count; ++j) {
    int32_t four;
    std::memcpy(&four, q + 4 * j, 4);
    acc = _mm512_dpbusd_epi32(acc, w[j], _mm512_set1_epi32(four));
  }
  return acc;
}

PQ_INLINE void load_quads(const RowPanel& p, int group, __m512i (&w)[8]) {
  PQ_UNROLL
  for (int j = 0; j < 8; ++j) w[j] = _mm512_load_si512(p.q[group][j]);
}

// out [N tokens][16 rows] += a unit of the panel times the tokens.
template <int sub, bool offset, int N>
[[gnu::noinline]] void few_times(const RowPanel& p, const TokenUnit* a, float* out) {
  constexpr int subs = 32 / sub;
  __m512 acc[N];
  PQ_UNROLL
  for (int n = 0; n < N; ++n) acc[n] = _mm512_load_ps(out + 16 * n);
  for (int g = 0; g < 8; ++g) {
    __m512i w[8];
    load_quads(p, g, w);
    PQ_UNROLL
    for (int n = 0; n < N; ++n) {
      const int8_t* q = a[n].q + 32 * g;
      const int32_t* start = a[n].start + subs * g;
      __m512i dot = quads_times<0, 8 / subs>(_mm512_set1_epi32(start[0]), w, q);
      __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), _mm512_load_ps(p.d[subs * g]));
      if constexpr (subs == 2) {
        dot = quads_times<4, 4>(_mm512_set1_epi32(start[1]), w, q);
        product = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_load_ps(p.d[2 * g + 1]), product);
      }
      acc[n] = _mm512_fmadd_ps(product, _mm512_set1_ps(a[n].scale[g]), acc[n]);
    }
    if constexpr (offset) {
      for (int h = subs * g; h < subs * (g + 1); ++h) {
        const __m512 m = _mm512_load_ps(p.m[h]);
        PQ_UNROLL
        for (int n = 0; n < N; ++n) acc[n] = _mm512_fmadd_ps(m, _mm512_set1_ps(a[n].sums[h]), acc[n]);
      }
    }
  }
  PQ_UNROLL
  for (int n = 0; n < N; ++n) _mm512_store_ps(out + 16 * n, acc[n]);
}

// As above, with one scale per 128 columns of the panel and of the tokens.
template <int N>
[[gnu::noinline]] void few_wide(const RowPanel& p, const TokenUnit* a, float* out) {
  for (int s = 0; s < 2; ++s) {
    __m512i dot[N];
    PQ_UNROLL
    for (int n = 0; n < N; ++n) dot[n] = _mm512_set1_epi32(a[n].start[s]);
    for (int g = 4 * s; g < 4 * s + 4; ++g) {
      __m512i w[8];
      load_quads(p, g, w);
      PQ_UNROLL
      for (int n = 0; n < N; ++n) dot[n] = quads_times<0, 8>(dot[n], w, a[n].q + 32 * g);
    }
    const __m512 d = _mm512_load_ps(p.d[4 * s]);
    PQ_UNROLL
    for (int n = 0; n < N; ++n) {
      const __m512 scale = _mm512_set1_ps(a[n].scale[4 * s]);
      _mm512_store_ps(out + 16 * n, _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dot[n]), d), scale,
                                                    _mm512_load_ps(out + 16 * n)));
    }
  }
}

// The sums of a unit of sixteen rows while its codes are unpacked: takes them as RowPanel does, but stores none. Sums
// have the order of few_times.
template <bool offset, int N>
struct FewSums {
  const RowPanel& p;  // of which it reads the scales
  const TokenUnit* a;
  __m512 acc[N];
  __m512i dot[2][N];

  PQ_INLINE FewSums(const RowPanel& panel, const TokenUnit* tokens, const float* out) : p(panel), a(tokens) {
    PQ_UNROLL
    for (int n = 0; n < N; ++n) acc[n] = _mm512_load_ps(out + 16 * n);
  }

  PQ_INLINE void begin(int group, int slot = 0) {
    PQ_UNROLL
    for (int n = 0; n < N; ++n) dot[slot][n] = _mm512_set1_epi32(a[n].start[group]);
  }

  PQ_INLINE void put(int group, int j, __m512i codes, int slot = 0) {
    PQ_UNROLL
    for (int n = 0; n < N; ++n) {
      int32_t four;
      std::memcpy(&four, a[n].q + 32 * group + 4 * j, 4);
      dot[slot][n] = _mm512_dpbusd_epi32(dot[slot][n], codes, _mm512_set1_epi32(four));
    }
  }

  PQ_INLINE void done(int group, int slot = 0) {
    const __m512 d = _mm512_load_ps(p.d[group]);
    PQ_UNROLL
    for (int n = 0; n < N; ++n) {
      const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(dot[slot][n]), d);
      acc[n] = _mm512_fmadd_ps(product, _mm512_set1_ps(a[n].scale[group]), acc[n]);
    }
    if constexpr (offset) {
      const __m512 m = _mm512_load_ps(p.m[group]);
      PQ_UNROLL
      for (int n = 0; n < N; ++n) acc[n] = _mm512_fmadd_ps(m, _mm512_set1_ps(a[n].sums[group]), acc[n]);
    }
  }
};

// Types whose products need no panel: one or two groups are unpacked at a time.
template <class T>
concept Fused = T::sub == 32 && !T::wide && requires(SixteenLines b, FewSums<false, 1>& sums) { T::sixteen(b, sums); };

// out [N tokens][16 rows] += a unit of sixteen lines times the tokens.
template <class T, bool offset, int N>
[[gnu::noinline]] void fused_times(const SixteenLines& lines, const RowPanel& scales, const TokenUnit* a, float* out) {
  FewSums<offset, N> sums(scales, a, out);
  T::sixteen(lines, sums);
  PQ_UNROLL
  for (int n = 0; n < N; ++n) _mm512_store_ps(out + 16 * n, sums.acc[n]);
}

constexpr size_t kMostAtOnce = 8;  // tokens

// Transposes the scales of eight rows -> eight vectors of 16 rows, of which `half` is written.
PQ_INLINE void put_scales(__m256i (&rows)[8], float (*to)[16], int half) {
  transpose8(rows);
  PQ_UNROLL
  for (int i = 0; i < 8; ++i) _mm256_store_si256(reinterpret_cast<__m256i*>(to[i] + 8 * half), rows[i]);
}

// scales(row, e): scales and offsets of sub-blocks 8 e ... 8 e + 7 of the unit.
template <int sub, class F>
PQ_INLINE void put_all_scales(RowPanel& p, bool offset, const F& scales) {
  for (int half = 0; half < 2; ++half)
    for (int e = 0; e < 32 / sub; ++e) {
      __m256i d[8], m[8];
      PQ_UNROLL
      for (int r = 0; r < 8; ++r) {
        const Scales s = scales(size_t(8 * half + r), e);
        d[r] = __m256i(s.d), m[r] = __m256i(s.m);
      }
      put_scales(d, p.d + 8 * e, half);
      if (offset) put_scales(m, p.m + 8 * e, half);
    }
}

// -centre * the sums of `span` codes of a unit
template <int span>
PQ_INLINE void put_starts(const int8_t* q, int centre, int32_t* out) {
  static_assert(span == 16 || span == 32 || span == 128);
  const __m256i ones = _mm256_set1_epi8(1), minus = _mm256_set1_epi32(-centre);
  for (int h = 0; h < 2; ++h, q += 128, out += 128 / span) {
    const auto fours = [&](int i) { return _mm256_dpbusd_epi32(_mm256_setzero_si256(), ones, bytes32(q + 32 * i)); };
    // Of 16 columns each, by group: the first halves in the lower half, the second in the upper.
    const __m256i sums = _mm256_mullo_epi32(
        minus, _mm256_hadd_epi32(_mm256_hadd_epi32(fours(0), fours(1)), _mm256_hadd_epi32(fours(2), fours(3))));
    const __m128i low = _mm256_castsi256_si128(sums), high = _mm256_extracti128_si256(sums, 1);
    auto* const to = reinterpret_cast<__m128i*>(out);
    if constexpr (span == 16) {
      _mm_storeu_si128(to, _mm_unpacklo_epi32(low, high));
      _mm_storeu_si128(to + 1, _mm_unpackhi_epi32(low, high));
    } else if constexpr (span == 32) {
      _mm_storeu_si128(to, _mm_add_epi32(low, high));
    } else {
      const __m128i two = _mm_hadd_epi32(_mm_add_epi32(low, high), _mm_setzero_si128());
      *out = _mm_cvtsi128_si32(_mm_hadd_epi32(two, two));
    }
  }
}

// out [units][tokens]
template <int sub, int span>
PQ_INLINE void put_units(const Activations& a, int centre, TokenUnit* out) {
  const size_t units = a.padded / kUnit;
  for (size_t u = 0; u < units; ++u)
    for (size_t t = 0; t < a.tokens; ++t, ++out) {
      const size_t at = t * units + u;
      std::memcpy(out->q, a.q + at * kUnit, kUnit);
      std::memcpy(out->scale, a.scale + at * 8, sizeof out->scale);
      std::memcpy(out->sums, (sub == 16 ? a.sum16 : a.sum32) + at * (256 / sub), 256 / sub * sizeof(float));
      put_starts<span>(out->q, centre, out->start);
    }
}

template <class T, bool wide>
void multiply_sixteen(const PackedMatrix& w, size_t first, size_t last, const Activations& a, float* y, size_t stride) {
  constexpr int span = wide ? 128 : T::sub;
  constexpr size_t bytes = kUnitBytes<T>;
  const PanelForm form = form_of<T>(w, kRaise<T>);
  const size_t units = a.padded / kUnit, line = w.line_bytes;
  auto* const inputs = reinterpret_cast<TokenUnit*>(scratch(a.tokens * units * sizeof(TokenUnit)));
  put_units<T::sub, span>(a, form.centre, inputs);
  const size_t each = table_floats<T>(w.cols);
  float* const tables = Tabled<T> ? table_scratch(16 * each) : nullptr;
  for (size_t v = first; v < last; v += 16) {
    const size_t rows = last - v < 16 ? last - v : 16;
    if constexpr (Tabled<T>)
      for (size_t r = 0; r < 16; ++r)
        fill_tables(w, r < rows ? v + r : v, T::sub, T::shift, T::halved, tables + r * each, each / kTableRows);
    alignas(64) float out[kMostSixteen][16] = {};
    for (size_t u = 0; u < units; ++u) {
      const uint8_t* b = w.data + v * line + u * bytes;
      for (size_t i = 0; i < 16 * bytes; i += 64)  // of the next panel, to L2: both would not fit L1
        _mm_prefetch(reinterpret_cast<const char*>(w.data + (v + 16) * line + u * 16 * bytes + i), _MM_HINT_T1);
      const size_t left = w.cols - u * kUnit, count = (left < kUnit ? left : kUnit) / T::block * T::bytes;
      uint8_t copy[16 * bytes];
      const SixteenLines lines = complete_lines<bytes>({b, line}, rows, count, copy);
      RowPanel panel;
      const auto put_scales_of_lines = [&] {
        if constexpr (SixteenScales<T>)
          T::sixteen_scales(lines, panel);
        else
          put_all_scales<T::sub>(panel, form.offset, [&](size_t r, int e) -> Scales {
            if constexpr (Tabled<T>) {
              const float* d = tables + r * each + u * size_t(256 / T::sub) + size_t(8 * e);
              return {load<F8>(reinterpret_cast<const uint8_t*>(d)),
                      load<F8>(reinterpret_cast<const uint8_t*>(d + each / kTableRows))};
            } else if constexpr (T::sub == 16) {
              return T::scales(lines.first + r * lines.stride, e);
            } else {
              return T::scales(lines.first + r * lines.stride);
            }
          });
      };
      constexpr bool no_offset = wide || (kCentre<T> != 0 && !Tabled<T>) || !T::offset;
      if constexpr (Fused<T>)
        if (a.tokens <= kMostAtOnce) {
          put_scales_of_lines();
          const TokenUnit* const some = inputs + u * a.tokens;
          with_constant<kMostAtOnce>(a.tokens, [&]<int N>() {
            if (no_offset || !form.offset)
              fused_times<T, false, N>(lines, panel, some, out[0]);
            else if constexpr (!no_offset)
              fused_times<T, true, N>(lines, panel, some, out[0]);
          });
          continue;
        }
      T::sixteen(lines, panel);
      put_scales_of_lines();
      for (size_t t = 0; t < a.tokens; t += kMostAtOnce) {
        const size_t count = a.tokens - t < kMostAtOnce ? a.tokens - t : kMostAtOnce;
        const TokenUnit* const some = inputs + u * a.tokens + t;
        with_constant<kMostAtOnce>(count, [&]<int N>() {
          if constexpr (wide)
            few_wide<N>(panel, some, out[t]);
          else if (no_offset || !form.offset)
            few_times<T::sub, false, N>(panel, some, out[t]);
          else if constexpr (!no_offset)
            few_times<T::sub, true, N>(panel, some, out[t]);
        });
      }
    }
    const __m512 scale = _mm512_set1_ps(w.scale);
    for (size_t t = 0; t < a.tokens; ++t)
      _mm512_mask_storeu_ps(y + t * stride + v, __mmask16((1u << rows) - 1),
                            _mm512_mul_ps(_mm512_load_ps(out[t]), scale));
  }
}
