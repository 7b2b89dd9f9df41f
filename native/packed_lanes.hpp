// Products of five and more tokens, such as the next tokens of several sequences: lane l of every vector belongs to
// token l, so weights are broadcast instead of transposed, and there are no horizontal sums. Included by
// packed_kernels.hpp. The sums have the order of panel_times, so the results are the same bits for any number of tokens
// above four.

// Maximum number of tokens multiplied like this. Without VNNI, sums of more tokens are faster in panels.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
constexpr size_t kLaneTokens = size_t(-1);
#else
constexpr size_t kLaneTokens = 16;
#endif

// Codes as the kernel reads them: with VNNI, signed ones plus 128, because its left operand is unsigned.
template <class T>
PQ_INLINE void shift_codes([[maybe_unused]] Codes& c) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  if constexpr (T::top == 0)
    for (int i = 0; i < 256; i += 32)
      _mm256_store_si256(reinterpret_cast<__m256i*>(c.q + i),
                         _mm256_xor_si256(bytes32(c.q + i), _mm256_set1_epi8(-128)));
#endif
}

// dot[v][r] = products of one sub-block of R rows with V times eight tokens. quad: the first four codes of each token.
template <class T, int V, int R, int sub>
PQ_INLINE void lanes_dot(const Codes* c, int start, const int8_t* const* quad,
                         [[maybe_unused]] const int32_t* const* totals, __m256i (&dot)[V][R]) {
  constexpr int steps = sub / 4;
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  for (int v = 0; v < V; ++v) {
    __m256i initial = _mm256_setzero_si256();
    if constexpr (T::top == 0) {
      for (int i = 0; i < sub / 16; ++i) initial = _mm256_sub_epi32(initial, bytes32(totals[v] + 8 * i));
      initial = _mm256_slli_epi32(initial, 7);
    }
    for (int r = 0; r < R; ++r) dot[v][r] = initial;
  }
  PQ_UNROLL
  for (int j = 0; j < steps; ++j) {
    __m256i x[V];
    for (int v = 0; v < V; ++v) x[v] = bytes32(quad[v] + 32 * j);
    PQ_UNROLL
    for (int r = 0; r < R; ++r) {
      const __m256i code = four(c[r].q + place<T>(start + 4 * j));
      for (int v = 0; v < V; ++v) dot[v][r] = dot4(dot[v][r], code, x[v]);
    }
  }
#else
  constexpr int together = steps < kTogether<T> ? steps : kTogether<T>;
  for (int k = 0; k < steps; k += together) {
    __m256i pairs[V][R];
    PQ_UNROLL
    for (int j = k; j < k + together; ++j)
      for (int v = 0; v < V; ++v) {
        const __m256i x = bytes32(quad[v] + 32 * j);
        PQ_UNROLL
        for (int r = 0; r < R; ++r) {
          const __m256i code = four(c[r].q + place<T>(start + 4 * j));
          const __m256i product = T::top ? _mm256_maddubs_epi16(code, x)
                                         : _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(x, code));
          pairs[v][r] = j == k ? product : _mm256_add_epi16(pairs[v][r], product);
        }
      }
    for (int v = 0; v < V; ++v)
      for (int r = 0; r < R; ++r) {
        const __m256i sums = _mm256_madd_epi16(pairs[v][r], _mm256_set1_epi16(1));
        dot[v][r] = k == 0 ? sums : _mm256_add_epi32(dot[v][r], sums);
      }
  }
#endif
}

// R rows from `first` on times V times eight tokens from `token` on, a multiple of eight.
template <class T, int V, int R>
void lanes_times(const PackedMatrix& w, size_t first, const Activations& a, size_t token, float* y, size_t stride) {
  constexpr int sub = T::sub, subs = 256 / sub;
  constexpr size_t unit_bytes = kUnitBytes<T>;
  const size_t units = a.padded / kUnit, vector = token / 8;
  const float* const sums = sub == 32 ? a.lanes.sum32 : a.lanes.sum16;
  Codes c[R];
  Row<T> rows[R];
  const size_t each = table_floats<T>(w.cols);
  float* const room = Tabled<T> ? table_scratch(size_t(R) * each) : nullptr;
  for (int r = 0; r < R; ++r) rows[r] = row_at<T>(w, first + size_t(r), room + size_t(r) * each);
  __m256 acc[V][R];
  for (int v = 0; v < V; ++v)
    for (int r = 0; r < R; ++r) acc[v][r] = _mm256_setzero_ps();
  for (size_t u = 0; u < units; ++u) {
    for (int r = 0; r < R; ++r) {
      for (size_t i = 0; i < unit_bytes; i += 64)  // of the next R rows
        _mm_prefetch(reinterpret_cast<const char*>(rows[r].line + u * unit_bytes + size_t(R) * w.line_bytes + i),
                     _MM_HINT_T0);
      take_unit(rows[r], u, w.cols, c[r]);
      shift_codes<T>(c[r]);
    }
    for (int s = 0; s < subs; ++s) {
      const size_t block = 8 * u + size_t(s * sub / 32), at = u * subs + size_t(s);
      const int8_t* quad[V];
      const int32_t* totals[V];
      for (int v = 0; v < V; ++v) {
        quad[v] = a.lanes.q + 8 * ((vector + size_t(v)) * a.padded + u * kUnit + size_t(s * sub));
        totals[v] = a.lanes.total16 + 8 * ((vector + size_t(v)) * a.padded + u * kUnit + size_t(s * sub)) / 16;
      }
      __m256i dot[V][R];
      lanes_dot<T, V, R, sub>(c, s * sub, quad, totals, dot);
      for (int v = 0; v < V; ++v) {
        const __m256 scale = _mm256_load_ps(a.lanes.scale + 8 * ((vector + size_t(v)) * a.padded / 32 + block));
        for (int r = 0; r < R; ++r)
          acc[v][r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[v][r]),
                                      _mm256_mul_ps(_mm256_broadcast_ss(c[r].d + s), scale), acc[v][r]);
        if (T::offset) {
          const __m256 sum = _mm256_load_ps(sums + 8 * ((vector + size_t(v)) * a.padded / size_t(sub) + at));
          for (int r = 0; r < R; ++r) acc[v][r] = _mm256_fmadd_ps(_mm256_broadcast_ss(c[r].m + s), sum, acc[v][r]);
        }
      }
    }
  }
  for (int v = 0; v < V; ++v)
    for (int r = 0; r < R; ++r) {
      alignas(32) float out[8];
      _mm256_store_ps(out, _mm256_mul_ps(acc[v][r], _mm256_set1_ps(w.scale)));
      for (size_t t = token + 8 * size_t(v); t < a.tokens && t < token + 8 * size_t(v) + 8; ++t)
        y[t * stride + row_of<T>(w, first + size_t(r))] = out[t % 8];
    }
}

template <class T, int V>
void rows_of_lanes(const PackedMatrix& w, size_t first, size_t last, const Activations& a, size_t token, float* y,
                   size_t stride) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)  // sums of products wait four cycles for the last ones
  constexpr int rows = 8 / V;
#else
  constexpr int rows = 4 / V;  // with half the registers
#endif
  for (; first + size_t(rows) <= last; first += size_t(rows)) lanes_times<T, V, rows>(w, first, a, token, y, stride);
  for (; first < last; ++first) lanes_times<T, V, 1>(w, first, a, token, y, stride);
}

template <class T>
void multiply_lanes(const PackedMatrix& w, size_t first, size_t last, const Activations& a, float* y, size_t stride) {
  size_t t = 0;
  for (; t + 8 < a.tokens; t += 16) rows_of_lanes<T, 2>(w, first, last, a, t, y, stride);
  if (t < a.tokens) rows_of_lanes<T, 1>(w, first, last, a, t, y, stride);
}
