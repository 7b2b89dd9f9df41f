// Rows of 8-bit floats times inputs rounded to bfloat16, which holds every number of both formats: twice the products
// of float inputs. The bits of a code select those of its number from two tables, so no number is special.
#if defined(__x86_64__) && defined(__GNUC__)  // compiled with this instruction set: see CMakeLists.txt
#include <array>
#include <string_view>
#include <vector>

#include "base/sixteen_lines.hpp"
#include "base/with_constant.hpp"
#include "grouped/small_float.hpp"
#include "packed/kernels.hpp"

namespace polyquant {
namespace {

constexpr size_t kStep = 64;     // columns at a time
constexpr size_t kTall = 16;     // rows of a panel
constexpr int kMostTokens = 12;  // of a tile, whose sums are 24 registers

// The upper or the lower bytes of the bfloat16 numbers with codes 0 to 127: those of floats, without their last 16
// bits.
template <bool e5m2>
constexpr std::array<uint8_t, 128> number_bytes(bool upper) {
  std::array<uint8_t, 128> out{};
  for (size_t x = 0; x < out.size(); ++x)
    out[x] = uint8_t(std::bit_cast<uint32_t>(small_float<e5m2>(uint8_t(x))) >> (upper ? 24 : 16));
  return out;
}

template <bool e5m2>
struct Numbers {
  using Table = std::array<uint8_t, 128>;
  alignas(64) static constexpr Table kLow = number_bytes<e5m2>(false);
  alignas(64) static constexpr Table kHigh = number_bytes<e5m2>(true);
  __m512i low[2], high[2];

  PQ_INLINE Numbers() {
    low[0] = _mm512_load_si512(kLow.data()), low[1] = _mm512_load_si512(kLow.data() + 64);
    high[0] = _mm512_load_si512(kHigh.data()), high[1] = _mm512_load_si512(kHigh.data() + 64);
  }

  // 64 codes -> the numbers of the even ones and of the odd ones.
  PQ_INLINE void take(__m512i codes, __m512i& even, __m512i& odd) const {
    asm("" : "+v"(codes));  // GCC would load them for each use
    constexpr int a_or_b_and_c = 0xf8;
    const auto merged = [](__m512i a, __m512i b, int mask)
                            PQ_FLAT { return _mm512_ternarylogic_epi32(a, b, _mm512_set1_epi32(mask), a_or_b_and_c); };
    const __m512i lower = _mm512_permutex2var_epi8(low[0], codes, low[1]),
                  upper = merged(_mm512_permutex2var_epi8(high[0], codes, high[1]), codes, int(0x80808080u));
    even = merged(_mm512_slli_epi16(upper, 8), lower, 0x00ff00ff);
    odd = merged(_mm512_srli_epi16(lower, 8), upper, int(0xff00ff00u));
  }
};

PQ_INLINE __m512 dot(__m512 sums, __m512i x, __m512i y) {
  return _mm512_dpbf16_ps(sums, std::bit_cast<__m512bh>(x), std::bit_cast<__m512bh>(y));
}

// Inputs are in tiles of at most kMostTokens, tile i from token first_of(i) on: of each step, for each of its tokens,
// the even columns and then the odd ones; zeros after the last.
struct TokenTiles {
  size_t tokens, count, padded;  // padded: K rounded up to kStep

  TokenTiles(size_t tokens, size_t cols)
      : tokens(tokens), count((tokens + kMostTokens - 1) / kMostTokens), padded((cols + kStep - 1) / kStep * kStep) {}
  PQ_INLINE size_t first_of(size_t tile) const { return tile * tokens / count; }
};

void arrange(const float* x, size_t tokens, size_t cols, size_t tile, uint16_t* out) {
  const TokenTiles all(tokens, cols);
  const size_t first = all.first_of(tile), last = all.first_of(tile + 1);
  out += first * all.padded;
  __m512i evens, odds;
  {
    alignas(64) uint16_t index[2][32];
    for (int i = 0; i < 32; ++i) index[0][i] = uint16_t(2 * i), index[1][i] = uint16_t(2 * i + 1);
    evens = _mm512_load_si512(index[0]), odds = _mm512_load_si512(index[1]);
  }
  for (size_t k = 0; k < cols; k += kStep)
    for (size_t t = first; t < last; ++t, out += kStep) {
      const uint64_t mask = cols - k < kStep ? (uint64_t(1) << (cols - k)) - 1 : ~uint64_t(0);
      const float* const from = x + t * cols + k;
      const auto sixteen = [&](int i) { return _mm512_maskz_loadu_ps(__mmask16(mask >> 16 * i), from + 16 * i); };
      const auto low = std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(sixteen(1), sixteen(0))),
                 high = std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(sixteen(3), sixteen(2)));
      _mm512_storeu_si512(out, _mm512_permutex2var_epi16(low, evens, high));
      _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi16(low, odds, high));
    }
}

// Scales of a row's groups, with that of the matrix -> scale [groups]; unused: as much memory.
PQ_INLINE void scales_of(const PackedMatrix& w, size_t v, float* scale, float* unused) {
  group_scales(w, v, false, scale, unused);
  if (w.scale == 1.0f) return;
  for (size_t g = 0; g < w.tables.groups; ++g) scale[g] *= w.scale;
}

// The same scales for each 32 columns, the last one also for those after the last column.
PQ_INLINE void repeat_scales(const Tables& t, size_t padded, float* scale) {
  const size_t times = t.group / 32;
  scale[t.groups] = scale[t.groups - 1];
  if (times == 1) return;
  for (size_t g = t.groups, i = padded / 32; g-- > 0;)
    for (const float s = scale[g]; i > g * times;) scale[--i] = s;
}

// Numbers per row of the memory for its scales.
PQ_INLINE size_t room_for_scales(const PackedMatrix& w) { return std::max(w.tables.groups, w.cols / 32) + 16; }

// Sums of the products of R rows and N tokens, in C registers each: a product waits for the last one in its register.
template <int R, int N, int C>
struct Sums {
  __m512 of[R][N][C];

  PQ_INLINE void clear() {
    each_constant<R * N * C>([&]<int i>() PQ_FLAT { of[i / C / N][i / C % N][i % C] = _mm512_setzero_ps(); });
  }

  // += 64 columns; x: the inputs of the tokens for them.
  template <class Numbers>
  PQ_INLINE void add(const Numbers& numbers, const uint8_t* const (&line)[R], size_t k, __mmask64 mask,
                     const uint16_t* x) {
    each_constant<R>([&]<int r>() PQ_FLAT {
      fetch_ahead<kStep>(line[r] + k);
      __m512i even, odd;
      numbers.take(_mm512_maskz_loadu_epi8(mask, line[r] + k), even, odd);
      each_constant<N>([&]<int n>() PQ_FLAT {
        __m512* const sum = of[r][n];
        sum[0] = dot(sum[0], even, _mm512_loadu_si512(x + kStep * n));
        sum[C - 1] = dot(sum[C - 1], odd, _mm512_loadu_si512(x + kStep * n + 32));
      });
    });
  }

  // total += the sums times the scale of their row; clears them.
  template <class ScaleOf>
  PQ_INLINE void put(const ScaleOf& scale_of, __m512 (&total)[R][N]) {
    each_constant<R>([&]<int r>() PQ_FLAT {
      const __m512 scale = scale_of(r);
      each_constant<N>([&]<int n>() PQ_FLAT {
        __m512* const sum = of[r][n];
        if constexpr (C == 2) sum[0] = _mm512_add_ps(sum[0], sum[1]);
        total[r][n] = _mm512_fmadd_ps(sum[0], scale, total[r][n]);
      });
    });
    clear();
  }
};

// R rows from v on times N tokens, which are one tile. tables: R + 1 rows of scales.
template <bool e5m2, int N, int R>
PQ_INLINE void rows_times(const PackedMatrix& w, size_t v, const uint16_t* x, float* tables, float* y, size_t stride) {
  const Numbers<e5m2> numbers;
  const Tables& t = w.tables;
  const size_t cols = w.cols, room = room_for_scales(w);
  const bool same = t.groups == 1 || t.group % kStep == 0;  // one scale for all columns of a step
  const uint8_t* line[R];
  const float* scale[R];
  __m512 total[R][N];
  each_constant<R>([&]<int r>() PQ_FLAT {
    line[r] = w.data + (v + r) * w.line_bytes;
    float* const table = tables + r * room;
    scale[r] = table;
    scales_of(w, v + r, table, tables + R * room);
    if (!same) repeat_scales(t, (cols + kStep - 1) / kStep * kStep, table);
    each_constant<N>([&]<int n>() PQ_FLAT { total[r][n] = _mm512_setzero_ps(); });
  });
  const __mmask64 all = ~__mmask64(0), rest = (__mmask64(1) << cols % kStep) - 1;
  if (same) {
    Sums<R, N, R * N >= 8 ? 1 : 2> sums;
    sums.clear();
    const size_t group = t.groups == 1 ? cols : t.group;
    for (size_t k = 0, g = 0; k < cols; ++g) {
      const size_t end = cols - k < group ? cols : k + group;
      for (; k + kStep <= end; k += kStep) sums.add(numbers, line, k, all, x + k * N);
      if (k < end) sums.add(numbers, line, k, rest, x + k * N), k = end;
      sums.put([&](int r) PQ_FLAT { return _mm512_set1_ps(scale[r][g]); }, total);
    }
  } else {
    Sums<R, N, 1> sums;
    sums.clear();
    for (size_t k = 0; k < cols; k += kStep) {
      sums.add(numbers, line, k, k + kStep <= cols ? all : rest, x + k * N);
      sums.put(
          [&](int r) PQ_FLAT {
            const float* const two = scale[r] + k / 32;
            return _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(two[0]), _mm512_set1_ps(two[1]));
          },
          total);
    }
  }
  each_constant<R * N>([&]<int i>() PQ_FLAT {
    constexpr int r = i / N, n = i % N;
    y[size_t(n) * stride + v + r] = _mm512_reduce_add_ps(total[r][n]);
  });
}

template <bool e5m2, int N>
void few_rows(const PackedMatrix& w, size_t first, size_t last, const uint16_t* x, float* y, size_t stride) {
  constexpr int R = 2;
  float* const tables = table_scratch((R + 1) * room_for_scales(w));
  size_t v = first;
  for (; v + R <= last; v += R) rows_times<e5m2, N, R>(w, v, x, tables, y, stride);
  for (; v < last; ++v) rows_times<e5m2, N, 1>(w, v, x, tables, y, stride);
}

// Sums of several rows side by side start anew after so many columns, and with each scale: always in the same order.
constexpr size_t kBlock = 256;

// A block of sixteen rows.
struct Block {
  alignas(64) uint8_t copy[kTall * kBlock];
  SixteenLines lines{copy, kBlock};

  // Columns [begin, end) of the rows from v on, of which `rows` exist.
  PQ_INLINE void take(const PackedMatrix& w, size_t v, size_t rows, size_t begin, size_t end) {
    lines = complete_lines<kBlock>({w.data + v * w.line_bytes + begin, w.line_bytes}, rows, end - begin, copy);
  }

  // put(j, even columns, odd columns) of the four columns from k + 4 j on, j < 4: lane l of a register is row l.
  template <class Numbers, class Put>
  PQ_INLINE void sixteen(const Numbers& numbers, size_t k, const Put& put) const {
    __m512i four[4];
    lines.from(k).load(four);
    in_quads(four);
    each_constant<4>([&]<int j>() PQ_FLAT {
      __m512i even, odd;
      numbers.take(four[j], even, odd);
      put.template operator()<j>(even, odd);
    });
  }
};

// Scales of sixteen rows from v on, of which `rows` exist -> [groups][16], valid until the next call.
const float* scales_beside(const PackedMatrix& w, size_t v, size_t rows) {
  const size_t groups = w.tables.groups, room = room_for_scales(w);
  float *const scales = table_scratch(kTall * groups + 2 * room), *const scale = scales + kTall * groups;
  for (size_t r = 0; r < kTall; ++r) {
    if (r < rows) scales_of(w, v + r, scale, scale + room);
    for (size_t g = 0; g < groups; ++g) scales[kTall * g + r] = r < rows ? scale[g] : 0;
  }
  return scales;
}

// Where sums of the columns from k on end, and the group of k.
struct Run {
  size_t group, end;

  PQ_INLINE Run(const Tables& t, size_t k, size_t padded) {
    const size_t block = std::min(padded, k / kBlock * kBlock + kBlock);
    group = t.groups == 1 ? 0 : std::min(k / t.group, t.groups - 1);
    end = group + 1 == t.groups ? block : std::min(block, (group + 1) * t.group);
  }
};

// Sums of sixteen rows times N tokens, of even and of odd columns: products wait for the last one in their register.
template <int N>
struct Beside {
  __m512 even[N], odd[N], total[N];

  PQ_INLINE Beside() {
    each_constant<N>([&]<int n>() PQ_FLAT { total[n] = _mm512_setzero_ps(); });
  }

  PQ_INLINE void start() {
    each_constant<N>([&]<int n>() PQ_FLAT { even[n] = odd[n] = _mm512_setzero_ps(); });
  }

  // += four columns; x: the first token's inputs of the even ones.
  PQ_INLINE void add(__m512i evens, __m512i odds, const uint16_t* x) {
    const auto two = [=](size_t i) PQ_FLAT {
      int32_t inputs;
      std::memcpy(&inputs, x + i, sizeof inputs);
      return _mm512_set1_epi32(inputs);
    };
    each_constant<N>([&]<int n>() PQ_FLAT {
      even[n] = dot(even[n], evens, two(kStep * n));
      odd[n] = dot(odd[n], odds, two(kStep * n + 32));
    });
  }

  PQ_INLINE void put(const float* scales) {
    const __m512 scale = _mm512_loadu_ps(scales);
    each_constant<N>([&]<int n>()
                         PQ_FLAT { total[n] = _mm512_fmadd_ps(_mm512_add_ps(even[n], odd[n]), scale, total[n]); });
  }

  PQ_INLINE void store(float* y, size_t stride, size_t rows) const {
    const __mmask16 mask = __mmask16((1u << rows) - 1);
    each_constant<N>([&]<int n>() PQ_FLAT { _mm512_mask_storeu_ps(y + size_t(n) * stride, mask, total[n]); });
  }
};

// Sixteen rows times the N tokens of one tile, while their numbers are unpacked.
template <bool e5m2, int N>
[[gnu::noinline]] void sixteen_times(const PackedMatrix& w, size_t v, size_t rows, size_t padded, const uint16_t* x,
                                     float* y, size_t stride) {
  const Numbers<e5m2> numbers;
  const float* const scales = scales_beside(w, v, rows);
  Block block;
  Beside<N> sums;
  for (size_t k = 0; k < padded;) {
    if (k % kBlock == 0) {
      const uint8_t* const next = w.data + (v + kTall) * w.line_bytes + k * kTall;  // to L2
      for (size_t i = 0; i < kBlock * kTall; i += 64) __builtin_prefetch(next + i, 0, 2);
      block.take(w, v, rows, k, std::min(w.cols, k + kBlock));
    }
    const Run run(w.tables, k, padded);
    sums.start();
    for (; k < run.end; k += 16) {
      const uint16_t* const in = x + k / kStep * kStep * N + k % kStep / 2;
      block.sixteen(numbers, k % kBlock,
                    [&]<int j>(__m512i even, __m512i odd) PQ_FLAT { sums.add(even, odd, in + 2 * j); });
    }
    sums.put(scales + kTall * run.group);
  }
  sums.store(y + v, stride, rows);
}

// The numbers of sixteen rows. panel: for each four columns the register of the even ones and of the odd ones.
template <bool e5m2>
void fill_panel(const PackedMatrix& w, size_t v, size_t rows, size_t padded, __m512i* panel) {
  const Numbers<e5m2> numbers;
  Block block;
  for (size_t begin = 0; begin < w.cols; begin += kBlock) {
    block.take(w, v, rows, begin, std::min(w.cols, begin + kBlock));
    for (size_t k = 0; k < std::min(padded - begin, kBlock); k += 16, panel += 8)
      block.sixteen(numbers, k,
                    [&]<int j>(__m512i even, __m512i odd) PQ_FLAT { panel[2 * j] = even, panel[2 * j + 1] = odd; });
  }
}

// A panel, of which `rows` rows exist, times the N tokens x of a tile. scales: [groups][16].
template <int N>
[[gnu::noinline]] void tile(const __m512i* panel, const Tables& t, size_t padded, const float* scales, size_t rows,
                            const uint16_t* x, float* y, size_t stride) {
  Beside<N> sums;
  for (size_t k = 0; k < padded;) {
    const Run run(t, k, padded);
    sums.start();
    for (; k < run.end; k += 32) {
      const uint16_t* in = x + k / kStep * kStep * N + k % kStep / 2;
      for (int quad = 0; quad < 8; ++quad, in += 2, panel += 2)
        sums.add(_mm512_load_si512(panel), _mm512_load_si512(panel + 1), in);
    }
    sums.put(scales + kTall * run.group);
  }
  sums.store(y, stride, rows);
}

template <bool e5m2>
void panel_times(const PackedMatrix& w, size_t v, size_t rows, const TokenTiles& tokens, const uint16_t* x, float* y,
                 size_t stride) {
  auto* const panel = reinterpret_cast<__m512i*>(scratch(kTall * tokens.padded * 2));
  const float* const scales = scales_beside(w, v, rows);
  fill_panel<e5m2>(w, v, rows, tokens.padded, panel);
  const uint8_t* next = w.data + (v + rows) * w.line_bytes;  // fetched to L2 in the meantime
  const uint8_t* const stop = next + rows * w.line_bytes;
  const size_t share = rows * w.line_bytes / tokens.count + 64;
  for (size_t i = 0; i < tokens.count; ++i) {
    for (const uint8_t* to = next + share; next < to && next < stop; next += 64) __builtin_prefetch(next, 0, 2);
    const size_t first = tokens.first_of(i), count = tokens.first_of(i + 1) - first;
    with_constant<kMostTokens>(count, [&]<int N>() {
      tile<N>(panel, w.tables, tokens.padded, scales, rows, x + first * tokens.padded, y + first * stride + v, stride);
    });
  }
}

template <bool e5m2>
void multiply_bfloats(const PackedMatrix& w, size_t first, size_t last, const uint16_t* x, size_t tokens, float* y,
                      size_t stride) {
  if (tokens <= kFewTokens)
    return with_constant<kFewTokens>(tokens, [&]<int N>() { few_rows<e5m2, N>(w, first, last, x, y, stride); });
  const TokenTiles tiles(tokens, w.cols);
  for (size_t v = first; v < last; v += kTall) {
    const size_t rows = std::min(last - v, kTall);
    if (tiles.count > 1)
      panel_times<e5m2>(w, v, rows, tiles, x, y, stride);
    else
      with_constant<kMostTokens>(tokens,
                                 [&]<int N>() { sixteen_times<e5m2, N>(w, v, rows, tiles.padded, x, y, stride); });
  }
}

size_t tiles_of(size_t tokens) { return TokenTiles(tokens, 0).count; }

constexpr BfloatKernel kE4m3{tiles_of, arrange, multiply_bfloats<false>},
    kE5m2{tiles_of, arrange, multiply_bfloats<true>};

}  // namespace

std::span<const PackedKernel> grouped_bf16() {
  static const std::vector<PackedKernel> kernels = [] {
    std::vector<PackedKernel> all(grouped_vnni().begin(), grouped_vnni().end());
    for (PackedKernel& kernel : all) {
      const std::string_view name = kernel.name;
      kernel.bfloats = name == "e4m3" ? &kE4m3 : name == "e5m2" ? &kE5m2 : nullptr;
    }
    return all;
  }();
  return kernels;
}

}  // namespace polyquant
#endif
