#include "affine/matrix.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>
#include <vector>

#include "base/simd.hpp"
#include "base/threads.hpp"
#include "codecs/affine.hpp"
#include "kernel_sets.hpp"
#include "packed/loop.hpp"

namespace polyquant {
namespace {

PQ_SIMD int32_t dot(const int8_t* w, const int16_t* x, size_t n) {
  int32_t sum = 0;
  for (size_t i = 0; i < n; ++i) sum += int32_t(w[i]) * x[i];
  return sum;
}

void sums_plain(const AffineMatrix& m, size_t first, size_t last, const WideInput& x, int32_t* sums, size_t stride) {
  for (size_t r = first; r < last; ++r)
    for (size_t t = 0; t < x.tokens; ++t)
      sums[t * stride + r - first] = dot(m.codes + r * m.cols, x.words + t * x.padded, m.cols);
}

PQ_SIMD float dot_floats(const int8_t* w, const float* x, size_t n) {
  float lanes[16] = {};
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    PQ_LOOP
    for (size_t j = 0; j < 16; ++j) lanes[j] += float(w[i + j]) * x[i + j];
  }
  float sum = 0;
  for (; i < n; ++i) sum += float(w[i]) * x[i];
  for (float lane : lanes) sum += lane;
  return sum;
}

void floats_plain(const AffineMatrix& m, size_t first, size_t last, const float* x, size_t tokens, float* y,
                  size_t stride) {
  const size_t size = m.group();
  if (tokens > kFewFloats) {
    thread_local std::vector<float> row;
    row.resize(m.cols);
    for (size_t r = first; r < last; ++r) {
      for (size_t g = 0; g < m.groups; ++g)
        for (size_t i = g * size; i < (g + 1) * size; ++i)
          row[i] = (float(m.codes[r * m.cols + i]) - (m.offset ? m.offset[r * m.groups + g] : 0.0f)) *
                   m.scale[r * m.groups + g];
      for (size_t t = 0; t < tokens; ++t)
        packed_set().multiply_floats(row.data(), 1, m.cols, {x + t * m.cols, nullptr, 1}, y + t * stride + r, stride);
    }
    return;
  }
  for (size_t r = first; r < last; ++r)
    for (size_t t = 0; t < tokens; ++t) {
      float sum = 0;
      for (size_t g = 0; g < m.groups; ++g)
        sum += m.scale[r * m.groups + g] * dot_floats(m.codes + r * m.cols + g * size, x + t * m.cols + g * size, size);
      y[t * stride + r] = sum;
    }
}

const AffineSet& affine_set() { return kernel_set().affine(); }

// ---------------------------------------------------------------- activations

PQ_SIMD void round_row(const float* x, size_t n, float scale, float offset, int16_t* q) {
  for (size_t i = 0; i < n; ++i) {
    float v = std::rint(x[i] / scale + offset);
    v = v == v ? v : 0.0f;
    v = v < -128.0f ? -128.0f : v;
    v = v > 127.0f ? 127.0f : v;
    q[i] = int16_t(int32_t(v));
  }
}

PQ_SIMD uint32_t largest_bits(const float* x, size_t n) {
  uint32_t top = 0;
  const uint32_t* bits = reinterpret_cast<const uint32_t*>(x);
  for (size_t i = 0; i < n; ++i) top = std::max(top, bits[i] & 0x7FFFFFFFu);
  return top;
}

PQ_SIMD void to_bytes(const int16_t* q, size_t n, uint8_t* out) {
  for (size_t i = 0; i < n; ++i) out[i] = uint8_t(q[i] + 128);
}

PQ_SIMD int32_t sum_of(const int16_t* q, size_t n) {
  int32_t sum = 0;
  for (size_t i = 0; i < n; ++i) sum += q[i];
  return sum;
}

// An input as integers on a common grid, or on one grid per token.
struct Rounded {
  Inputs how = Inputs::floats;
  float scale = 0, offset = 0;
  bool panels = false;
  std::vector<int16_t> words;
  std::vector<uint8_t> bytes;
  Room lanes;
  std::vector<float> scales;   // [T] if each token has its own
  std::vector<int32_t> total;  // [T] sums of the codes
  std::vector<float> floats;   // [T, K] codes times scale, if groups of weights have scales
  WideInput wide{};

  bool is(Inputs h, const AffineMatrix& m) const {
    return how == h && (h != Inputs::fixed || (scale == m.input_scale && offset == m.input_offset));
  }

  // Index of the code of a token's column.
  size_t place(size_t t, size_t i) const {
    return panels ? (i / kPanel * wide.tokens + t) * kPanel + i % kPanel : t * wide.padded + i;
  }

  void make(Inputs h, const AffineMatrix& m, const float* x, size_t tokens, const AffineSet& set) {
    how = h;
    scale = m.input_scale;
    offset = m.input_offset;
    floats.clear();
    if (h == Inputs::floats) return;
    panels = set.panels && tokens > kFew;
    const size_t cols = m.cols, step = panels ? kPanel : cols;
    // Row stride not a power of two: the four rows of a tile would map to the same cache line.
    const size_t padded = panels ? (cols + kPanel - 1) / kPanel * kPanel : (cols + 63) / 64 * 64 + 64;
    words.resize(tokens * padded);
    bytes.resize(set.bytes ? tokens * padded : 0);
    scales.resize(tokens);
    total.resize(tokens);
    wide = {tokens, padded, words.data(), bytes.data(), total.data()};
    parallel_for((tokens + 7) / 8, [&](size_t c) {
      for (size_t t = 8 * c; t < std::min(tokens, 8 * c + 8); ++t) {
        const float* row = x + t * cols;
        if (h == Inputs::token) {
          const uint32_t bits = largest_bits(row, cols);
          float top;
          std::memcpy(&top, &bits, sizeof top);
          scales[t] = top == 0 ? 1.0f : top / 127.0f;
        }
        int32_t sum = 0;
        for (size_t i = 0; i < cols; i += step) {
          const size_t n = std::min(step, cols - i), room = panels ? kPanel : padded;
          int16_t* q = words.data() + place(t, i);
          round_row(row + i, n, h == Inputs::fixed ? scale : scales[t], h == Inputs::fixed ? offset : 0, q);
          std::fill(q + n, q + room, int16_t(0));
          sum += sum_of(q, n);
          if (set.bytes) to_bytes(q, room, bytes.data() + place(t, i));
        }
        total[t] = sum;
      }
    });
    if (!panels || !set.put_lanes) return;
    const size_t each = kLaneWidth * lane_columns(cols), vectors = (tokens + kLaneWidth - 1) / kLaneWidth;
    uint8_t* const out = lanes.at_least(vectors * each);
    parallel_for(vectors, [&](size_t v) { set.put_lanes(wide, v * kLaneWidth, cols, out + v * each); });
    wide.lanes = out;
  }

  // The inputs as floats (codes times scale if rounded), in the layout of the set.
  const float* as_floats(const float* x, size_t cols, size_t tokens, const AffineSet& set) {
    if (!floats.empty()) return floats.data();  // already computed for another matrix
    const bool apart = set.panels && tokens > kFewFloats;
    if (how == Inputs::floats && !apart) return x;
    const size_t padded = apart ? (cols + kPanel - 1) / kPanel * kPanel : cols;
    floats.assign(tokens * padded, 0.0f);
    for (size_t t = 0; t < tokens; ++t)
      for (size_t i = 0; i < cols; i += kPanel) {
        float* to = floats.data() + (apart ? i * tokens + t * kPanel : t * cols + i);
        const size_t n = std::min(kPanel, cols - i);
        if (how == Inputs::floats)
          std::copy_n(x + t * cols + i, n, to);
        else
          for (size_t j = 0; j < n; ++j) to[j] = float(words[place(t, i + j)]) * scales[t];
      }
    return floats.data();
  }
};

// ---------------------------------------------------------------- one chunk of rows

void whole_rows(const AffineMatrix& m, const Rounded& in, size_t first, size_t last, float* y, size_t stride) {
  thread_local std::vector<int32_t> room;
  const size_t rows = last - first, tokens = in.wide.tokens;
  room.resize(tokens * rows);
  affine_set().sums(m, first, last, in.wide, room.data(), rows);
  for (size_t t = 0; t < tokens; ++t) {
    const int32_t* sums = room.data() + t * rows;
    float* out = y + t * stride + first;
    if (in.how == Inputs::fixed)
      for (size_t r = 0; r < rows; ++r)
        out[r] = float(int64_t(sums[r]) + m.quant_bias[first + r]) * m.deq_scale[first + r];
    else if (!m.offset)
      for (size_t r = 0; r < rows; ++r) out[r] = float(sums[r]) * in.scales[t] * m.scale[first + r];
    else
      for (size_t r = 0; r < rows; ++r)
        out[r] = float(double(sums[r]) - double(m.offset[first + r]) * in.total[t]) * in.scales[t] * m.scale[first + r];
  }
}

// The offsets' contribution: sum over groups of scale * offset * (sum of the inputs of the group).
void subtract_offsets(const AffineMatrix& m, const float* x, size_t tokens, size_t first, size_t last, float* y,
                      size_t stride) {
  thread_local std::vector<float> room;
  const size_t size = m.group();
  room.assign(tokens * m.groups, 0.0f);
  for (size_t t = 0; t < tokens; ++t)
    for (size_t g = 0; g < m.groups; ++g) {
      double sum = 0;
      for (size_t i = 0; i < size; ++i) sum += x[t * m.cols + g * size + i];
      room[t * m.groups + g] = float(sum);
    }
  for (size_t t = 0; t < tokens; ++t)
    for (size_t r = first; r < last; ++r) {
      float sum = 0;
      for (size_t g = 0; g < m.groups; ++g)
        sum += m.scale[r * m.groups + g] * m.offset[r * m.groups + g] * room[t * m.groups + g];
      y[t * stride + r] -= sum;
    }
}

void float_rows(const AffineMatrix& m, size_t first, size_t last, const float* x, size_t tokens, float* y,
                size_t stride) {
  affine_set().floats(m, first, last, x, tokens, y, stride);
  if (m.offset && tokens <= kFewFloats) subtract_offsets(m, x, tokens, first, last, y, stride);
}

// Eight chunks per thread, each with a minimum number of bytes; for many tokens, at most the rows whose panel fits L2.
size_t rows_of_a_chunk(const AffineMatrix& m, size_t tokens, size_t bytes) {
  if (tokens > kFew) return affine_set().rows;
  const size_t share = std::max<size_t>(16 << 10, bytes / (8 * size_t(get_threads())));
  return std::max<size_t>(1, share / m.cols / 12) * 12;  // the kernels process 2, 3 or 4 rows at once
}

}  // namespace

const AffineSet& affine_plain() {
  static constexpr AffineSet set{false, false, sums_plain, floats_plain};
  return set;
}

void multiply_affine(std::span<const AffineJob> jobs, const float* x, size_t tokens, size_t stride, Rounding rounding) {
  if (tokens == 0 || jobs.empty()) return;
  struct Piece {
    size_t job, first, last;
    const float* x;        // float path
    const Rounded* input;  // integer path
  };
  thread_local std::vector<Piece> pieces;
  thread_local std::vector<Rounded> inputs;
  pieces.clear();
  if (inputs.size() < jobs.size()) inputs.resize(jobs.size());  // at most one each
  size_t used = 0, bytes = 0;
  for (const AffineJob& job : jobs) bytes += job.matrix->rows * job.matrix->cols;
  for (size_t j = 0; j < jobs.size(); ++j) {
    const AffineMatrix& m = *jobs[j].matrix;
    const Inputs how = rounding == Rounding::none ? Inputs::floats : m.of(tokens);
    const auto end = inputs.begin() + long(used);
    auto found = std::find_if(inputs.begin(), end, [&](const Rounded& r) { return r.is(how, m); });
    if (found == end) {
      found->make(how, m, x, tokens, affine_set());
      ++used;
    }
    const bool whole = how == Inputs::fixed || (how == Inputs::token && m.groups == 1);
    const float* floats = whole ? nullptr : found->as_floats(x, m.cols, tokens, affine_set());
    const Rounded* input = whole ? &*found : nullptr;
    const size_t step = rows_of_a_chunk(m, tokens, bytes);
    for (size_t first = 0; first < m.rows; first += step)
      pieces.push_back({j, first, std::min(m.rows, first + step), floats, input});
  }
  const Piece* list = pieces.data();
  parallel_for(pieces.size(), [&](size_t i) {
    const Piece& piece = list[i];
    const AffineJob& job = jobs[piece.job];
    if (piece.input)
      whole_rows(*job.matrix, *piece.input, piece.first, piece.last, job.y, stride);
    else
      float_rows(*job.matrix, piece.first, piece.last, piece.x, tokens, job.y, stride);
  });
}

}  // namespace polyquant
