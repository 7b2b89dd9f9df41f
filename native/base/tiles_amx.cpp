#include "base/tiles.hpp"

#if defined(__x86_64__) && defined(__GNUC__) && (defined(__AMX_INT8__) || defined(POLYQUANT_EMULATE_AMX))
#include "base/amx.hpp"

namespace polyquant {
namespace {

constexpr size_t kRows = 16, kTokens = 16, kColumns = 256;
constexpr int kWide = 128;
using Sums = int32_t[kRows * kTokens];

// Integer sums of the columns that share scale `s` of a unit, in tile 0 or 1.
template <int span, int tile>
PQ_INLINE void add_up(const TileUnit& unit, const int8_t* x, size_t s) {
  constexpr size_t line = 64, depth = span == kWide ? line : size_t(span);
  constexpr int weights = 4 + tile, inputs = 6 + tile;
  const int8_t* w = unit.row[0].q + s * size_t(span);
  x += s * size_t(span) * kTokens;
  tile_zero<tile>();
  for (size_t i = 0; i < size_t(span); i += depth) {
    tile_load<weights>(w + i, sizeof(TileRow));
    tile_load<inputs>(x + i * kTokens, line);
    tile_dot<tile, weights, inputs>();
  }
}

// Sums are added up two steps before vectors need them, and stored one step before. The operations of each number have
// the order of those in packed/tiles_vnni.hpp: the results are the same bits.
template <int span, bool offset>
void multiply(const TileUnit* p, size_t units, TileInputs x, float* out) {
  constexpr size_t subs = kColumns / span, groups = span == kWide ? 4 : 1;  // of 32 columns
  alignas(64) Sums sums[2];
  __m512 acc[kRows];
#pragma GCC unroll 16
  for (size_t r = 0; r < kRows; ++r) acc[r] = _mm512_loadu_ps(out + kTokens * r);
  const auto start = [&](size_t u, size_t s) PQ_FLAT {
    const size_t at = u + s / subs;
    if (at >= units) return;
    if (s % 2)
      add_up<span, 1>(p[at], x.q + at * kColumns * kTokens, s % subs);
    else
      add_up<span, 0>(p[at], x.q + at * kColumns * kTokens, s % subs);
  };
  const auto store = [&](size_t s) PQ_FLAT {
    constexpr size_t line = 64;
    if (s % 2)
      tile_store<1>(sums[1], line);
    else
      tile_store<0>(sums[0], line);
  };
  start(0, 0);
  store(0);
  start(0, 1);
  for (size_t u = 0; u < units; ++u) {
#pragma GCC unroll 8
    for (size_t s = 0; s < subs; ++s) {
      start(u, s + 2);
      store(s + 1);  // after the last one, sums that nobody reads
      const __m512 scale = _mm512_loadu_ps(x.scale + kTokens * (8 * u + groups * s));
#pragma GCC unroll 16
      for (size_t r = 0; r < kRows; ++r) {
        const __m512 n = _mm512_cvtepi32_ps(_mm512_load_si512(sums[s % 2] + kTokens * r));
        acc[r] = _mm512_fmadd_ps(_mm512_mul_ps(n, _mm512_set1_ps(p[u].row[r].d[groups * s])), scale, acc[r]);
      }
      if constexpr (offset) {
        const __m512 sum = _mm512_loadu_ps(x.sums + kTokens * (8 * u + s));
#pragma GCC unroll 16
        for (size_t r = 0; r < kRows; ++r) acc[r] = _mm512_fmadd_ps(_mm512_set1_ps(p[u].row[r].m[s]), sum, acc[r]);
      }
    }
  }
#pragma GCC unroll 16
  for (size_t r = 0; r < kRows; ++r) _mm512_storeu_ps(out + kTokens * r, acc[r]);
}

void begin(int span) { configure_tiles(TileConfiguration(span == kWide ? 64 : span)); }
void end() { release_tiles(); }

TileKernels::Multiply* find(int span, bool offset) {
  return span == kWide ? multiply<kWide, false> : offset ? multiply<32, true> : multiply<32, false>;
}

}  // namespace

const TileKernels* tiles_amx() {
  static constexpr TileKernels kernels{begin, end, find};
  return &kernels;
}

}  // namespace polyquant
#else
namespace polyquant {
const TileKernels* tiles_amx() { return nullptr; }
}  // namespace polyquant
#endif
