// libFuzzer targets of the native kernels. FUZZ selects one by its name in the table at the end.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "codecs/affine.hpp"
#include "codecs/blocks.hpp"
#include "codecs/gguf.hpp"
#include "codecs/grouped_search.hpp"
#include "codecs/metrics.hpp"
#include "codecs/ternary.hpp"
#include "input.hpp"
#include "kernel_sets.hpp"
#include "packed/packed.hpp"
#include "trellis/trellis.hpp"

namespace polyquant::fuzz {

std::vector<BlockKernel> all_kernels() {
  std::vector<BlockKernel> out;
  for (KernelTable table :
       {plain_kernels(), legacy_kernels(), k_kernels(), iq_kernels(), fp4_kernels(), ternary_kernels()})
    out.insert(out.end(), table.begin(), table.end());
  return out;
}

namespace {

void dequantize(Input in) {
  static const std::vector<BlockKernel> kernels = all_kernels();
  const BlockKernel& k = kernels[in.number(kernels.size())];
  const size_t blocks = in.number(9);
  if (!k.dequantize) return;
  const std::vector<uint8_t> src = in.bytes(blocks * size_t(k.bytes));
  std::vector<float> out(blocks * size_t(k.weights));
  k.dequantize(src.data(), out.data(), blocks);
}

void quantize(Input in) {
  static const std::vector<BlockKernel> kernels = all_kernels();
  const BlockKernel& k = kernels[in.number(kernels.size())];
  const size_t rows = 1 + in.number(2), blocks = 1 + in.number(2), cols = blocks * size_t(k.weights);
  const bool weighted = in.number(2);
  if (!k.quantize) return;
  const std::vector<float> w = in.floats(rows * cols);
  std::vector<float> importance = in.floats(cols);
  for (float& x : importance) x = x > 0 && x < 1e30f ? x : 0;  // the codecs refuse others
  std::vector<uint8_t> out(rows * blocks * size_t(k.bytes));
  k.quantize(w.data(), out.data(), rows, cols, weighted ? importance.data() : nullptr);
  std::vector<float> back(rows * cols);
  if (k.dequantize) k.dequantize(out.data(), back.data(), rows * blocks);
  const BlockKernel& to = kernels[in.number(kernels.size())];
  if (!k.dequantize || !to.dequantize || !to.quantize || cols % size_t(to.weights)) return;
  std::vector<uint8_t> other(rows * cols / size_t(to.weights) * size_t(to.bytes));
  ErrorSums sums{};
  const bool finite =
      requantize(k, to, out.data(), rows, cols, weighted ? importance.data() : nullptr, other.data(), &sums);
  const ErrorSums found = stored_errors(k, to, out.data(), other.data(), rows * cols);
  if (finite && std::memcmp(&sums, &found, sizeof sums) != 0) std::abort();  // both are sums of the same numbers
}

// Codes in groups from stored blocks are those from their floats.
void search(Input in) {
  static const std::vector<BlockKernel> kernels = all_kernels();
  const BlockKernel& k = kernels[in.number(kernels.size())];
  const size_t rows = 1 + in.number(12), blocks = 1 + in.number(3), cols = blocks * size_t(k.weights);
  const size_t groups = cols % 32 ? 1 : cols / 32;
  const std::vector<float> clips = {1.0f, 0.9f};
  const GridSearch how{int(2 + in.number(7)), Zero(in.number(3)), ScaleType(in.number(3)), clips.data(), clips.size()};
  const bool weighted = in.number(2), measured = in.number(2);
  if (!k.dequantize) return;
  std::vector<float> weights = in.floats(cols);
  for (float& x : weights) x = !weighted ? 1 : x > 0 && x < 1e30f ? x : 0;
  const std::vector<uint8_t> data = in.bytes(rows * blocks * size_t(k.bytes));
  std::vector<float> w(rows * cols);
  k.dequantize(data.data(), w.data(), rows * blocks);
  std::vector<int8_t> codes[2] = {std::vector<int8_t>(rows * cols), std::vector<int8_t>(rows * cols)};
  std::vector<float> tables[2][3];
  for (auto& side : tables)
    for (auto& table : side) table.resize(rows * groups);
  ErrorSums sums{};
  auto& [scale, offset, bias] = tables[0];
  if (!grouped_quantize(k, data.data(), weights.data(), rows, groups, cols / groups, how, codes[0].data(), scale.data(),
                        offset.data(), bias.data(), measured ? &sums : nullptr))
    return;  // not finite
  grouped_search(w.data(), weights.data(), rows, groups, cols / groups, how, codes[1].data(), tables[1][0].data(),
                 tables[1][1].data(), tables[1][2].data());
  if (codes[0] != codes[1] || scale != tables[1][0] || offset != tables[1][1] || bias != tables[1][2]) std::abort();
}

void product(Input in) {
  static const std::vector<BlockKernel> blocks = all_kernels();
  use_kernels(in.number(2) ? "plain" : "");
  const auto kernels = packed_set().kernels;
  const PackedKernel& k = kernels[in.number(kernels.size())];
  const size_t lanes = size_t(k.lanes), rows = lanes * (1 + in.number(9)), cols = size_t(k.block) * (1 + in.number(3));
  const size_t line = cols / size_t(k.block) * size_t(k.bytes), tokens = 1 + in.number(10);
  const size_t lane_step = lanes == 1 ? 0 : in.number(2) ? 1 : rows / lanes;
  const auto rounding = Rounding(in.number(4));
  if (rounding == Rounding::wide && cols % 128) return;
  const BlockKernel* exact = nullptr;
  for (const BlockKernel& b : blocks)
    if (std::string_view(b.name) == k.name) exact = &b;
  const std::vector<float> x = in.floats(tokens * cols);
  const std::vector<uint8_t> data = in.bytes(rows / lanes * line);
  std::vector<float> y(tokens * rows);
  const PackedMatrix matrix{data.data(), rows, cols, line, lanes, lane_step == 1 ? lanes : 1, lane_step, 1.0f};
  const PackedJob job{&matrix, &k, exact, y.data()};
  multiply_packed({&job, 1}, x.data(), tokens, rows, rounding);
}

void layout(Input in) {
  switch (in.number(5)) {
    case 0: {
      const uint64_t offset = in.number(64), count = uint64_t(1) << in.number(64);
      const bool big = in.number(2), wide = in.number(2), kept = in.number(2);
      const std::vector<uint8_t> data = in.bytes(in.number(256));
      std::vector<int64_t> starts(kept ? std::min<uint64_t>(count, 64) : 0);
      gguf_skip_strings(data.data(), data.size(), offset, kept ? starts.size() : count, big, wide,
                        kept ? starts.data() : nullptr);
      break;
    }
    case 1: {
      const size_t width = size_t(1) << in.number(6), bytes = width * in.number(5);
      const Lanes lanes{width, in.number(2) != 0, in.number(2) != 0};
      const std::vector<uint8_t> src = in.bytes(bytes);
      std::vector<int8_t> codes(4 * bytes);
      unpack_lanes(src.data(), codes.data(), bytes, lanes);
      std::vector<uint8_t> back(bytes);
      pack_lanes(codes.data(), back.data(), bytes, lanes);
      std::vector<float> out(4 * bytes);
      dequantize_lanes(src.data(), out.data(), bytes, lanes, 1.5f);
      break;
    }
    case 2: {
      const unsigned bits = 2 + unsigned(in.number(7));
      const size_t tiles = in.number(4);
      std::vector<uint8_t> codes = in.bytes(tiles * kTile);
      for (uint8_t& c : codes) c &= uint8_t((1u << bits) - 1);
      std::vector<uint8_t> packed(tiles * kTile * bits / 8);
      trellis_pack(codes.data(), codes.size(), bits, packed.data());
      trellis_unpack(packed.data(), codes.size(), bits, codes.data());
      break;
    }
    case 3: {
      const size_t groups = 1 + in.number(4), size = 1 + in.number(70);
      const Levels levels = levels_of(in.number(2) ? 8 : 4, in.number(2));
      const std::vector<float> w = in.floats(groups * size);
      std::vector<float> scale(groups), offset(groups), back(groups * size);
      std::vector<int8_t> codes(groups * size);
      std::vector<int64_t> sums(groups);
      affine_grid(w.data(), groups, size, levels, scale.data(), offset.data());
      affine_encode(w.data(), groups, size, levels, scale.data(), offset.data(), codes.data());
      affine_decode(codes.data(), groups, size, scale.data(), offset.data(), nullptr, back.data());
      row_sums(codes.data(), groups, size, sums.data());
      break;
    }
    case 4: {
      const auto kernels = ternary_layouts();
      const TernaryKernel& k = kernels[in.number(kernels.size())];
      const size_t blocks = in.number(4);
      const std::vector<uint8_t> src = in.bytes(blocks * size_t(k.bytes));
      std::vector<int8_t> codes(blocks * size_t(k.weights));
      std::vector<float> scale(blocks);
      k.unpack(src.data(), codes.data(), scale.data(), blocks);
      for (int8_t& c : codes) c = int8_t(c > 0 ? 1 : c < 0 ? -1 : 0);
      std::vector<uint8_t> back(blocks * size_t(k.bytes));
      k.pack(codes.data(), scale.data(), back.data(), blocks);
      break;
    }
  }
}

}  // namespace
}  // namespace polyquant::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace polyquant::fuzz;
  static constexpr std::pair<const char*, void (*)(Input)> targets[] = {
      {"dequantize", dequantize}, {"quantize", quantize}, {"product", product},     {"layout", layout},
      {"affine", affine},         {"trellis", trellis},   {"attention", attention}, {"decoder", decoder},
      {"experts", experts},       {"exact", exact},       {"grouped", grouped},     {"transposed", transposed},
      {"search", search}};
  static const auto chosen = [] {
    const char* name = std::getenv("FUZZ");
    for (const auto& [known, target] : targets)
      if (name && std::string_view(name) == known) return target;
    std::fputs("FUZZ must name a target\n", stderr);
    std::exit(2);
  }();
  chosen({data, size});
  return 0;
}
