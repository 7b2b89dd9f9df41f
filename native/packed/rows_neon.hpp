// Products of at most four tokens with NEON: the codes of a unit are made once and stay in L1. Each token's sums have
// one order, so its results are the same bits for one to four tokens. Included by packed/kernels.hpp.

PQ_INLINE int8x16_t bytes16(const int8_t* p) { return vld1q_s8(p); }

// The sums of two products of 16 codes.
PQ_INLINE float32x4_t dot32(const int8_t* w, const int8_t* a, int next) {
  return vcvtq_f32_s32(dot4(dot4(vdupq_n_s32(0), bytes16(w), bytes16(a)), bytes16(w + next), bytes16(a + next)));
}

// Sums of products of one unit, one register per float of `d`: of 32 or 16 columns.
template <class T>
PQ_INLINE void add_unit(const Codes& c, const int8_t* q, const float* scale, float32x4_t (&acc)[2]) {
  PQ_UNROLL
  for (int four = 0; four < 2; ++four) {  // four groups of 32
    const int8_t *w = c.q + 128 * four, *a = q + 128 * four;
    const float32x4_t as = vld1q_f32(scale + 4 * four);
    if constexpr (T::sub == 32) {
      const float32x4_t s = vmulq_f32(vld1q_f32(c.d + 4 * four), as);
      constexpr int next = T::paired ? 32 : 16;  // from the first half of a group to its second
      constexpr auto at = [](int g) { return T::paired ? 64 * (g / 2) + 16 * (g % 2) : 32 * g; };
      acc[0] = vfmaq_laneq_f32(acc[0], dot32(w + at(0), a + at(0), next), s, 0);
      acc[1] = vfmaq_laneq_f32(acc[1], dot32(w + at(1), a + at(1), next), s, 1);
      acc[0] = vfmaq_laneq_f32(acc[0], dot32(w + at(2), a + at(2), next), s, 2);
      acc[1] = vfmaq_laneq_f32(acc[1], dot32(w + at(3), a + at(3), next), s, 3);
    } else {
      constexpr auto at = [](int sub) { return place<T>(16 * sub); };
      const auto dot = [&](int sub) PQ_FLAT {
        return vcvtq_f32_s32(dot4(vdupq_n_s32(0), bytes16(w + at(sub)), bytes16(a + at(sub))));
      };
      const float32x4_t low = vmulq_f32(vld1q_f32(c.d + 8 * four), vzip1q_f32(as, as)),
                        high = vmulq_f32(vld1q_f32(c.d + 8 * four + 4), vzip2q_f32(as, as));
      acc[0] = vfmaq_laneq_f32(acc[0], dot(0), low, 0);
      acc[1] = vfmaq_laneq_f32(acc[1], dot(1), low, 1);
      acc[0] = vfmaq_laneq_f32(acc[0], dot(2), low, 2);
      acc[1] = vfmaq_laneq_f32(acc[1], dot(3), low, 3);
      acc[0] = vfmaq_laneq_f32(acc[0], dot(4), high, 0);
      acc[1] = vfmaq_laneq_f32(acc[1], dot(5), high, 1);
      acc[0] = vfmaq_laneq_f32(acc[0], dot(6), high, 2);
      acc[1] = vfmaq_laneq_f32(acc[1], dot(7), high, 3);
    }
  }
}

// As add_unit, with one scale per 128 columns.
PQ_INLINE void add_wide(const Codes& c, const int8_t* q, const float* scale, float32x4_t (&acc)[2]) {
  PQ_UNROLL
  for (int h = 0; h < 2; ++h) {
    int32x4_t dot = vdupq_n_s32(0);
    PQ_UNROLL
    for (int k = 128 * h; k < 128 * (h + 1); k += 16) dot = dot4(dot, bytes16(c.q + k), bytes16(q + k));
    acc[h] = vfmaq_n_f32(acc[h], vcvtq_f32_s32(dot), c.d[4 * h] * scale[4 * h]);
  }
}

template <class T, int N, bool wide>
void rows_times(const PackedMatrix& w, size_t first, size_t last, const Activations& a, float* y, size_t stride) {
  constexpr size_t unit_bytes = kUnitBytes<T>, subs = 256 / T::sub;
  const size_t cols = w.cols, units = a.padded / kUnit, blocks = a.padded / 32;
  float* const room = Tabled<T> ? table_scratch(table_floats<T>(cols)) : nullptr;
  const int8_t* const q0 = T::paired ? a.paired : a.q;
  const float* const sum0 = T::sub == 32 ? a.sum32 : a.sum16;
  for (size_t v = first; v < last; ++v) {
    const Row<T> row = row_at<T>(w, v, room);
    float32x4_t acc[N][2];
    PQ_UNROLL
    for (int n = 0; n < N; ++n) acc[n][0] = acc[n][1] = vdupq_n_f32(0);
    OneAhead<T> codes(row.line);
    for (size_t u = 0; u < units; ++u) {
      Codes c;
      fetch_ahead<unit_bytes>(row.line + u * unit_bytes);
      codes.take(row, u, cols, u + 1 < units ? unit_at(row, u + 1) : nullptr, c);
      PQ_UNROLL
      for (int n = 0; n < N; ++n) {
        const int8_t* q = q0 + size_t(n) * a.padded + u * kUnit;
        const float* scale = a.scale + size_t(n) * blocks + 8 * u;
        if constexpr (wide)
          add_wide(c, q, scale, acc[n]);
        else
          add_unit<T>(c, q, scale, acc[n]);
        if constexpr (T::offset) {
          const float* sums = sum0 + (size_t(n) * units + u) * subs;
          PQ_UNROLL
          for (size_t i = 0; i < subs; i += 4)
            acc[n][i / 4 % 2] = vfmaq_f32(acc[n][i / 4 % 2], vld1q_f32(c.m + i), vld1q_f32(sums + i));
        }
      }
    }
    PQ_UNROLL
    for (int n = 0; n < N; ++n)
      y[size_t(n) * stride + row_of<T>(w, v)] = w.scale * vaddvq_f32(vaddq_f32(acc[n][0], acc[n][1]));
  }
}
