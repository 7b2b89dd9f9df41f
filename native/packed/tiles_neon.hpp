// The tiles of packed/tiles.hpp with NEON: four rows, or two of sums of 16 columns, times two or four registers of four
// tokens. With the instructions of i8mm, rows and tokens are multiplied in pairs, eight columns at a time. Codes are
// signed bytes: the centre is subtracted when they are unpacked.

struct PanelUnit {
  Codes row[kPanelRows];
  // [pair of rows][eight columns][2][8], with i8mm
  int8_t pairs[kProductsOfPairs ? kPanelRows / 2 : 1][32][16];
};

template <class T, bool wide>
using UnitOf = PanelUnit;

template <class T>
PQ_INLINE PanelForm panel_form(const PackedMatrix& w) {
  return signed_form<T>(w);
}

template <class T>
PQ_INLINE void raise_codes(PanelUnit& p, size_t r, PanelForm form) {
  int8_t* const q = p.row[r].q;
  const int8x16_t centre = vdupq_n_s8(int8_t(form.centre));
  PQ_UNROLL
  for (int k = 0; k < 256; k += 16) vst1q_s8(q + k, vsubq_s8(vld1q_s8(q + k), centre));
  if constexpr (kProductsOfPairs) {
    if (r % 2 == 0) return;
    const int8_t* const before = p.row[r - 1].q;
    PQ_UNROLL
    for (int k = 0; k < 256; k += 16) {
      const int at = T::paired ? place<T>(k) : k;
      const int8x16_t a = vld1q_s8(before + at), b = vld1q_s8(q + at);
      vst1q_s8(p.pairs[r / 2][k / 8], lower_halves(a, b));
      vst1q_s8(p.pairs[r / 2][k / 8 + 1], upper_halves(a, b));
    }
  }
}

// dot[r][v] = sums of products of R rows with V registers of four tokens, over `steps` times 16 columns from the half
// `half` of group g on. a: the activations of the group.
template <int R, int V, int steps>
PQ_INLINE void sum_columns(const PanelUnit& p, bool paired, size_t row, int g, int half, const int8_t* a,
                           int32x4_t (&dot)[R][V]) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  (void)paired;
  int32x4_t sum[R / 2][2 * V];
  PQ_UNROLL
  for (int i = 0; i < R * V; ++i) sum[i / (2 * V)][i % (2 * V)] = vdupq_n_s32(0);
  PQ_UNROLL
  for (int e = 2 * half; e < 2 * (half + steps); ++e) {  // eight columns
    const int8_t* const q = a + 8 * int(kLaneWidth) * e;
    int8x16_t w[R / 2];
    PQ_UNROLL
    for (int r = 0; r < R / 2; ++r) w[r] = vld1q_s8(p.pairs[row / 2 + size_t(r)][4 * g + e]);
    PQ_UNROLL
    for (int v = 0; v < V; ++v) {
      const int8x16_t low = vld1q_s8(q + 16 * v), high = vld1q_s8(q + 4 * int(kLaneWidth) + 16 * v);
      const int8x16_t first = first_pair(low, high), second = second_pair(low, high);
      PQ_UNROLL
      for (int r = 0; r < R / 2; ++r) {
        sum[r][2 * v] = dot_pairs(sum[r][2 * v], w[r], first);
        sum[r][2 * v + 1] = dot_pairs(sum[r][2 * v + 1], w[r], second);
      }
    }
  }
  PQ_UNROLL
  for (int r = 0; r < R / 2; ++r) PQ_UNROLL
  for (int v = 0; v < V; ++v) {
    dot[2 * r][v] = lower_halves(sum[r][2 * v], sum[r][2 * v + 1]);
    dot[2 * r + 1][v] = upper_halves(sum[r][2 * v], sum[r][2 * v + 1]);
  }
#else
  PQ_UNROLL
  for (int i = 0; i < R * V; ++i) dot[i / V][i % V] = vdupq_n_s32(0);
  PQ_UNROLL
  for (int h = half; h < half + steps; ++h) {
    const Halves q(p.row[row].q, paired, g);
    int8x16_t w[R];
    PQ_UNROLL
    for (int r = 0; r < R; ++r) w[r] = vld1q_s8((h == 0 ? q.low : q.high) + size_t(r) * sizeof(Codes));
    const auto quad = [&]<int j>(std::integral_constant<int, j>) PQ_FLAT {
      int8x16_t x[V];
      PQ_UNROLL
      for (int v = 0; v < V; ++v) x[v] = vld1q_s8(a + 4 * int(kLaneWidth) * (4 * h + j) + 16 * v);
      PQ_UNROLL
      for (int r = 0; r < R; ++r) PQ_UNROLL
      for (int v = 0; v < V; ++v) dot[r][v] = dot4_lane<j>(dot[r][v], w[r], x[v]);
    };
    quad(std::integral_constant<int, 0>{}), quad(std::integral_constant<int, 1>{});
    quad(std::integral_constant<int, 2>{}), quad(std::integral_constant<int, 3>{});
  }
#endif
}

// out [rows][tokens] += panel times V times four tokens.
template <int V, int span, bool offset>
[[gnu::noinline]] void tile(const PanelUnit* p, size_t units, LaneVector a, PanelForm form, float* out) {
  constexpr int subs = 32 / span, R = subs == 1 ? 4 : 2, width = 4 * V;
  const float* sums = span == 16 ? a.sum16 : a.sum32;
  for (size_t u = 0; u < units; ++u, ++p)
    for (int g = 0; g < 8; ++g) {
      for (size_t row = 0; row < kPanelRows; row += R) {
        float32x4_t product[R][V];
        PQ_UNROLL
        for (int h = 0; h < subs; ++h) {
          int32x4_t dot[R][V];
          sum_columns<R, V, span / 16>(*p, form.paired, row, g, h, a.q, dot);
          PQ_UNROLL
          for (int r = 0; r < R; ++r) PQ_UNROLL
          for (int v = 0; v < V; ++v) {
            const float d = p->row[row + size_t(r)].d[subs * g + h];
            const float32x4_t n = vcvtq_f32_s32(dot[r][v]);
            product[r][v] = h == 0 ? vmulq_n_f32(n, d) : vfmaq_n_f32(product[r][v], n, d);
          }
        }
        PQ_UNROLL
        for (int r = 0; r < R; ++r) PQ_UNROLL
        for (int v = 0; v < V; ++v) {
          float* const at = out + width * (row + size_t(r)) + 4 * v;
          float32x4_t sum = vfmaq_f32(vld1q_f32(at), product[r][v], vld1q_f32(a.scale + 4 * v));
          if constexpr (offset) {
            PQ_UNROLL
            for (int h = 0; h < subs; ++h)
              sum = vfmaq_n_f32(sum, vld1q_f32(sums + int(kLaneWidth) * h + 4 * v),
                                p->row[row + size_t(r)].m[subs * g + h]);
          }
          vst1q_f32(at, sum);
        }
      }
      a.q += 32 * kLaneWidth, a.scale += kLaneWidth, sums += subs * int(kLaneWidth);
    }
}

// As above, with one scale per 128 columns of the panel and of the tokens.
template <int V>
[[gnu::noinline]] void wide_tile(const PanelUnit* p, size_t units, LaneVector a, PanelForm form, float* out) {
  constexpr int R = 2, width = 4 * V;
  for (size_t u = 0; u < units; ++u, ++p)
    for (int s = 0; s < 2; ++s, a.q += 128 * kLaneWidth, a.scale += 4 * kLaneWidth)
      for (size_t row = 0; row < kPanelRows; row += R) {
        int32x4_t dot[R][V];
        PQ_UNROLL
        for (int i = 0; i < R * V; ++i) dot[i / V][i % V] = vdupq_n_s32(0);
        for (int g = 0; g < 4; ++g) {
          int32x4_t some[R][V];
          sum_columns<R, V, 2>(*p, form.paired, row, 4 * s + g, 0, a.q + 32 * int(kLaneWidth) * g, some);
          PQ_UNROLL
          for (int i = 0; i < R * V; ++i) dot[i / V][i % V] = vaddq_s32(dot[i / V][i % V], some[i / V][i % V]);
        }
        PQ_UNROLL
        for (int r = 0; r < R; ++r) PQ_UNROLL
        for (int v = 0; v < V; ++v) {
          float* const at = out + width * (row + size_t(r)) + 4 * v;
          const float32x4_t product = vmulq_n_f32(vcvtq_f32_s32(dot[r][v]), p->row[row + size_t(r)].d[4 * s]);
          vst1q_f32(at, vfmaq_f32(vld1q_f32(at), product, vld1q_f32(a.scale + 4 * v)));
        }
      }
}

// Multiplies one vector of tokens and adds to `out`, which has width_of(tokens) results per row.
template <int span, bool wide>
PQ_INLINE void tile_of(const PanelUnit* p, PanelForm form, size_t units, const LaneVector& a, size_t tokens,
                       float* out) {
  const auto all = [&]<int V>(std::integral_constant<int, V>) {
    if constexpr (wide)
      wide_tile<V>(p, units, a, form, out);
    else if (form.offset)
      tile<V, span, true>(p, units, a, form, out);
    else
      tile<V, span, false>(p, units, a, form, out);
  };
  tokens <= 8 ? all(std::integral_constant<int, 2>{}) : all(std::integral_constant<int, 4>{});
}
