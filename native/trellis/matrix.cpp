// The loops over blocks and columns, and the kernels for any processor.
#include "trellis/matrix.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/half.hpp"
#include "base/simd.hpp"
#include "base/threads.hpp"
#include "kernel_sets.hpp"
#include "trellis/rotate.hpp"

namespace polyquant {
namespace {

constexpr size_t kBlock = 128;  // inputs that share an activation scale; outputs per chunk of work
constexpr size_t kColumns = kBlock / 16;
constexpr size_t kStrip = 32;  // columns of a square whose 128 rows fit L1

size_t window_at(const TrellisMatrix& w, const uint8_t* tile, size_t position) {
  const size_t size = 32 * w.bits, bit = w.bits * position;
  uint32_t word = 0;
  for (size_t i = 0; i < 3; ++i) word |= uint32_t(tile[(bit / 8 + i) % size]) << (8 * i);
  return word >> bit % 8 & ((1u << w.window) - 1);
}

size_t place(const TrellisMatrix& w, size_t position) { return w.order ? w.order[position] : position; }

void plain_levels(const TrellisMatrix& w, const uint8_t* tile, int16_t* panel) {
  for (size_t j = 0; j < kTile; ++j) {
    const size_t at = place(w, j), input = at / 16, output = at % 16;
    panel[(input / 2 * 16 + output) * 2 + input % 2] = w.levels[window_at(w, tile, j)];
  }
}

void plain_numbers(const TrellisMatrix& w, const uint8_t* tile, const float* scales, float* out, size_t stride) {
  for (size_t j = 0; j < kTile; ++j) {
    const size_t at = place(w, j);
    out[at / 16 * stride + at % 16] = w.numbers[window_at(w, tile, j)] * scales[at % 16];
  }
}

void plain_times(const int16_t* panel, const TrellisInput& in, size_t block, float step, float zero,
                 const float* scales, float* y, size_t stride) {
  for (size_t t = 0; t < in.tokens; ++t) {
    const int16_t* a = in.codes + (block * in.tokens + t) * kBlock;
    const float scale = in.scale[t * (in.padded / kBlock) + block] * step,
                offset = in.sum[t * (in.padded / kBlock) + block] * zero;
    for (size_t o = 0; o < 16; ++o) {
      int dot = 0;
      for (size_t p = 0; p < kBlock / 2; ++p)
        dot += panel[(p * 16 + o) * 2] * a[2 * p] + panel[(p * 16 + o) * 2 + 1] * a[2 * p + 1];
      y[t * stride + o] += (float(dot) * scale + offset) * scales[o];
    }
  }
}

void plain_few(const TrellisMatrix& w, size_t first, size_t last, const TrellisInput& in, float* y, size_t stride) {
  int16_t panel[kBlock * 16];
  for (size_t block = 0; block * kBlock < w.inputs; ++block)
    for (size_t c = first; c < last; ++c) {
      std::memset(panel, 0, sizeof panel);
      for (size_t r = block * 8; r < std::min(w.tile_rows(), block * 8 + 8); ++r)
        plain_levels(w, w.tile(r, c), panel + r % 8 * kTile);
      plain_times(panel, in, block, w.step, w.zero, w.scales_of(block * kBlock) + 16 * c, y + 16 * (c - first), stride);
    }
}

void plain_times_floats(const float* w, size_t inputs, const float* x, size_t padded, size_t tokens, float* y,
                        size_t stride) {
  for (size_t t = 0; t < tokens; ++t)
    for (size_t i = 0; i < inputs; ++i)
      for (size_t o = 0; o < 16; ++o) y[t * stride + o] += x[t * padded + i] * w[16 * i + o];
}

void plain_transpose(const float* x, float* out) {
  for (size_t i = 0; i < kBlock; ++i)
    for (size_t j = 0; j < kBlock; ++j) out[j * kLine + i] = x[i * kLine + j];
}

TrellisKernel plain_find(unsigned, Book, bool) { return {plain_few, plain_levels, plain_numbers, 1}; }

PQ_SIMD void times_one(const float* x, const float* factors, float* out, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] = x[i] * factors[i];
}

PQ_SIMD void as_halves(float* x, const float* sv, float su, size_t count) {
  for (size_t i = 0; i < count; ++i) x[i] = half_to_float(float_to_half(x[i] * sv[i] * su));
}

// values * scales of a tile: [16][stride]
void scaled_tile(const TrellisMatrix& w, size_t row, size_t column, float* out, size_t stride) {
  static constexpr float ones[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  const uint8_t* tile = w.tile(row, column);
  const size_t first = 16 * row, last = std::min(w.inputs, first + 16) - 1;
  const float* scales = w.scales_of(first) + 16 * column;
  if (w.scales_of(last) + 16 * column == scales) return w.kernel.numbers(w, tile, scales, out, stride);
  w.kernel.numbers(w, tile, ones, out, stride);
  for (size_t i = first; i <= last; ++i)
    for (size_t o = 0; o < 16; ++o) out[(i - first) * stride + o] *= w.scales_of(i)[16 * column + o];
}

// As scaled_tile, for 128 inputs and the tile columns [first, last): [128][stride]; for half-precision weights, the
// weights
// themselves
void scaled_panel(const TrellisMatrix& w, size_t block, size_t first, size_t last, float* out, size_t stride) {
  for (size_t r = block * 8; r < std::min(w.tile_rows(), block * 8 + 8); ++r)
    for (size_t c = first; c < last; ++c) scaled_tile(w, r, c, out + r % 8 * 16 * stride + (c - first) * 16, stride);
  if (!w.halves) return;
  for (size_t i = block * kBlock; i < std::min(w.inputs, (block + 1) * kBlock); ++i)
    as_halves(out + (i - block * kBlock) * stride, w.sv + 16 * first, w.su[i],
              std::min(16 * last, w.outputs) - 16 * first);
}

}  // namespace

const TrellisSet& trellis_plain() {
  static constexpr TrellisSet set{plain_find, plain_times, plain_times_floats, rotate_down, plain_transpose, finish};
  return set;
}

const TrellisSet& trellis_set() { return kernel_set().trellis(); }

void trellis_dequantize(const TrellisMatrix& w, float* out) {
  const TrellisSet& set = trellis_set();
  parallel_for((w.outputs + kBlock - 1) / kBlock, [&](size_t chunk) {
    alignas(64) thread_local float wide[kBlock * kLine], tall[kBlock * kLine];
    const size_t n0 = chunk * kBlock, count = std::min(kBlock, w.outputs - n0);
    for (size_t block = 0; block * kBlock < w.inputs; ++block) {
      const size_t k0 = block * kBlock, rows = std::min(kBlock, w.inputs - k0);
      for (size_t c = 0; c < count; c += kStrip) {
        scaled_panel(w, block, (n0 + c) / 16, std::min(w.tile_columns(), (n0 + c + kStrip) / 16), wide + c, kLine);
        if (w.block_k > 1) set.rotate_down(wide + c, rows, kStrip, w.block_k);
      }
      set.transpose(wide, tall);
      if (w.block_n > 1)
        for (size_t i = 0; i < rows; i += kStrip) set.rotate_down(tall + i, count, kStrip, w.block_n);
      for (size_t n = 0; n < count; ++n) {
        float* to = out + (n0 + n) * w.inputs + k0;
        if (w.halves)
          std::memcpy(to, tall + n * kLine, rows * sizeof(float));
        else
          set.finish(tall + n * kLine, w.sv[n0 + n], w.su + k0, to, rows);
      }
    }
  });
}

namespace {

// The inputs of one matrix: times su, rotated, rounded.
struct Prepared {
  std::vector<float> x, scale, sum;
  std::vector<int16_t> codes;
  std::vector<int32_t> pairs, quads, lower;
  TrellisInput in;

  void make(const TrellisMatrix& w, const float* from, size_t tokens, bool rounded) {
    const size_t blocks = (w.inputs + kBlock - 1) / kBlock, padded = blocks * kBlock;
    x.assign(tokens * padded, 0.0f);
    if (rounded) scale.resize(tokens * blocks), sum.resize(tokens * blocks), codes.resize(tokens * padded);
    const bool folded = w.halves && !rounded;  // su is folded into the weights
    const size_t together = tokens > 8 ? 8 : tokens;
    parallel_for((tokens + together - 1) / together, [&](size_t c) {
      for (size_t t = c * together; t < std::min(tokens, (c + 1) * together); ++t) {
        float* row = x.data() + t * padded;
        if (folded)
          std::memcpy(row, from + t * w.inputs, w.inputs * sizeof(float));
        else
          times_one(from + t * w.inputs, w.su, row, w.inputs);
        if (w.block_k > 1) rotate_blocks(row, w.inputs, w.block_k);
        if (rounded) round_row(row, blocks, t, tokens);
      }
    });
    in = {tokens, padded, scale.data(), sum.data(), codes.data(), nullptr, nullptr, nullptr};
    if (rounded && tokens <= w.kernel.most) pair(w, padded);
  }

 private:
  void round_row(const float* row, size_t blocks, size_t t, size_t tokens) {
    constexpr size_t together = 8;
    int8_t q[together * kBlock];
    float scales[4 * together], sum16[8 * together], sum32[4 * together];
    for (size_t first = 0; first < blocks; first += together) {
      const size_t n = std::min(together, blocks - first);
      packed_set().round_blocks(row + first * kBlock, 4 * n, true, q, scales, sum16, sum32);
      for (size_t i = 0; i < n; ++i) {
        const size_t b = first + i;
        scale[t * blocks + b] = scales[4 * i];
        sum[t * blocks + b] = (sum32[4 * i] + sum32[4 * i + 1]) + (sum32[4 * i + 2] + sum32[4 * i + 3]);
        for (size_t j = 0; j < kBlock; ++j) codes[(b * tokens + t) * kBlock + j] = q[i * kBlock + j];
      }
    }
  }

  // Lanes process eight positions of the stream at a time: in row-major order these share an input, otherwise each has
  // its own.
  void pair(const TrellisMatrix& w, size_t padded) {
    const size_t lanes = w.order ? 2 * padded : padded, wide = std::bit_ceil(in.tokens);
    for (std::vector<int32_t>* v : {&pairs, &quads, &lower}) v->assign(wide * lanes, 0);
    for (size_t t = 0; t < in.tokens; ++t)
      for (size_t i = 0; i < lanes; ++i) {
        const size_t tile = w.order ? i / 32 : i / 16, input = w.order ? w.order[kTile - 32 + i % 32] / 16 : i % 16;
        const int16_t a = codes[(tile / 8 * in.tokens + t) * kBlock + tile % 8 * 16 + input];
        const size_t at = (i / 16 * wide + t) * 16 + i % 16;
        pairs[at] = int32_t(uint32_t(uint16_t(a)) * 0x10001u);
        quads[at] = int32_t(uint32_t(uint8_t(a)) * 0x1010101u);
        lower[at] = int32_t(uint16_t(a));
      }
    in.pairs = pairs.data(), in.quads = quads.data(), in.lower = lower.data();
  }
};

// y [T][count]: the outputs of a chunk, before their rotation
void chunk_of(const TrellisMatrix& w, const Prepared& p, size_t tokens, Rounding rounding, size_t first, size_t last,
              float* y, size_t width) {
  const TrellisSet& set = trellis_set();
  if (rounding != Rounding::none && tokens <= w.kernel.most) return w.kernel.few(w, first, last, p.in, y, width);
  alignas(64) thread_local int16_t levels[kBlock * 16];
  alignas(64) thread_local float floats[kBlock * 16];
  for (size_t block = 0; block * kBlock < w.inputs; ++block)
    for (size_t c = first; c < last; ++c) {
      float* to = y + 16 * (c - first);
      if (rounding == Rounding::none) {
        scaled_panel(w, block, c, c + 1, floats, 16);
        set.times_floats(floats, std::min(kBlock, w.inputs - block * kBlock), p.x.data() + block * kBlock, p.in.padded,
                         tokens, to, width);
        continue;
      }
      const size_t rows = std::min(w.tile_rows(), block * 8 + 8);
      if (rows < block * 8 + 8) std::memset(levels, 0, sizeof levels);
      for (size_t r = block * 8; r < rows; ++r) w.kernel.levels(w, w.tile(r, c), levels + r % 8 * kTile);
      set.times(levels, p.in, block, w.step, w.zero, w.scales_of(block * kBlock) + 16 * c, to, width);
    }
}

}  // namespace

void multiply_trellis(std::span<const TrellisJob> jobs, const float* x, size_t tokens, size_t stride,
                      Rounding rounding) {
  if (tokens == 0 || jobs.empty()) return;
  struct Piece {
    size_t job, column;
  };
  thread_local std::vector<Prepared> prepared;
  thread_local std::vector<Piece> pieces;
  if (prepared.size() < jobs.size()) prepared.resize(jobs.size());
  pieces.clear();
  for (size_t j = 0; j < jobs.size(); ++j) {
    prepared[j].make(*jobs[j].matrix, x, tokens, rounding != Rounding::none);
    for (size_t c = 0; c < jobs[j].matrix->tile_columns(); c += kColumns) pieces.push_back({j, c});
  }
  const Prepared* inputs = prepared.data();
  const Piece* list = pieces.data();
  parallel_for(pieces.size(), [&](size_t i) {
    const TrellisMatrix& w = *jobs[list[i].job].matrix;
    const size_t first = list[i].column, last = std::min(w.tile_columns(), first + kColumns),
                 width = 16 * (last - first);
    const size_t count = std::min(w.outputs - 16 * first, width);
    thread_local std::vector<float> room;
    room.assign(tokens * width, 0.0f);
    chunk_of(w, inputs[list[i].job], tokens, rounding, first, last, room.data(), width);
    const bool folded = w.halves && rounding == Rounding::none;
    for (size_t t = 0; t < tokens; ++t) {
      float *row = room.data() + t * width, *y = jobs[list[i].job].y + t * stride + 16 * first;
      if (w.block_n > 1) rotate_blocks(row, count, w.block_n);
      if (folded)
        std::memcpy(y, row, count * sizeof(float));
      else
        times_one(row, w.sv + 16 * first, y, count);
    }
  });
}

}  // namespace polyquant
