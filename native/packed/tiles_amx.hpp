// Products of nine and more tokens with the tiles of base/tiles.hpp, in panels of sixteen rows. Included by
// packed/kernels.hpp.

constexpr size_t kTileRows = 16;
static_assert(kTileRows == 2 * kPanelRows && kLaneWidth == 16);

PQ_INLINE void put_row(const Codes& c, PanelForm form, TileRow& row) {
  const __m256i centre = _mm256_set1_epi8(char(form.centre));
  PQ_UNROLL
  for (int k = 0; k < 256; k += 64) {
    const __m256i x = _mm256_sub_epi8(bytes32(c.q + k), centre), y = _mm256_sub_epi8(bytes32(c.q + k + 32), centre);
    const auto to = reinterpret_cast<__m256i*>(row.q + k);
    _mm256_store_si256(to, form.paired ? _mm256_permute2x128_si256(x, y, 0x20) : x);
    _mm256_store_si256(to + 1, form.paired ? _mm256_permute2x128_si256(x, y, 0x31) : y);
  }
  std::memcpy(row.d, c.d, sizeof row.d);
  if (form.offset)
    _mm256_storeu_ps(row.m,
                     _mm256_fmadd_ps(_mm256_loadu_ps(c.d), _mm256_set1_ps(float(form.centre)), _mm256_loadu_ps(c.m)));
}

// Unpacks rows v ... end of a panel; rows beyond the end repeat one, and their results are unused.
template <class T>
PQ_INLINE void fill_tiles(const PackedMatrix& w, size_t v, size_t end, size_t units, PanelForm form, TileUnit* panel) {
  float* const room = Tabled<T> ? table_scratch(table_floats<T>(w.cols)) : nullptr;
  const size_t panel_bytes = kTileRows / kLanes<T> * w.line_bytes;
  for (size_t r = 0; r < kTileRows; ++r) {
    const Row<T> row = row_at<T>(w, v + r < end ? v + r : v, room);
    for (size_t u = 0; u < units; ++u) {
      for (size_t i = 0; r % kLanes<T> == 0 && i < kUnitBytes<T>; i += 64)  // of the next panel
        _mm_prefetch(reinterpret_cast<const char*>(row.line + u * kUnitBytes<T> + panel_bytes + i), _MM_HINT_T1);
      Codes c;
      take_unit(row, u, w.cols, c);
      put_row(c, form, panel[u].row[r]);
    }
  }
}

template <class T, bool wide>
void multiply_tiles(const PackedMatrix& w, size_t first, size_t last, const Activations& a, float* y, size_t stride) {
  // Units of a panel, and vectors of tokens, that stay in L1 and in L2.
  constexpr size_t together = 2, panel_bytes = 512 << 10, lane_bytes = 768 << 10, tile = kTileRows * kLaneWidth;
  static_assert(T::sub == 32);
  constexpr int span = wide ? 128 : 32;
  const size_t units = a.padded / kUnit, vectors = (a.tokens + kLaneWidth - 1) / kLaneWidth;
  const auto fitting = [](size_t room, size_t each) { return room > each ? room / each : 1; };
  const size_t most = fitting(lane_bytes, kLaneWidth * a.padded * 3 / 2),
               panels = vectors <= most ? 1 : fitting(panel_bytes, units * sizeof(TileUnit));
  const size_t sums = (vectors < most ? vectors : most) * tile * sizeof(float);
  auto* const room = reinterpret_cast<TileUnit*>(scratch(panels * units * sizeof(TileUnit) + sums));
  auto* const out = reinterpret_cast<float*>(room + panels * units);
  const PanelForm form = signed_form<T>(w);
  const auto multiply = a.tiles->multiply(span, form.offset);
  a.tiles->begin(span);
  for (size_t begin = first; begin < last; begin += panels * kTileRows) {
    const size_t end = begin + panels * kTileRows < last ? begin + panels * kTileRows : last;
    for (size_t v = begin, i = 0; v < end; v += kTileRows, ++i) fill_tiles<T>(w, v, end, units, form, room + i * units);
    for (size_t block = 0; block < vectors; block += most)
      for (size_t v = begin, i = 0; v < end; v += kTileRows, ++i) {
        const size_t stop = vectors < block + most ? vectors : block + most;
        std::memset(out, 0, (stop - block) * tile * sizeof(float));
        for (size_t u = 0; u < units; u += together)
          for (size_t vector = block; vector < stop; ++vector) {
            const LaneVector x(a, vector);
            if (u + together >= units) fetch_results<T>(w, v, vector * kLaneWidth, a.tokens, y, stride);
            const size_t skipped = u * kUnit * kLaneWidth;
            const TileInputs some{x.q + skipped, x.scale + skipped / 32, x.sum32 + skipped / 32};
            multiply(room + i * units + u, units - u < together ? units - u : together, some,
                     out + (vector - block) * tile);
          }
        for (size_t vector = block; vector < stop; ++vector)
          put_tile<T, 2>(w, v, end, out + (vector - block) * tile, kLaneWidth, vector * kLaneWidth, a.tokens, y,
                         stride);
      }
  }
  a.tiles->end();
}
