#include "packed/experts.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "base/threads.hpp"
#include "packed/loop.hpp"

namespace polyquant {
namespace {

// Outputs per piece: they stay in L2 until they are copied to their places.
constexpr size_t kMostOutputs = size_t(1) << 15;

// The assignments of one expert: order[first ... first + count).
struct Chosen {
  size_t expert, first, count;
  size_t vector = 0;  // of its first assignment, where tokens are side by side
};

// Rows [first, last) of a matrix for all assignments of its expert. at: offset of the matrix's outputs in a row of y.
struct Piece {
  const PackedJob* job;
  const uint32_t* order;
  size_t begin, count;
  size_t first, last, at;
  SideBySide lanes;  // of these assignments
};

// The plan of the calling thread; helpers access it through pointers.
struct Plan {
  std::vector<uint32_t> order;  // assignments sorted by expert, in stable order; those without an expert last
  std::vector<size_t> starts;
  std::vector<Chosen> chosen;
  std::vector<Piece> pieces;
};

void sort_by_expert(const int32_t* ids, size_t assignments, size_t experts, Plan& plan) {
  const auto expert = [=](size_t a) { return ids[a] >= 0 && size_t(ids[a]) < experts ? size_t(ids[a]) : experts; };
  plan.starts.assign(experts + 2, 0);
  plan.order.resize(assignments);
  plan.chosen.clear();
  for (size_t a = 0; a < assignments; ++a) ++plan.starts[expert(a) + 1];
  for (size_t e = 0; e <= experts; ++e) {
    if (e < experts && plan.starts[e + 1]) plan.chosen.push_back({e, plan.starts[e], plan.starts[e + 1]});
    plan.starts[e + 1] += plan.starts[e];
  }
  for (size_t a = 0; a < assignments; ++a) plan.order[plan.starts[expert(a)]++] = uint32_t(a);
}

// An input [rows, cols]: floats, their int8 codes, or both, as the matrices require.
struct Input {
  const float* x;
  Activations a;
  size_t cols;
  bool floats, integers;
  Rounding rounding;

  Activations rows(size_t first, size_t count, const SideBySide& lanes) const {
    const size_t n = a.padded, blocks = a.padded / 32;
    return {a.q + first * n,
            a.paired + first * n,
            a.apart + first * n,
            a.scale + first * blocks,
            a.sum16 + 2 * first * blocks,
            a.sum32 + first * blocks,
            count,
            n,
            a.wide,
            lanes,
            a.tiles};
  }
};

// Gathers rows order[i] / per of an input.
Input gathered(const Input& in, const uint32_t* order, size_t n, size_t per) {
  thread_local Room room;
  const size_t padded = in.integers ? in.a.padded : 0, blocks = padded / 32, cols = in.floats ? in.cols : 0;
  auto* x = reinterpret_cast<float*>(room.at_least(n * (3 * padded + (4 * blocks + cols) * sizeof(float)) + 64));
  float *scale = x + n * cols, *sum16 = scale + n * blocks, *sum32 = sum16 + 2 * n * blocks;
  auto* q = reinterpret_cast<int8_t*>(sum32 + n * blocks);
  int8_t *paired = q + n * padded, *apart = paired + n * padded;
  parallel_for((n + 31) / 32, [=, &in](size_t chunk) {
    for (size_t i = 32 * chunk; i < std::min(n, 32 * chunk + 32); ++i) {
      const size_t t = order[i] / per;
      if (cols) std::memcpy(x + i * cols, in.x + t * cols, cols * sizeof(float));
      if (!padded) continue;
      std::memcpy(q + i * padded, in.a.q + t * padded, padded);
      std::memcpy(paired + i * padded, in.a.paired + t * padded, padded);
      std::memcpy(apart + i * padded, in.a.apart + t * padded, padded);
      std::memcpy(scale + i * blocks, in.a.scale + t * blocks, blocks * sizeof(float));
      std::memcpy(sum16 + 2 * i * blocks, in.a.sum16 + 2 * t * blocks, 2 * blocks * sizeof(float));
      std::memcpy(sum32 + i * blocks, in.a.sum32 + t * blocks, blocks * sizeof(float));
    }
  });
  return {x,          {q, paired, apart, scale, sum16, sum32, n, padded, in.a.wide}, in.cols, in.floats, in.integers,
          in.rounding};
}

// Puts the gathered inputs of each expert with many side by side.
SideBySide expert_lanes(const Input& together, std::vector<Chosen>& chosen) {
  thread_local Room room;
  const size_t padded = together.a.padded;
  size_t vectors = 0;
  for (Chosen& c : chosen) {
    c.vector = vectors;
    if (c.count > kFewTokens) vectors += lane_vectors(c.count);
  }
  if (vectors == 0) return {};
  const SideBySide lanes = lanes_in(room, vectors, padded);
  const size_t units = padded / kUnit;
  parallel_for(chosen.size() * units, [&](size_t i) {
    const Chosen& c = chosen[i / units];
    if (c.count <= kFewTokens) return;
    put_side_by_side(together.rows(c.first, c.count, {}), lanes_from(lanes, c.vector, padded), i % units);
  });
  return lanes;
}

void multiply_rows(const PackedJob& job, size_t first, size_t last, const Input& in, size_t row, size_t count,
                   const SideBySide& lanes, float* y, size_t stride) {
  if (job.integers(in.rounding))
    return job.kernel->multiply(*job.matrix, first, last, in.rows(row, count, lanes), y, stride);
  thread_local Room room;
  PackedJob here = job;
  here.y = y;
  const float* const x = in.x + row * in.cols;
  float_rows(here, first, last,
             job.bfloats(in.rounding) ? bfloat_inputs(room, x, count, in.cols, job.bfloat_kernel())
                                      : float_inputs(room, x, count, in.cols),
             stride);
}

// Several assignments: computed in thread-local memory first, because their rows of y are scattered.
void multiply_piece(const Piece& p, const Input& in, float* y, size_t stride) {
  thread_local Room room;
  const PackedMatrix& whole = *p.job->matrix;
  const bool apart = whole.lane_step > 1;  // rows of a line are not contiguous
  const size_t n = p.last - p.first, width = apart ? whole.rows : n;
  auto* out = reinterpret_cast<float*>(room.at_least(p.count * width * sizeof(float)));
  const PackedMatrix part = apart ? whole : whole.part(p.first, n);
  PackedJob job = *p.job;
  job.matrix = &part;
  multiply_rows(job, apart ? p.first : 0, apart ? p.last : n, in, p.begin, p.count, p.lanes, out, width);
  for (size_t i = 0; i < p.count; ++i) {
    float* to = y + p.order[i] * stride + p.at;
    if (!apart)
      std::memcpy(to + p.first, out + i * width, n * sizeof(float));
    else
      for (size_t v = p.first; v < p.last; ++v) to[whole.row(v)] = out[i * width + whole.row(v)];
  }
}

}  // namespace

void multiply_experts(const PackedExperts& w, const float* x, size_t inputs, const int32_t* ids, size_t assignments,
                      float* y, Rounding rounding) {
  if (assignments == 0 || inputs == 0) return;
  thread_local Plan plan;
  sort_by_expert(ids, assignments, w.experts, plan);
  const size_t per = assignments / inputs;

  Input in{x, {}, w.cols, rounding == Rounding::none, false, rounding};
  size_t work = 0, most = 0;
  for (const Chosen& c : plan.chosen) {
    most = std::max(most, c.count);
    for (const PackedJob& job : w.jobs.subspan(c.expert * w.matrices, w.matrices)) {
      work += job.matrix->rows / job.matrix->lanes * job.matrix->line_bytes * c.count;
      in.integers = in.integers || job.integers(rounding);
      in.floats = in.floats || !job.integers(rounding);
    }
  }
  if (in.integers) in.a = rounded(x, w.cols, inputs, rounding, true);
  const Input together = most > 1 ? gathered(in, plan.order.data(), assignments, per) : Input{};

  const SideBySide lanes = in.integers && most > kFewTokens ? expert_lanes(together, plan.chosen) : SideBySide{};

  plan.pieces.clear();
  const size_t share = share_of_a_chunk(work);
  for (const Chosen& c : plan.chosen) {
    size_t at = 0;
    const SideBySide side = lanes.q && c.count > kFewTokens ? lanes_from(lanes, c.vector, in.a.padded) : SideBySide{};
    for (const PackedJob& job : w.jobs.subspan(c.expert * w.matrices, w.matrices)) {
      const size_t step = std::min(rows_of_a_chunk(*job.matrix, share / c.count),
                                   kMostOutputs / c.count / kRowsTogether * kRowsTogether + kRowsTogether);
      for (size_t first = 0; first < job.matrix->rows; first += step)
        plan.pieces.push_back({&job, plan.order.data() + c.first, c.first, c.count, first,
                               std::min(job.matrix->rows, first + step), at, side});
      at += job.matrix->rows;
    }
  }
  const Piece* pieces = plan.pieces.data();
  parallel_for(plan.pieces.size(), [&, pieces](size_t i) {
    const Piece& p = pieces[i];
    if (p.count > 1) return multiply_piece(p, together, y, w.rows);
    multiply_rows(*p.job, p.first, p.last, in, p.order[0] / per, 1, {}, y + p.order[0] * w.rows + p.at, w.rows);
  });
  const size_t lost = plan.chosen.empty() ? 0 : plan.chosen.back().first + plan.chosen.back().count;
  for (size_t i = lost; i < assignments; ++i)
    std::fill_n(y + plan.order[i] * w.rows, w.rows, std::numeric_limits<float>::quiet_NaN());
}

}  // namespace polyquant
