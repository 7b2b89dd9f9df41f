// The rounding and arrangement of activations, and the shared loop over rows.
#include "packed/loop.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include "base/half.hpp"
#include "base/threads.hpp"
#include "kernel_sets.hpp"

namespace polyquant {

const PackedSet& packed_set() { return kernel_set().packed(); }

std::span<const PackedKernel> grouped_kernels() { return kernel_set().grouped(); }

namespace {

thread_local Room panel_room, row_room, input_room, lane_room, float_room, bfloat_room, table_room;

}  // namespace

size_t lane_vectors(size_t tokens) { return (tokens + kLaneWidth - 1) / kLaneWidth; }

SideBySide lanes_in(Room& room, size_t vectors, size_t padded) {
  const size_t all = kLaneWidth * vectors * padded;
  uint8_t* memory = room.at_least(all + all / 32 * (1 + 2 + 1 + 1) * sizeof(float));
  auto* scale = reinterpret_cast<float*>(memory + all);
  float *sum16 = scale + all / 32, *sum32 = sum16 + all / 16;
  return {reinterpret_cast<int8_t*>(memory), scale, sum16, sum32, reinterpret_cast<int16_t*>(sum32 + all / 32)};
}

SideBySide lanes_from(const SideBySide& lanes, size_t vector, size_t padded) {
  const size_t skipped = kLaneWidth * vector * padded;
  return {lanes.q + skipped, lanes.scale + skipped / 32, lanes.sum16 + skipped / 16, lanes.sum32 + skipped / 32,
          lanes.total16 + skipped / 16};
}

void put_side_by_side(const Activations& a, const SideBySide& to, size_t unit) {
  if (const auto put = packed_set().put_side_by_side) return put(a, to, unit);
  constexpr size_t width = kLaneWidth;
  const size_t k = a.padded, begin = unit * kUnit, end = begin + kUnit;
  for (size_t t = 0; t < lane_vectors(a.tokens) * width; ++t) {
    const size_t vector = t / width * k, lane = t % width;
    const bool unused = t >= a.tokens;
    const auto number = [&](const float* from, size_t i, size_t per) { return unused ? 0 : from[(t * k + i) / per]; };
    for (size_t i = begin; i < end; i += 4) {
      uint32_t four = 0;
      if (!unused) std::memcpy(&four, a.q + t * k + i, 4);
      std::memcpy(to.q + width * (vector + i) + 4 * lane, &four, 4);
    }
    for (size_t i = begin; i < end; i += 16) {
      to.sum16[width * (vector + i) / 16 + lane] = number(a.sum16, i, 16);
      int total = 0;
      if (!unused)
        for (size_t j = 0; j < 16; ++j) total += a.q[t * k + i + j];
      to.total16[width * (vector + i) / 16 + lane] = int16_t(total);
    }
    for (size_t i = begin; i < end; i += 32) {
      to.scale[width * (vector + i) / 32 + lane] = number(a.scale, i, 32);
      to.sum32[width * (vector + i) / 32 + lane] = number(a.sum32, i, 32);
    }
  }
}

uint8_t* Room::at_least(size_t bytes) {
  if (bytes > size_) {
    size_ = (bytes + 4095) / 4096 * 4096;
    data_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, size_)));
    if (!data_) std::abort();  // a few rows of floats
  }
  return data_.get();
}

void Room::Free::operator()(uint8_t* p) const { std::free(p); }

size_t rows_of_a_chunk(const PackedMatrix& w, size_t share) {
  const size_t together = std::max(kLeastBytes, share) / (w.line_bytes / w.lanes + 1);
  return std::max<size_t>(1, together / kRowsTogether) * kRowsTogether;
}

size_t share_of_a_chunk(size_t bytes) { return bytes / (kChunks * size_t(get_threads())); }

Activations rounded(const float* x, size_t cols, size_t tokens, Rounding how, bool few) {
  const size_t padded = (cols + kUnit - 1) / kUnit * kUnit, blocks = padded / 32;
  uint8_t* room = input_room.at_least(tokens * ((few ? 3 : 1) * padded + 4 * blocks * sizeof(float)));
  auto* scale = reinterpret_cast<float*>(room);
  float *sum16 = scale + tokens * blocks, *sum32 = sum16 + 2 * tokens * blocks;
  auto* q = reinterpret_cast<int8_t*>(sum32 + tokens * blocks);
  int8_t *paired = few ? q + tokens * padded : nullptr, *apart = few ? paired + tokens * padded : nullptr;
  const PackedSet& set = packed_set();
  const auto one = [&](size_t t) {
    const float* row = x + t * cols;
    int8_t* qt = q + t * padded;
    float *st = scale + t * blocks, *at = sum16 + 2 * t * blocks, *bt = sum32 + t * blocks;
    if (how == Rounding::token) {
      set.round_token(row, cols, blocks, qt, st, at, bt);
    } else {
      const bool wide = how == Rounding::wide;
      const size_t full = cols / 128 * 4;
      set.round_blocks(row, full, wide, qt, st, at, bt);
      for (size_t b = full; b < blocks; b += 4) {
        float rest[128] = {};
        for (size_t j = 32 * b; j < cols && j < 32 * b + 128; ++j) rest[j - 32 * b] = row[j];
        set.round_blocks(rest, 4, wide, qt + 32 * b, st + b, at + 2 * b, bt + b);
      }
    }
    if (!few) return;
    for (size_t i = 0; i < padded; i += 16)
      std::memcpy(paired + t * padded + (i / 16 % 4 == 1 || i / 16 % 4 == 2 ? i ^ 48 : i), qt + i, 16);
    for (size_t i = 0; i < padded; i += 64)
      for (size_t j = 0; j < 32; ++j) {
        apart[t * padded + i + j] = qt[i + 2 * j];
        apart[t * padded + i + 32 + j] = qt[i + 2 * j + 1];
      }
  };
  parallel_for(tokens > 8 ? (tokens + 7) / 8 : 1, [&](size_t c) {
    const size_t first = tokens > 8 ? 8 * c : 0, last = tokens > 8 ? std::min(tokens, first + 8) : tokens;
    for (size_t t = first; t < last; ++t) one(t);
  });
  return {q, paired, apart, scale, sum16, sum32, tokens, padded, how != Rounding::block, {}, packed_set().tiles};
}

FloatInputs float_inputs(Room& room, const float* x, size_t tokens, size_t cols) {
  const auto put = packed_set().put_float_lanes;
  if (tokens <= kFewTokens || !put) return {x, nullptr, tokens};
  const size_t vectors = lane_vectors(tokens);
  auto* const lanes = reinterpret_cast<float*>(room.at_least(vectors * kLaneWidth * cols * sizeof(float)));
  parallel_for(vectors, [&](size_t v) {
    const size_t first = v * kLaneWidth;
    put(x + first * cols, std::min(kLaneWidth, tokens - first), cols, lanes + first * cols);
  });
  return {x, lanes, tokens};
}

FloatInputs bfloat_inputs(Room& room, const float* x, size_t tokens, size_t cols, const BfloatKernel* kernel) {
  if (kernel) {
    auto* const out = reinterpret_cast<uint16_t*>(room.at_least(tokens * (cols + 64) * sizeof(uint16_t)));
    parallel_for(kernel->tiles(tokens), [&](size_t i) { kernel->arrange(x, tokens, cols, i, out); });
    return {x, nullptr, tokens, out};
  }
  thread_local Room rounded;
  auto* const out = reinterpret_cast<float*>(rounded.at_least(tokens * cols * sizeof(float)));
  parallel_for(tokens, [&](size_t t) {
    for (size_t k = t * cols; k < (t + 1) * cols; ++k) out[k] = bfloat_to_float(float_to_bfloat(x[k]));
  });
  return float_inputs(room, out, tokens, cols);
}

void float_rows(const PackedJob& job, size_t first, size_t last, const FloatInputs& in, size_t stride) {
  const PackedMatrix& w = *job.matrix;
  if (in.bfloats) return job.kernel->bfloats->multiply(w, first, last, in.bfloats, in.tokens, job.y, stride);
  constexpr size_t in_cache = 256 << 10;
  const size_t most = in.tokens > kFewTokens ? in_cache / (w.cols * sizeof(float)) / 8 * 8 : 8;
  const size_t several = std::clamp<size_t>(most, 8, kFloatRows);
  // Floats are multiplied in place, unless they are misaligned in the file.
  const bool floats = job.dequantizer && job.dequantizer->weights == 1 && job.dequantizer->bytes == sizeof(float) &&
                      w.lanes == 1 && w.scale == 1.0f;
  if (floats && reinterpret_cast<uintptr_t>(w.data) % alignof(float) == 0) {
    const auto* all = reinterpret_cast<const float*>(w.data);
    for (size_t v = first; v < last; v += several)
      packed_set().multiply_floats(all + v * w.cols, std::min(several, last - v), w.cols, in, job.y + v, stride);
    return;
  }
  if (job.kernel && job.kernel->floats && in.tokens <= kFewTokens)
    return job.kernel->floats(w, first, last, in.x, in.tokens, job.y, stride);
  const std::string_view number = job.dequantizer ? job.dequantizer->name : "";
  const auto halves = packed_set().multiply_halves;
  if (halves && (number == "bf16" || number == "f16") && in.tokens <= kFewTokens && w.lanes == 1 && w.scale == 1.0f)
    return halves(w.data + first * w.line_bytes, number == "bf16", last - first, w.cols, in.x, in.tokens, job.y + first,
                  stride);
  // Rows of several lanes are not contiguous: one at a time.
  const size_t together = w.lanes == 1 ? several : 1;
  auto* rows = reinterpret_cast<float*>(row_room.at_least((together * w.cols + 8) * sizeof(float)));
  for (size_t v = first; v < last; v += together) {
    const size_t n = std::min(together, last - v);
    for (size_t i = 0; i < n; ++i) {
      float* row = rows + i * w.cols;
      if (job.dequantizer)
        job.dequantizer->dequantize(w.data + (v + i) * w.line_bytes, row, w.cols / size_t(job.dequantizer->weights));
      else
        job.kernel->dequantize(w, v + i, row);
    }
    packed_set().multiply_floats(rows, n, w.cols, in, job.y + w.row(v), stride);
    if (w.scale != 1.0f)
      for (size_t t = 0; t < in.tokens; ++t)
        for (size_t i = 0; i < n; ++i) job.y[t * stride + w.row(v + i)] *= w.scale;
  }
}

uint8_t* scratch(size_t bytes) { return panel_room.at_least(bytes); }

float* table_scratch(size_t floats) { return reinterpret_cast<float*>(table_room.at_least(floats * sizeof(float))); }

// The kernel of all matrices whose inputs are rounded to bfloat16; null if one has none.
static const BfloatKernel* common_kernel(std::span<const PackedJob> jobs, Rounding rounding) {
  const BfloatKernel* common = nullptr;
  for (const PackedJob& job : jobs)
    if (job.bfloats(rounding) && !(common = job.bfloat_kernel())) return nullptr;
  return common;
}

void multiply_packed(std::span<const PackedJob> jobs, const float* x, size_t tokens, size_t stride, Rounding rounding) {
  if (tokens == 0 || jobs.empty()) return;
  struct Piece {
    size_t job, first, last;
  };
  thread_local std::vector<Piece> pieces;
  pieces.clear();
  bool integers = false, floats = false, bfloats = false;
  size_t bytes = 0;
  for (const PackedJob& job : jobs) bytes += job.matrix->rows / job.matrix->lanes * job.matrix->line_bytes;
  for (size_t j = 0; j < jobs.size(); ++j) {
    const PackedMatrix& w = *jobs[j].matrix;
    (jobs[j].integers(rounding) ? integers : jobs[j].bfloats(rounding) ? bfloats : floats) = true;
    const size_t step = rows_of_a_chunk(w, share_of_a_chunk(bytes));
    for (size_t first = 0; first < w.rows; first += step) pieces.push_back({j, first, std::min(w.rows, first + step)});
  }
  Activations a{};
  const auto orders = [&](const PackedJob& job) { return job.integers(rounding) && job.kernel->orders; };
  const bool few = tokens <= kFewTokens && std::any_of(jobs.begin(), jobs.end(), orders);
  if (integers) a = rounded(x, jobs[0].matrix->cols, tokens, rounding, few);
  const size_t cols = jobs[0].matrix->cols;
  const FloatInputs in = floats ? float_inputs(float_room, x, tokens, cols) : FloatInputs{x, nullptr, tokens};
  const FloatInputs rounded_in =
      bfloats ? bfloat_inputs(bfloat_room, x, tokens, cols, common_kernel(jobs, rounding)) : in;
  const auto in_lanes = [&](const PackedJob& job) {
    return job.integers(rounding) && (tokens > job.kernel->alone || (a.tiles && tokens >= job.kernel->tiled));
  };
  if (std::any_of(jobs.begin(), jobs.end(), in_lanes)) {
    a.lanes = lanes_in(lane_room, lane_vectors(tokens), a.padded);
    parallel_for(a.padded / kUnit, [&](size_t unit) { put_side_by_side(a, a.lanes, unit); });
  }
  const Piece* list = pieces.data();
  parallel_for(pieces.size(), [&](size_t i) {
    const Piece piece = list[i];
    const PackedJob& job = jobs[piece.job];
    if (job.integers(rounding))
      job.kernel->multiply(*job.matrix, piece.first, piece.last, a, job.y, stride);
    else
      float_rows(job, piece.first, piece.last, job.bfloats(rounding) ? rounded_in : in, stride);
  });
}

}  // namespace polyquant
