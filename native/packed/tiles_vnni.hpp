// The tiles of packed/tiles.hpp with VNNI: 16 tokens, or the last eight.

struct PanelUnit {
  Codes row[kPanelRows];
};
template <class T, bool wide>
using UnitOf = PanelUnit;

// Signed codes become unsigned by adding this.
template <class T>
constexpr int kRaise = T::top == 0 ? 128 : 0;

template <class T>
PQ_INLINE void raise_codes(PanelUnit& p, size_t r, PanelForm) {
  if constexpr (kRaise<T> != 0) {
    int8_t* const q = p.row[r].q;
    PQ_UNROLL
    for (int k = 0; k < 256; k += 32)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + k), _mm256_xor_si256(bytes32(q + k), _mm256_set1_epi8(-128)));
  }
}

// Registers of 16 tokens, and of eight.
struct SixteenTokens {
  using Ints = __m512i;
  using Floats = __m512;
  static constexpr int tokens = 16;
  static PQ_INLINE Ints load(const void* p) { return _mm512_loadu_si512(p); }
  static PQ_INLINE Ints words(const int16_t* p) { return _mm512_cvtepi16_epi32(bytes32(p)); }
  static PQ_INLINE Ints all(int32_t x) { return _mm512_set1_epi32(x); }
  static PQ_INLINE Ints dot(Ints sums, Ints w, Ints x) { return _mm512_dpbusd_epi32(sums, w, x); }
  static PQ_INLINE Ints add(Ints x, Ints y) { return _mm512_add_epi32(x, y); }
  static PQ_INLINE Ints times(Ints x, Ints y) { return _mm512_mullo_epi32(x, y); }
  static PQ_INLINE Floats numbers(Ints x) { return _mm512_cvtepi32_ps(x); }
  static PQ_INLINE Floats load(const float* p) { return _mm512_loadu_ps(p); }
  static PQ_INLINE Floats all(float x) { return _mm512_set1_ps(x); }
  static PQ_INLINE Floats times(Floats x, Floats y) { return _mm512_mul_ps(x, y); }
  static PQ_INLINE Floats add(Floats x, Floats y, Floats z) { return _mm512_fmadd_ps(x, y, z); }
  static PQ_INLINE void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
};
struct EightTokens {
  using Ints = __m256i;
  using Floats = __m256;
  static constexpr int tokens = 8;
  static PQ_INLINE Ints load(const void* p) { return bytes32(p); }
  static PQ_INLINE Ints words(const int16_t* p) { return eight_words(p); }
  static PQ_INLINE Ints all(int32_t x) { return _mm256_set1_epi32(x); }
  static PQ_INLINE Ints dot(Ints sums, Ints w, Ints x) { return dot4(sums, w, x); }
  static PQ_INLINE Ints add(Ints x, Ints y) { return _mm256_add_epi32(x, y); }
  static PQ_INLINE Ints times(Ints x, Ints y) { return _mm256_mullo_epi32(x, y); }
  static PQ_INLINE Floats numbers(Ints x) { return _mm256_cvtepi32_ps(x); }
  static PQ_INLINE Floats load(const float* p) { return _mm256_loadu_ps(p); }
  static PQ_INLINE Floats all(float x) { return _mm256_set1_ps(x); }
  static PQ_INLINE Floats times(Floats x, Floats y) { return _mm256_mul_ps(x, y); }
  static PQ_INLINE Floats add(Floats x, Floats y, Floats z) { return _mm256_fmadd_ps(x, y, z); }
  static PQ_INLINE void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
};

template <class L>
PQ_INLINE typename L::Ints four_codes(const int8_t* q) {
  int32_t x;
  std::memcpy(&x, q, 4);
  return L::all(x);
}

// -centre times the sums of the codes of `span` columns of each token.
template <class L, int span>
PQ_INLINE typename L::Ints start_of(const int16_t* totals, typename L::Ints minus) {
  typename L::Ints sum = L::words(totals);
  PQ_UNROLL
  for (int i = 1; i < span / 16; ++i) sum = L::add(sum, L::words(totals + int(kLaneWidth) * i));
  return L::times(sum, minus);
}

// Products of four columns, quad j of a group. Those of a row wait for each other: rows take turns.
template <class L>
PQ_INLINE void add_quad(typename L::Ints (&dot)[kPanelRows], const Halves& q, int j, const int8_t* tokens) {
  const typename L::Ints x = L::load(tokens + 4 * int(kLaneWidth) * j);
  PQ_UNROLL
  for (size_t r = 0; r < kPanelRows; ++r) dot[r] = L::dot(dot[r], four_codes<L>(q.quad(r, sizeof(Codes), j)), x);
}

// out [rows][tokens] += panel times one vector of tokens.
template <class L, int span, bool offset>
[[gnu::noinline]] void tile(const PanelUnit* p, size_t units, LaneVector a, PanelForm form, float* out) {
  using Ints = typename L::Ints;
  using Floats = typename L::Floats;
  constexpr int subs = 32 / span;
  const Ints minus = L::all(-form.centre);
  Floats acc[kPanelRows];
  PQ_UNROLL
  for (size_t r = 0; r < kPanelRows; ++r) acc[r] = L::load(out + r * L::tokens);
  const float* sums = span == 16 ? a.sum16 : a.sum32;
  for (size_t u = 0; u < units; ++u, ++p)
    for (int g = 0; g < 8; ++g) {
      const Floats scale = L::load(a.scale);
      const Halves q(p->row[0].q, form.paired, g);
      Floats product[kPanelRows];
      PQ_UNROLL
      for (int h = 0; h < subs; ++h) {
        const Ints start = start_of<L, span>(a.total16 + int(kLaneWidth) * h, minus);
        Ints dot[kPanelRows];
        PQ_UNROLL
        for (Ints& x : dot) x = start;
        PQ_UNROLL
        for (int j = span / 4 * h; j < span / 4 * (h + 1); ++j) add_quad<L>(dot, q, j, a.q);
        PQ_UNROLL
        for (size_t r = 0; r < kPanelRows; ++r) {
          const Floats d = L::all(p->row[r].d[subs * g + h]), n = L::numbers(dot[r]);
          product[r] = h == 0 ? L::times(n, d) : L::add(n, d, product[r]);
        }
      }
      PQ_UNROLL
      for (size_t r = 0; r < kPanelRows; ++r) acc[r] = L::add(product[r], scale, acc[r]);
      if constexpr (offset) {
        PQ_UNROLL
        for (int h = 0; h < subs; ++h) {
          const Floats sum = L::load(sums + int(kLaneWidth) * h);
          PQ_UNROLL
          for (size_t r = 0; r < kPanelRows; ++r) acc[r] = L::add(L::all(p->row[r].m[subs * g + h]), sum, acc[r]);
        }
      }
      a.q += 32 * kLaneWidth, a.scale += kLaneWidth, a.total16 += 2 * kLaneWidth, sums += subs * int(kLaneWidth);
    }
  PQ_UNROLL
  for (size_t r = 0; r < kPanelRows; ++r) L::store(out + r * L::tokens, acc[r]);
}

// As above, with one scale per 128 columns of the panel and of the tokens.
template <class L>
[[gnu::noinline]] void wide_tile(const PanelUnit* p, size_t units, LaneVector a, PanelForm form, float* out) {
  using Ints = typename L::Ints;
  using Floats = typename L::Floats;
  const Ints minus = L::all(-form.centre);
  Floats acc[kPanelRows];
  PQ_UNROLL
  for (size_t r = 0; r < kPanelRows; ++r) acc[r] = L::load(out + r * L::tokens);
  for (size_t u = 0; u < units; ++u, ++p)
    for (int s = 0; s < 2; ++s) {
      const Ints start = start_of<L, 128>(a.total16, minus);
      Ints dot[kPanelRows];
      PQ_UNROLL
      for (Ints& x : dot) x = start;
      for (int g = 4 * s; g < 4 * s + 4; ++g, a.q += 32 * kLaneWidth) {
        const Halves q(p->row[0].q, form.paired, g);
        PQ_UNROLL
        for (int j = 0; j < 8; ++j) add_quad<L>(dot, q, j, a.q);
      }
      const Floats scale = L::load(a.scale);
      PQ_UNROLL
      for (size_t r = 0; r < kPanelRows; ++r)
        acc[r] = L::add(L::times(L::numbers(dot[r]), L::all(p->row[r].d[4 * s])), scale, acc[r]);
      a.scale += 4 * kLaneWidth, a.total16 += 8 * kLaneWidth;
    }
  PQ_UNROLL
  for (size_t r = 0; r < kPanelRows; ++r) L::store(out + r * L::tokens, acc[r]);
}

// Multiplies one vector of tokens and adds to `out`, which has width_of(tokens) results per row.
template <int span, bool wide>
PQ_INLINE void tile_of(const PanelUnit* p, PanelForm form, size_t units, const LaneVector& a, size_t tokens,
                       float* out) {
  const auto all = [&]<class L>(L) {
    if constexpr (wide)
      wide_tile<L>(p, units, a, form, out);
    else if (form.offset)
      tile<L, span, true>(p, units, a, form, out);
    else
      tile<L, span, false>(p, units, a, form, out);
  };
  tokens <= 8 ? all(EightTokens{}) : all(SixteenTokens{});
}
