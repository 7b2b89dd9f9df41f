// libFuzzer targets of a layer's operations between its matrices: attention, norms and gates, experts.
#include <algorithm>
#include <string_view>

#include "decoder/decoder.hpp"
#include "decoder/experts.hpp"
#include "decoder/set.hpp"
#include "input.hpp"
#include "kernel_sets.hpp"
#include "packed/experts.hpp"
#include "packed/packed.hpp"

namespace polyquant::fuzz {
namespace {

// The sets that this processor supports.
std::vector<const DecoderSet*> decoder_sets() {
  std::vector<const DecoderSet*> out{&decoder_plain()};
#if defined(__x86_64__)
  if (&decoder_set() != &decoder_plain()) out.push_back(&decoder_avx2());
  if (&decoder_set() == &decoder_avx512()) out.push_back(&decoder_avx512());
#endif
  return out;
}

const float* start_of(const std::vector<float>& values, bool given) { return given ? values.data() : nullptr; }

}  // namespace

void attention(Input in) {
  const Kept kept = Kept(in.number(3));
  const size_t groups = in.between(1, 3), shared = in.number(8) ? in.between(1, 4) : in.between(1, 80);
  const size_t heads = groups * shared, size = in.between(1, 40), blocks = in.between(1, 40);
  const size_t start = in.between(0, 250) * 5 % (blocks * cache_block);
  const size_t count = std::min(in.between(1, 70), blocks * cache_block - start);
  const size_t window = in.number(2) * in.between(1, 90), chunk = in.number(2) * in.between(1, 90), gap = in.number(3);
  const bool grids = in.number(2), slopes = in.number(2), sinks = in.number(2), capped = in.number(2);
  const size_t cells = groups * blocks * cache_block * size, bytes = kept == Kept::f32 ? 4 : kept == Kept::f16 ? 2 : 1;
  std::vector<uint8_t> keys = in.bytes(cells * bytes), values = in.bytes(cells * bytes);
  std::vector<float> steps, recent;
  if (kept == Kept::i8)
    steps = in.floats(groups * blocks * 4 * size), recent = in.floats(groups * 2 * cache_block * size);
  const std::vector<float> grid = in.floats(groups * 4 * size), slope = in.floats(heads), sink = in.floats(heads);
  const size_t q_stride = heads * size + gap, k_stride = groups * size + gap;
  const std::vector<float> q = in.floats((count - 1) * q_stride + heads * size),
                           k = in.floats((count - 1) * k_stride + groups * size), v = k;
  std::vector<float> out(count * heads * size);
  const Cache cache{kept,         groups,        blocks,
                    size,         keys.data(),   values.data(),
                    steps.data(), recent.data(), start_of(grid, grids && kept == Kept::i8)};
  const Tokens tokens{q.data(),
                      k.data(),
                      v.data(),
                      q_stride,
                      k_stride,
                      k_stride,
                      count,
                      heads,
                      start,
                      window,
                      0.125f,
                      out.data(),
                      capped ? 30.0f : 0.0f,
                      start_of(slope, slopes),
                      start_of(sink, sinks),
                      chunk};
  attend(cache, tokens);
  if (kept == Kept::i8) return;  // reads blocks of int8 and the current one in two calls
  const size_t some = std::min(count, std::max<size_t>(1, 64 / shared)), rows = some * shared;
  const Piece piece{in.number(groups), 0, some, tokens.first_seen(start) / cache_block,
                    (start + some - 1) / cache_block + 1};
  for (const DecoderSet* set : decoder_sets()) {
    std::vector<float> scratch(rows * (size + blocks_together * cache_block) + cache_block * size),
        sums(rows * (size + 2));
    set->attend_piece(cache, tokens, piece, scratch.data(), {sums.data(), sums.data() + rows, sums.data() + 2 * rows});
  }
}

void decoder(Input in) {
  const size_t rows = in.between(1, 6), n = in.between(1, 90), stride = n + in.number(5);
  const std::vector<float> x = in.floats((rows - 1) * stride + n), y = x, weight = in.floats(n), bias = in.floats(n);
  const bool given = in.number(2);
  std::vector<float> out(rows * n);
  rms_norm(x.data(), stride, weight.data(), out.data(), rows, n, 1e-6);
  layer_norm(x.data(), stride, weight.data(), start_of(bias, given), out.data(), rows, n, 1e-6);
  on_grid(x.data(), stride, weight.data(), bias.data(), out.data(), rows, n);
  add(x.data(), stride, y.data(), stride, out.data(), n, rows, n, weight[0]);
  gate(Activation(in.number(size_t(activations))), x.data(), start_of(y, given), out.data(), n);
  xielu(x.data(), out.data(), n, {weight[0], bias[0], 0.5f, -1e-6f});
  for (const DecoderSet* set : decoder_sets()) {
    std::vector<float> row(n);
    set->norm_row(x.data(), weight.data(), row.data(), n, 1e-6);
    set->layer_norm_row(x.data(), weight.data(), start_of(bias, given), row.data(), n, 1e-6);
    for (const auto& gates : set->gates) gates(x.data(), start_of(y, given), row.data(), n);
    set->xielu(x.data(), row.data(), n, {weight[0], bias[0], 0.5f, -1e-6f});
  }
  const size_t heads = in.between(1, 3), size = in.between(1, 40), pairs = in.number(size / 2 + 1),
               step = heads * size + in.number(3);
  const std::vector<float> turned = in.floats((rows - 1) * step + heads * size), cos = in.floats(rows * pairs),
                           sin = cos;
  std::vector<float> to(rows * heads * size);
  rotate(turned.data(), cos.data(), sin.data(), to.data(), {rows, heads, size, pairs, step, in.number(2) != 0});
}

namespace {

void route_some(Input& in) {
  const size_t groups = in.between(1, 4), count = groups * in.between(1, 20), tokens = in.between(1, 20);
  const size_t chosen_groups = in.between(1, groups), used = in.between(1, chosen_groups * (count / groups));
  const auto scores = Scores(in.number(3));
  const bool biased = scores != Scores::softmax_of_chosen && in.number(2);
  const std::vector<float> logits = in.floats(tokens * count), bias = in.floats(count);
  const Routing how{scores, used, in.number(2) != 0, 1e-20, 0, 2.5, groups, chosen_groups, in.number(2) != 0};
  std::vector<int32_t> ids(tokens * used);
  std::vector<float> weights(tokens * used);
  route(logits.data(), tokens, count, start_of(bias, biased), how, ids.data(), weights.data());
  const size_t n = in.between(1, 40);
  const std::vector<float> y = in.floats(tokens * used * n), x = in.floats(tokens * n), each = in.floats(count * n);
  std::vector<float> out(tokens * n), wide(tokens * used * n);
  combine(y.data(), start_of(weights, in.number(2)), out.data(), tokens, used, n);
  spread(x.data(), weights.data(), wide.data(), tokens, used, n);
  add_expert_bias(wide.data(), n, each.data(), count, ids.data(), tokens * used, n);
  add_gated(x.data(), x.data(), logits.data(), out.data(), tokens, n);
  clamped_swiglu({x.data(), int64_t(n), 1}, {y.data(), int64_t(n), 1}, out.data(), tokens, n, 1.702f, 7.0f);
}

void multiply_some(Input& in) {
  static const std::vector<BlockKernel> blocks = all_kernels();
  use_kernels(in.number(2) ? "plain" : "");
  const auto kernels = packed_set().kernels;
  const PackedKernel& k = kernels[in.number(kernels.size())];
  const size_t lanes = size_t(k.lanes), rows = lanes * in.between(1, 9), cols = size_t(k.block) * in.between(1, 2);
  const size_t line = cols / size_t(k.block) * size_t(k.bytes), count = in.between(1, 6), stacks = in.between(1, 2);
  const auto rounding = Rounding(in.number(4));
  if (rounding == Rounding::wide && cols % 128) return;
  const BlockKernel* exact = nullptr;
  for (const BlockKernel& b : blocks)
    if (std::string_view(b.name) == k.name) exact = &b;
  const size_t inputs = in.between(1, 12), assignments = inputs * in.between(1, 4), all = count * stacks;
  const size_t lane_step = lanes > 1 && in.number(2) ? rows / lanes : lanes > 1;
  const std::vector<float> x = in.floats(inputs * cols);
  std::vector<int32_t> ids(assignments);
  for (int32_t& id : ids) id = int32_t(in.number(count + 2)) - 1;  // two of them are out of range
  const std::vector<uint8_t> data = in.bytes(all * rows / lanes * line);
  std::vector<PackedMatrix> matrices;
  std::vector<PackedJob> jobs;
  for (size_t i = 0; i < all; ++i)
    matrices.push_back({data.data() + i * rows / lanes * line, rows, cols, line, lanes,
                        lane_step == 1 ? lanes : size_t(1), lane_step, 1.0f});
  for (const PackedMatrix& matrix : matrices) jobs.push_back({&matrix, &k, exact, nullptr});
  std::vector<float> y(assignments * stacks * rows);
  multiply_experts({jobs, count, stacks, cols, stacks * rows}, x.data(), inputs, ids.data(), assignments, y.data(),
                   rounding);
}

}  // namespace

void experts(Input in) {
  if (in.number(2))
    route_some(in);
  else
    multiply_some(in);
}

}  // namespace polyquant::fuzz
