#if defined(__x86_64__) && defined(__GNUC__)  // compiled with this instruction set: see CMakeLists.txt
#include "affine/bytes.hpp"
#include "affine/lanes.hpp"

namespace polyquant {
namespace {

// Many tokens: up to three vectors of them are multiplied by some rows, whose codes are broadcast, four columns at a
// time, from where they are. The codes are raised by 128, and sums start at -128 times the sum of a token's inputs.
constexpr size_t kMostVectors = 3;

// sums[t * stride + r] = row r of `rows` times token t of `tokens`; x: vectors of WideInput::lanes, `step` bytes apart.
// start: of each token.
template <size_t rows, size_t vectors>
void lanes_times(const int8_t* const (&w)[8], size_t cols, const uint8_t* x, size_t step, const int32_t* start,
                 size_t tokens, int32_t* sums, size_t stride, size_t count) {
  const __m512i raise = _mm512_set1_epi8(-128);
  __m512i acc[rows][vectors];
  PQ_UNROLL
  for (size_t r = 0; r < rows; ++r) PQ_UNROLL
  for (size_t v = 0; v < vectors; ++v) acc[r][v] = _mm512_loadu_si512(start + kLaneWidth * v);
  for (size_t i = 0; i < cols; i += 4, x += 64) {
    const size_t left = cols - i;
    __m512i tokens16[vectors];
    PQ_UNROLL
    for (size_t v = 0; v < vectors; ++v) tokens16[v] = _mm512_load_si512(x + step * v);
    PQ_UNROLL
    for (size_t r = 0; r < rows; ++r) {
      int32_t four = 0;
      if (left >= 4) [[likely]]
        std::memcpy(&four, w[r] + i, 4);
      else
        std::memcpy(&four, w[r] + i, left);
      const __m512i code = _mm512_xor_si512(_mm512_set1_epi32(four), raise);
      PQ_UNROLL
      for (size_t v = 0; v < vectors; ++v) acc[r][v] = _mm512_dpbusd_epi32(acc[r][v], code, tokens16[v]);
    }
  }
  alignas(64) int32_t lanes[rows][vectors * kLaneWidth];
  PQ_UNROLL
  for (size_t r = 0; r < rows; ++r) PQ_UNROLL
  for (size_t v = 0; v < vectors; ++v) _mm512_store_si512(lanes[r] + v * kLaneWidth, acc[r][v]);
  for (size_t t = 0; t < tokens; ++t)
    for (size_t r = 0; r < count; ++r) sums[t * stride + r] = lanes[r][t];
}

template <size_t rows, size_t vectors>
void rows_times(const AffineMatrix& m, size_t first, size_t last, const uint8_t* x, const int32_t* start, size_t tokens,
                int32_t* out, size_t stride) {
  for (size_t r = first; r < last; r += rows) {
    const int8_t* w[8];
    for (size_t i = 0; i < rows; ++i) w[i] = m.codes + std::min(r + i, last - 1) * m.cols;
    lanes_times<rows, vectors>(w, m.cols, x, kLaneWidth * lane_columns(m.cols), start, tokens, out + (r - first),
                               stride, std::min(rows, last - r));
  }
}

void sums(const AffineMatrix& m, size_t first, size_t last, const WideInput& x, int32_t* out, size_t stride) {
  if (x.tokens <= kFew) return few_sums<Bytes>(m, first, last, x, out, stride);
  const size_t all = (x.tokens + kLaneWidth - 1) / kLaneWidth, passes = (all + kMostVectors - 1) / kMostVectors;
  for (size_t pass = 0; pass < passes; ++pass) {
    const size_t begin = pass * all / passes, vectors = (pass + 1) * all / passes - begin, token = kLaneWidth * begin,
                 tokens = std::min(x.tokens - token, kLaneWidth * vectors);
    const auto times = vectors == 1 ? rows_times<8, 1> : vectors == 2 ? rows_times<8, 2> : rows_times<8, 3>;
    int32_t start[kLaneWidth * kMostVectors] = {};
    for (size_t t = 0; t < tokens; ++t) start[t] = int32_t(-128u * uint32_t(x.total[token + t]));
    times(m, first, last, x.lanes + token * lane_columns(m.cols), start, tokens, out + token * stride, stride);
  }
}

void put_lanes(const WideInput& x, size_t first, size_t cols, uint8_t* out) { put_tokens(x, first, cols, -128, out); }

}  // namespace

const AffineSet& affine_vnni() {
  static constexpr AffineSet set{true, true, sums, floats, put_lanes};
  return set;
}

}  // namespace polyquant
#endif
