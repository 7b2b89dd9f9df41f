// Products of five and more tokens. Lane l of every vector belongs to token l; the weights of a panel of eight rows are
// unpacked once, to bytes, and serve all tokens: four of them at a time are broadcast from the panel. Each token's sums
// have one order, so its results are the same bits for any number of tokens above four. Included by packed/kernels.hpp.
//
// A multiplication of bytes has one unsigned operand: the weights. Signed codes are raised; that, and offsets m that
// are a multiple of d, cost no float: sums of products start at -centre times the sum of the token's codes.

constexpr size_t kPanelRows = 8;

// Layout of the codes of a panel.
struct PanelForm {
  int centre;   // w = d * (code - centre) + m
  bool offset;  // whether there is an m
  bool paired;
};

template <class T>
PQ_INLINE PanelForm form_of(const PackedMatrix&, int raise) {
  return {kCentre<T> + raise, T::offset && kCentre<T> == 0, T::paired};
}
template <Tabled T>
PQ_INLINE PanelForm form_of(const PackedMatrix& w, int raise) {
  const Tables& t = w.tables;
  const float common = t.common - T::shift;
  const bool constant = !t.zero && !t.bias && std::fabs(common) <= 256.0f && common == float(int(common));
  return {raise + (constant ? int(common) : 0), !constant, T::paired};
}

// The codes of group g of row 0: columns 0 ... 15, and 16 ... 31.
struct Halves {
  const int8_t *low, *high;

  PQ_INLINE Halves(const int8_t* q, bool paired, int g)
      : low(q + (paired ? 64 * (g / 2) + 16 * (g % 2) : 32 * g)), high(low + (paired ? 32 : 16)) {}
  // The four codes from column 4 j on of another row.
  PQ_INLINE const int8_t* quad(size_t row, size_t stride, int j) const {
    return (j < 4 ? low + 4 * j : high + 4 * (j - 4)) + row * stride;
  }
};

// The activations of one vector of tokens.
struct LaneVector {
  const int8_t* q;
  const float *scale, *sum16, *sum32;
  const int16_t* total16;

  LaneVector(const Activations& a, size_t vector)
      : q(a.lanes.q + vector * kLaneWidth * a.padded),
        scale(a.lanes.scale + vector * kLaneWidth * a.padded / 32),
        sum16(a.lanes.sum16 + vector * kLaneWidth * a.padded / 16),
        sum32(a.lanes.sum32 + vector * kLaneWidth * a.padded / 32),
        total16(a.lanes.total16 + vector * kLaneWidth * a.padded / 16) {}

  PQ_INLINE void next_unit() {
    q += kUnit * kLaneWidth, scale += 8 * kLaneWidth;
    sum16 += 16 * kLaneWidth, sum32 += 8 * kLaneWidth, total16 += 16 * kLaneWidth;
  }
};

// Results per row of a tile with these tokens.
PQ_INLINE size_t width_of(size_t tokens) { return tokens <= 8 ? 8 : kLaneWidth; }

// Of codes that are multiplied as signed bytes, `centre` is subtracted. Offsets that cannot be remain: `offset`, and m
// is raised by d * centre.
template <class T>
PQ_INLINE PanelForm signed_form(const PackedMatrix& w) {
  const PanelForm form = form_of<T>(w, 0);
  constexpr int most = T::top == 0 ? 0 : 128;
  if (form.centre >= 0 && form.centre <= most && T::top - form.centre <= 127) return form;
  return {T::top > 127 ? 128 : 0, true, form.paired};
}

#if defined(PQ_NEON)
#include "packed/tiles_neon.hpp"
#else
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#include "packed/tiles_vnni.hpp"
#else
#include "packed/tiles_words.hpp"
#endif

template <class T>
PQ_INLINE PanelForm panel_form(const PackedMatrix& w) {
  return form_of<T>(w, kRaise<T>);
}
#endif

// tile [8 * panels rows][width] times `scale` -> y [count tokens][8 * panels rows]. Not inlined: within the loops of
// its callers its pointers would be variables in memory.
#if defined(PQ_NEON)
template <int panels>
[[gnu::noinline]] void put_rows(const float* tile, size_t width, size_t count, float scale, float* y, size_t stride) {
  for (size_t t = 0; t < count; t += 4)
    for (size_t r = 0; r < panels * kPanelRows; r += 4) {
      float32x4_t out[4];
      PQ_UNROLL
      for (size_t i = 0; i < 4; ++i) out[i] = vmulq_n_f32(vld1q_f32(tile + (r + i) * width + t), scale);
      transpose4(out);
      for (size_t i = t; i < count && i < t + 4; ++i) vst1q_f32(y + i * stride + r, out[i - t]);
    }
}
#else
template <int panels>
[[gnu::noinline]] void put_rows(const float* tile, size_t width, size_t count, float scale, float* y, size_t stride) {
  const __m256 factor = _mm256_set1_ps(scale);
  for (size_t t = 0; t < count; t += 8) {
    alignas(32) float out[panels][64];
    PQ_UNROLL
    for (size_t p = 0; p < panels; ++p)
      put_eight(out[p], [&](int r) {
        const float* const row = tile + (kPanelRows * p + size_t(r)) * width + t;
        return _mm256_castps_si256(_mm256_mul_ps(_mm256_loadu_ps(row), factor));
      });
    for (size_t i = 0; i < 8 && t + i < count; ++i, y += stride) {
      PQ_UNROLL
      for (size_t p = 0; p < panels; ++p) _mm256_storeu_ps(y + kPanelRows * p, _mm256_load_ps(out[p] + 8 * i));
    }
  }
}
#endif

// tile [8 * panels rows][width] -> rows v ... last of tokens from `token` on.
template <class T, int panels>
PQ_INLINE void put_tile(const PackedMatrix& w, size_t v, size_t last, const float* tile, size_t width, size_t token,
                        size_t tokens, float* y, size_t stride) {
  const size_t count = tokens - token < width ? tokens - token : width;
  if (kLanes<T> == 1 && last - v >= panels * kPanelRows)
    return put_rows<panels>(tile, width, count, w.scale, y + token * stride + v, stride);
  for (size_t r = 0; r < panels * kPanelRows && v + r < last; ++r)
    for (size_t t = 0; t < count; ++t) y[(token + t) * stride + row_of<T>(w, v + r)] = tile[r * width + t] * w.scale;
}

// Sets `count` floats, a multiple of 8, to 0. Not by memset: compilers make `rep stos` of it, which is slow to start.
PQ_INLINE void clear(float* p, size_t count) {
#if defined(__AVX2__)
  __m256 zero = _mm256_setzero_ps();
  asm("" : "+x"(zero));
  for (size_t i = 0; i < count; i += 8) _mm256_storeu_ps(p + i, zero);
#else
  std::memset(p, 0, count * sizeof(float));
#endif
}

// The lines of the results of row v and a vector of tokens: each is on a separate page.
template <class T>
PQ_INLINE void fetch_results(const PackedMatrix& w, size_t v, size_t token, size_t tokens, float* y, size_t stride) {
  for (size_t t = token; t < tokens && t < token + kLaneWidth; ++t)
    __builtin_prefetch(y + t * stride + row_of<T>(w, v), 1);
}

// Unpacks rows v ... end of a panel; rows beyond the end repeat one, and their results are unused.
template <class T, class Unit>
PQ_INLINE void fill_panel(const PackedMatrix& w, size_t v, size_t end, size_t units, PanelForm form, Unit* panel) {
  float* const room = Tabled<T> ? table_scratch(table_floats<T>(w.cols)) : nullptr;
  for (size_t r = 0; r < kPanelRows; ++r) {
    const Row<T> row = row_at<T>(w, v + r < end ? v + r : v, room);
    OneAhead<T> codes(row.line);
    for (size_t u = 0; u < units; ++u) {
      codes.take(row, u, w.cols, u + 1 < units ? unit_at(row, u + 1) : nullptr, panel[u].row[r]);
      raise_codes<T>(panel[u], r, form);
    }
  }
}

// Some panels and the activations of some vectors of tokens stay in L2 together: without the former, the activations
// would be read from L3 again for every eight rows.
constexpr size_t kPanelBytes = 256 << 10, kLaneBytes = 384 << 10;

// One vector of tokens uses each code once: a unit of a panel is unpacked, multiplied and forgotten.
template <class T, bool wide>
void multiply_vector(const PackedMatrix& w, size_t first, size_t last, const Activations& a, float* y, size_t stride) {
  UnitOf<T, wide> unit;
  Row<T> rows[kPanelRows];
  const PanelForm form = panel_form<T>(w);
  const size_t each = table_floats<T>(w.cols), panel_bytes = kPanelRows / kLanes<T> * w.line_bytes;
  float* const room = Tabled<T> ? table_scratch(kPanelRows * each) : nullptr;
  for (size_t v = first; v < last; v += kPanelRows) {
    for (size_t r = 0; r < kPanelRows; ++r) rows[r] = row_at<T>(w, v + r < last ? v + r : v, room + r * each);
    alignas(64) float out[kPanelRows * kLaneWidth];
    clear(out, kPanelRows * kLaneWidth);
    LaneVector x(a, 0);
    OneAhead<T> codes(rows[0].line);
    for (size_t u = 0; u * kUnit < a.padded; ++u, x.next_unit()) {
      const uint8_t* const after = (u + 1) * kUnit < a.padded ? unit_at(rows[0], u + 1) : nullptr;
      for (size_t r = 0; r < kPanelRows; ++r) {
        for (size_t i = 0; r % kLanes<T> == 0 && i < kUnitBytes<T>; i += 64)  // of the next panel
          __builtin_prefetch(rows[r].line + u * kUnitBytes<T> + panel_bytes + i);
        codes.take(rows[r], u, w.cols, r + 1 < kPanelRows ? unit_at(rows[r + 1], u) : after, unit.row[r]);
        raise_codes<T>(unit, r, form);
      }
      tile_of<T::sub, wide>(&unit, form, 1, x, a.tokens, out);
    }
    put_tile<T, 1>(w, v, last, out, width_of(a.tokens), 0, a.tokens, y, stride);
  }
}

template <class T, bool wide>
void multiply_many(const PackedMatrix& w, size_t first, size_t last, const Activations& a, float* y, size_t stride) {
  static_assert(!wide || !T::offset || kCentre<T> != 0);
  if (a.tokens <= kLaneWidth) return multiply_vector<T, wide>(w, first, last, a, y, stride);
  using Unit = UnitOf<T, wide>;
  const size_t units = a.padded / kUnit, vectors = (a.tokens + kLaneWidth - 1) / kLaneWidth;
  const auto fitting = [](size_t room, size_t each) { return room > each ? room / each : 1; };
  const size_t together = fitting(kLaneBytes, kLaneWidth * a.padded * 3 / 2),
               panels = 2 * (vectors <= together ? 1 : fitting(kPanelBytes, 2 * units * sizeof(Unit)));
  auto* const room = reinterpret_cast<Unit*>(scratch(panels * units * sizeof(Unit)));
  const PanelForm form = panel_form<T>(w);
  const size_t panel_bytes = kPanelRows / kLanes<T> * w.line_bytes, share = (2 * panel_bytes / vectors + 64) / 64 * 64;
  for (size_t begin = first; begin < last; begin += panels * kPanelRows) {
    const size_t end = begin + panels * kPanelRows < last ? begin + panels * kPanelRows : last;
    for (size_t v = begin, i = 0; v < end; v += kPanelRows, ++i)
      fill_panel<T>(w, v, end, units, form, room + i * units);
    const uint8_t* next = line_of<T>(w, begin) + panels * panel_bytes;  // fetched in the meantime
    const uint8_t* const stop = next + panels * panel_bytes;
    for (size_t block = 0; block < vectors; block += together)
      for (size_t v = begin, i = 0; v < end; v += 2 * kPanelRows, i += 2)
        for (size_t vector = block; vector < vectors && vector < block + together; ++vector) {
          for (const uint8_t* to = next + share; next < to && next < stop; next += 64) __builtin_prefetch(next, 0, 2);
          alignas(64) float out[2 * kPanelRows * kLaneWidth];
          const LaneVector x(a, vector);
          const size_t token = vector * kLaneWidth, width = width_of(a.tokens - token);
          fetch_results<T>(w, v, token, a.tokens, y, stride);
          const auto put = [&]<int count>(std::integral_constant<int, count>) {
            clear(out, count * kPanelRows * width);
            for (size_t p = 0; p < count; ++p)
              tile_of<T::sub, wide>(room + (i + p) * units, form, units, x, a.tokens - token,
                                    out + p * kPanelRows * width);
            put_tile<T, count>(w, v, end, out, width, token, a.tokens, y, stride);
          };
          // Two panels fill lines of the results.
          if (v + kPanelRows < end)
            put(std::integral_constant<int, 2>{});
          else
            put(std::integral_constant<int, 1>{});
        }
  }
}
