// The tiles of packed/tiles.hpp with 16 registers: two of eight tokens, or one for the last eight. Without AVX-VNNI,
// pairs of products are summed in words of 16 bits.

// Codes of signed types become unsigned by adding this; without AVX-VNNI, if products of pairs still fit 16 bits.
template <class T>
constexpr int kRaise = kDotsBytes && T::top == 0 ? 128 : 0;
template <class T>
  requires(T::least < 0 && !kDotsBytes)
constexpr int kRaise<T> = -T::least;

// Largest code in a panel; 0: signed codes.
template <class T>
constexpr int kTop = T::top ? T::top : 2 * kRaise<T>;

// Number of products of pairs that may be added in 16 bits.
constexpr int together_of(int top) { return top == 0 || top > 64 ? 1 : top > 32 ? 2 : top > 16 ? 4 : 8; }

// together: products of pairs that may be added in 16 bits; 0: signed codes, also as words: of four codes, the first
// and the third, and the others.
template <int together_>
struct PanelUnit {
  static constexpr int together = together_;
  static constexpr bool is_signed = false;
  Codes row[kPanelRows];
};
template <>
struct PanelUnit<0> {
  static constexpr int together = 1;
  static constexpr bool is_signed = true;
  Codes row[kPanelRows];
  int8_t even[kPanelRows][256], odd[kPanelRows][256];
};

template <class T, bool wide>
using UnitOf = PanelUnit<wide || kDotsBytes ? 8
                         : kTop<T> == 0     ? 0
                                            : together_of(kTop<T>)>;

// The signed bytes of even positions as words, and those of odd ones.
PQ_INLINE __m256i even_words(__m256i x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
PQ_INLINE __m256i odd_words(__m256i x) { return _mm256_srai_epi16(x, 8); }

template <class T, class Unit>
PQ_INLINE void raise_codes(Unit& p, size_t r, PanelForm) {
  const auto put = [](int8_t* to, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); };
  int8_t* const q = p.row[r].q;
  PQ_UNROLL
  for (int k = 0; k < 256; k += 32) {
    if constexpr (Unit::is_signed) {
      const __m256i x = bytes32(q + k);
      put(p.even[r] + k, even_words(x));
      put(p.odd[r] + k, odd_words(x));
    } else if constexpr (kRaise<T> != 0) {
      put(q + k, _mm256_add_epi8(bytes32(q + k), _mm256_set1_epi8(char(kRaise<T>))));
    }
  }
}

// The compiler would rearrange sums of integers, and then lack registers.
#define PQ_KEEP(x) asm("" : "+x"(x))

// Columns 4 j ... 4 j + 3 of V times eight tokens.
template <int V>
PQ_INLINE void take_tokens(const int8_t* x, int j, __m256i (&a)[V]) {
  PQ_UNROLL
  for (int v = 0; v < V; ++v) {
    a[v] = bytes32(x + 4 * int(kLaneWidth) * j + 32 * v);
    PQ_KEEP(a[v]);
  }
}

// pairs[v][r] = sums of `count` products of pairs of R rows with V times eight tokens, in 16 bits, from column 4 *
// first of group g on. more: they are added.
template <int V, int R, int count, bool more, class Unit>
PQ_INLINE void sum_pairs(const Unit& p, bool paired, size_t row, int g, int first, const int8_t* x,
                         __m256i (&pairs)[V][R]) {
  const Halves q(p.row[row].q, paired, g);
  PQ_UNROLL
  for (int i = 0; i < count; ++i) {
    const int j = first + i;
    __m256i a[V];
    take_tokens<V>(x, j, a);
    PQ_UNROLL
    for (size_t r = 0; r < R; ++r) {
      __m256i code = four(q.quad(r, sizeof(Codes), j));
      PQ_KEEP(code);
      PQ_UNROLL
      for (int v = 0; v < V; ++v) {
        const __m256i product = _mm256_maddubs_epi16(code, a[v]);
        pairs[v][r] = i == 0 && !more ? product : _mm256_add_epi16(pairs[v][r], product);
        PQ_KEEP(pairs[v][r]);
      }
    }
  }
}

// dot[v][r] += products of `count` times four columns, from column 4 * first of group g on.
template <int V, int R, int count, class Unit>
PQ_INLINE void add_bytes(const Unit& p, bool paired, size_t row, int g, int first, const int8_t* x,
                         __m256i (&dot)[V][R]) {
  const Halves q(p.row[row].q, paired, g);
  PQ_UNROLL
  for (int i = 0; i < count; ++i) {
    const int j = first + i;
    __m256i a[V];
    take_tokens<V>(x, j, a);
    PQ_UNROLL
    for (size_t r = 0; r < R; ++r) {
      const __m256i code = four(q.quad(r, sizeof(Codes), j));
      PQ_UNROLL
      for (int v = 0; v < V; ++v) dot[v][r] = dot4(dot[v][r], code, a[v]);
    }
  }
}

// As above, of signed codes, without AVX-VNNI: `count` times four columns of signed codes, from column 4 * first of
// group g on.
template <int V, int R, int count, class Unit>
PQ_INLINE void add_words(const Unit& p, bool paired, size_t row, int g, int first, const int8_t* x,
                         __m256i (&dot)[V][R]) {
  const Halves even(p.even[row], paired, g), odd(p.odd[row], paired, g);
  PQ_UNROLL
  for (int i = 0; i < count; ++i) {
    const int j = first + i;
    __m256i a[V][2];
    PQ_UNROLL
    for (int v = 0; v < V; ++v) {
      const __m256i bytes = bytes32(x + 4 * int(kLaneWidth) * j + 32 * v);
      a[v][0] = even_words(bytes), a[v][1] = odd_words(bytes);
      PQ_KEEP(a[v][0]);
      PQ_KEEP(a[v][1]);
    }
    PQ_UNROLL
    for (size_t r = 0; r < R; ++r) PQ_UNROLL
    for (int h = 0; h < 2; ++h) {
      __m256i code = four((h ? odd : even).quad(r, 256, j));
      PQ_KEEP(code);
      PQ_UNROLL
      for (int v = 0; v < V; ++v) {
        dot[v][r] = _mm256_add_epi32(dot[v][r], _mm256_madd_epi16(code, a[v][h]));
        PQ_KEEP(dot[v][r]);
      }
    }
  }
}

// -centre times the sums of the codes of `span` columns of eight tokens.
template <int span>
PQ_INLINE __m256i start_of(const int16_t* totals, __m256i centre) {
  __m256i sum = eight_words(totals);
  for (int i = 1; i < span / 16; ++i) sum = _mm256_add_epi32(sum, eight_words(totals + int(kLaneWidth) * i));
  return _mm256_mullo_epi32(sum, centre);
}

// out [rows][tokens] = panel times V times eight tokens.
template <int V, int span, bool offset, class Unit>
[[gnu::noinline]] void tile(const Unit* p, size_t units, LaneVector a, PanelForm form, float* out) {
  constexpr int subs = 32 / span, steps = span / 4, count = steps < Unit::together ? steps : Unit::together,
                R = kDotsBytes || (span == 32 && (count == 8 || Unit::is_signed)) ? 4 : 2, width = 8 * V;
  const __m256i ones = _mm256_set1_epi16(1), minus = _mm256_set1_epi32(-form.centre);
  const float* sums = span == 16 ? a.sum16 : a.sum32;
  for (size_t u = 0; u < units; ++u, ++p)
    for (int g = 0; g < 8; ++g) {
      __m256i start[subs][V];
      for (int h = 0; h < subs; ++h)
        for (int v = 0; v < V; ++v) start[h][v] = start_of<span>(a.total16 + int(kLaneWidth) * h + 8 * v, minus);
      for (size_t row = 0; row < kPanelRows; row += R) {
        __m256 products[V][R];
        PQ_UNROLL
        for (int h = 0; h < subs; ++h) {
          __m256i dot[V][R];
          if constexpr (kDotsBytes || Unit::is_signed) {
            PQ_UNROLL
            for (int v = 0; v < V; ++v) PQ_UNROLL
            for (int r = 0; r < R; ++r) dot[v][r] = start[h][v];
          }
          if constexpr (kDotsBytes) {
            add_bytes<V, R, steps>(*p, form.paired, row, g, h * steps, a.q, dot);
          } else if constexpr (Unit::is_signed) {
            add_words<V, R, steps>(*p, form.paired, row, g, h * steps, a.q, dot);
          }
          PQ_UNROLL
          for (int j = h * steps; !kDotsBytes && !Unit::is_signed && j < (h + 1) * steps; j += count) {
            __m256i pairs[V][R];
            sum_pairs<V, R, count, false>(*p, form.paired, row, g, j, a.q, pairs);
            PQ_UNROLL
            for (int v = 0; v < V; ++v) PQ_UNROLL
            for (int r = 0; r < R; ++r) {
              const __m256i before = j == h * steps ? start[h][v] : dot[v][r];
              dot[v][r] = _mm256_add_epi32(before, _mm256_madd_epi16(pairs[v][r], ones));
              PQ_KEEP(dot[v][r]);
            }
          }
          PQ_UNROLL
          for (int r = 0; r < R; ++r) {
            const __m256 d = _mm256_broadcast_ss(p->row[row + size_t(r)].d + subs * g + h);
            PQ_UNROLL
            for (int v = 0; v < V; ++v) {
              const __m256 n = _mm256_cvtepi32_ps(dot[v][r]);
              products[v][r] = h == 0 ? _mm256_mul_ps(n, d) : _mm256_fmadd_ps(n, d, products[v][r]);
            }
          }
        }
        PQ_UNROLL
        for (int v = 0; v < V; ++v) PQ_UNROLL
        for (int r = 0; r < R; ++r) {
          float* const at = out + width * (row + size_t(r)) + 8 * v;
          __m256 sum = _mm256_fmadd_ps(products[v][r], _mm256_loadu_ps(a.scale + 8 * v), _mm256_loadu_ps(at));
          if constexpr (offset)
            for (int h = 0; h < subs; ++h)
              sum = _mm256_fmadd_ps(_mm256_broadcast_ss(p->row[row + size_t(r)].m + subs * g + h),
                                    _mm256_loadu_ps(sums + int(kLaneWidth) * h + 8 * v), sum);
          _mm256_storeu_ps(at, sum);
        }
      }
      a.q += 32 * kLaneWidth, a.scale += kLaneWidth, a.total16 += 2 * kLaneWidth, sums += subs * int(kLaneWidth);
    }
}

// As above, with one scale per 128 columns of the panel and of the tokens; codes are at most 3.
template <int V, class Unit>
[[gnu::noinline]] void wide_tile(const Unit* p, size_t units, LaneVector a, PanelForm form, float* out) {
  constexpr int R = 4, width = 8 * V;
  const __m256i ones = _mm256_set1_epi16(1), minus = _mm256_set1_epi32(-form.centre);
  for (size_t u = 0; u < units; ++u, ++p)
    for (int s = 0; s < 2; ++s, a.q += 128 * kLaneWidth, a.scale += 4 * kLaneWidth, a.total16 += 8 * kLaneWidth) {
      __m256i start[V];
      for (int v = 0; v < V; ++v) start[v] = start_of<128>(a.total16 + 8 * v, minus);
      for (size_t row = 0; row < kPanelRows; row += R) {
        __m256i pairs[V][R] = {};  // with AVX-VNNI, sums of four products
        for (int g = 0; g < 4; ++g) {
          const int8_t* const q = a.q + 32 * int(kLaneWidth) * g;
          if constexpr (kDotsBytes)
            add_bytes<V, R, 8>(*p, form.paired, row, 4 * s + g, 0, q, pairs);
          else
            sum_pairs<V, R, 8, true>(*p, form.paired, row, 4 * s + g, 0, q, pairs);
        }
        for (int v = 0; v < V; ++v)
          for (int r = 0; r < R; ++r) {
            float* const at = out + width * (row + size_t(r)) + 8 * v;
            const __m256i sums = kDotsBytes ? pairs[v][r] : _mm256_madd_epi16(pairs[v][r], ones);
            const __m256i dot = _mm256_add_epi32(start[v], sums);
            const __m256 d = _mm256_broadcast_ss(p->row[row + size_t(r)].d + 4 * s);
            _mm256_storeu_ps(at, _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(dot), d),
                                                 _mm256_loadu_ps(a.scale + 8 * v), _mm256_loadu_ps(at)));
          }
      }
    }
}

// Multiplies one vector of tokens and adds to `out`, which has width_of(tokens) results per row.
template <int span, bool wide, class Unit>
PQ_INLINE void tile_of(const Unit* p, PanelForm form, size_t units, const LaneVector& a, size_t tokens, float* out) {
  const auto all = [&]<int V>(std::integral_constant<int, V>) {
    if constexpr (wide)
      wide_tile<V>(p, units, a, form, out);
    else if (form.offset)
      tile<V, span, true>(p, units, a, form, out);
    else
      tile<V, span, false>(p, units, a, form, out);
  };
  tokens <= 8 ? all(std::integral_constant<int, 1>{}) : all(std::integral_constant<int, 2>{});
}

#undef PQ_KEEP
