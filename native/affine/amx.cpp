#if defined(__x86_64__) && defined(__GNUC__)  // compiled with this instruction set: see CMakeLists.txt
#include "affine/matrix.hpp"

#if defined(__AMX_INT8__) || defined(POLYQUANT_EMULATE_AMX)
#include <algorithm>
#include <cstring>

#include "affine/lanes.hpp"
#include "base/amx.hpp"

namespace polyquant {
namespace {

constexpr size_t kTile = 16, kDepth = 64;
// Of codes and inputs: two tiles of each stay in L1 for so many columns.
constexpr size_t kColumns = 1024;

// Rows [first, first + 32), after `last` the last one repeated -> out [columns / 64][32][64], zero beyond `cols`.
void pack_rows(const AffineMatrix& m, size_t first, size_t last, int8_t* out) {
  for (size_t r = 0; r < 2 * kTile; ++r) {
    const int8_t* row = m.codes + std::min(first + r, last - 1) * m.cols;
    for (size_t i = 0; i < m.cols; i += kDepth) {
      int8_t* const to = out + 2 * kTile * i + kDepth * r;
      if (m.cols - i >= kDepth) [[likely]] {
        _mm512_store_si512(to, _mm512_loadu_si512(row + i));
      } else {
        _mm512_store_si512(to, _mm512_setzero_si512());
        std::memcpy(to, row + i, m.cols - i);
      }
    }
  }
}

// [16 rows][16 tokens] -> sums[t * stride + r] of so many tokens and rows.
void put_sums(const int32_t* tile, size_t tokens, size_t rows, int32_t* sums, size_t stride) {
  __m512i x[4][4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) x[i][j] = _mm512_load_si512(tile + 16 * (4 * i + j));
    in_quads(x[i]);
  }
  const __mmask16 mask = __mmask16((1u << rows) - 1);
#pragma GCC unroll 4
  for (size_t i = 0; i < 4; ++i) {
    __m512i of_tokens[4] = {x[0][i], x[1][i], x[2][i], x[3][i]};  // i, i + 4 ...
    exchange_lanes(of_tokens);
#pragma GCC unroll 4
    for (size_t t = 0; t < 4; ++t)
      if (4 * t + i < tokens) _mm512_mask_storeu_epi32(sums + (4 * t + i) * stride, mask, of_tokens[t]);
  }
}

// 32 rows times 32 tokens, or 16 if `two` is false: sums [2 tiles of rows][2 of tokens] of columns [0, columns).
template <bool two, bool more>
PQ_INLINE void multiply_tiles(const int8_t* w, const uint8_t* x, size_t step, size_t columns, int32_t (*sums)[256]) {
  constexpr size_t line = 64;
  if (more) {
    tile_load<0>(sums[0], line);
    tile_load<1>(sums[1], line);
    if (two) tile_load<2>(sums[2], line);
    if (two) tile_load<3>(sums[3], line);
  } else {
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
  }
  for (size_t i = 0; i < columns; i += kDepth, w += 2 * kTile * kDepth, x += kTile * kDepth) {
    tile_load<4>(w, line);
    tile_load<6>(x, line);
    tile_dot<0, 4, 6>();
    tile_load<5>(w + kTile * kDepth, line);
    tile_dot<1, 5, 6>();
    if (!two) continue;
    tile_load<7>(x + step, line);
    tile_dot<2, 4, 7>();
    tile_dot<3, 5, 7>();
  }
  tile_store<0>(sums[0], line);
  tile_store<1>(sums[1], line);
  if (two) tile_store<2>(sums[2], line);
  if (two) tile_store<3>(sums[3], line);
}

void sums(const AffineMatrix& m, size_t first, size_t last, const WideInput& x, int32_t* out, size_t stride) {
  if (x.tokens <= kFew) return affine_vnni().sums(m, first, last, x, out, stride);
  const size_t cols = lane_columns(m.cols), step = kTile * cols, pairs = (x.tokens + 2 * kTile - 1) / (2 * kTile);
  using Sums = int32_t[4][256];
  int8_t* const rows = reinterpret_cast<int8_t*>(scratch(2 * kTile * cols + pairs * sizeof(Sums)));
  auto* const sums = reinterpret_cast<Sums*>(rows + 2 * kTile * cols);
  const Tiles tiles(kDepth);
  for (size_t r = first; r < last; r += 2 * kTile) {
    pack_rows(m, r, last, rows);
    for (size_t column = 0; column < cols; column += kColumns)
      for (size_t p = 0; p < pairs; ++p) {
        const bool two = x.tokens - 2 * kTile * p > kTile;
        const auto times = column ? two ? multiply_tiles<true, true> : multiply_tiles<false, true>
                           : two  ? multiply_tiles<true, false>
                                  : multiply_tiles<false, false>;
        times(rows + 2 * kTile * column, x.lanes + 2 * p * step + kTile * column, step,
              std::min(kColumns, cols - column), sums[p]);
      }
    for (size_t p = 0; p < pairs; ++p)
      for (size_t i = 0; i < 4; ++i) {
        const size_t row = r + kTile * (i % 2), token = 2 * kTile * p + kTile * (i / 2);
        if (row < last && token < x.tokens)
          put_sums(sums[p][i], std::min(kTile, x.tokens - token), std::min(kTile, last - row),
                   out + token * stride + (row - first), stride);
      }
  }
}

constexpr int kSigned = -128;
void put_lanes(const WideInput& x, size_t first, size_t cols, uint8_t* out) {
  put_tokens(x, first, cols, kSigned, out);
}

}  // namespace

const AffineSet& affine_amx() {
  static const AffineSet set = [] {
    AffineSet s = affine_vnni();
    s.sums = sums, s.put_lanes = put_lanes, s.rows = 4 * kTile;
    return s;
  }();
  return set;
}

}  // namespace polyquant
#else
namespace polyquant {
const AffineSet& affine_amx() { return affine_vnni(); }
}  // namespace polyquant
#endif
#endif
