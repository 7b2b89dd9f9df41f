// libFuzzer targets of the matrices that have separate kernels: affine grids and trellises.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string_view>

#include "affine/matrix.hpp"
#include "codecs/grouped_repack.hpp"
#include "input.hpp"
#include "kernel_sets.hpp"
#include "packed/packed.hpp"
#include "trellis/matrix.hpp"

namespace polyquant::fuzz {

void affine(Input in) {
  use_kernels(in.number(2) ? "plain" : "");
  const auto how = Inputs(in.number(4));
  const bool fixed = how == Inputs::fixed || how == Inputs::mixed;
  const size_t groups = fixed ? 1 : in.between(1, 4), rows = in.between(1, 60), tokens = in.between(1, 10);
  const size_t cols = groups * (in.between(1, 90) + (in.number(8) ? 0 : kPanel));
  const auto rounding = Rounding(in.number(4));
  const bool offsets = in.number(2);
  const float input_scale = in.floats(1)[0], input_offset = in.floats(1)[0];
  const std::vector<float> scale = in.floats(rows * groups), offset = in.floats(rows * groups),
                           deq_scale = in.floats(rows), x = in.floats(tokens * cols);
  const std::vector<float> bias = in.floats(rows);
  std::vector<int32_t> quant_bias(rows);
  std::memcpy(quant_bias.data(), bias.data(), 4 * rows);
  const std::vector<uint8_t> raw = in.bytes(rows * cols);
  const std::vector<int8_t> codes(raw.begin(), raw.end());
  const AffineMatrix matrix{
      codes.data(), rows,        cols,         groups,           scale.data(),     offsets ? offset.data() : nullptr,
      how,          input_scale, input_offset, deq_scale.data(), quant_bias.data()};
  std::vector<float> y(2 * tokens * rows);
  const AffineJob jobs[] = {{&matrix, y.data()}, {&matrix, y.data() + rows}};
  multiply_affine(jobs, x.data(), tokens, 2 * rows, rounding);
}

void grouped(Input in) {
  use_kernels(in.number(2) ? "plain" : "");
  const auto kernels = grouped_kernels();
  const PackedKernel& k = kernels[in.number(kernels.size())];
  const std::string_view name = k.name;
  const bool floats = !k.multiply, integers = name[0] != 'e';
  const size_t sub = floats ? 1 : name.ends_with(".16") ? 16 : 32, tall = in.between(1, 5);
  const bool row = in.number(2);
  const size_t group = row ? size_t(k.block) * in.between(1, 90) : sub * in.between(1, 9);
  const size_t cols = row ? group : group * in.between(1, 9) / size_t(k.block) * size_t(k.block);
  if (cols == 0) return;
  const size_t rows = in.between(1, 20), pitch = cols / size_t(k.block) * size_t(k.bytes) + in.number(5),
               groups = (cols + group - 1) / group, cells = (rows + tall - 1) / tall * groups,
               tokens = in.between(1, 20);
  const auto type = Number(in.number(integers ? 3 : 5));
  const size_t size = type == Number::f32 ? 4 : type <= Number::bf16 ? 2 : 1, offset = integers ? in.number(3) : 0;
  const auto rounding = Rounding(in.number(4));
  const std::vector<float> x = in.floats(tokens * cols);
  const std::vector<uint8_t> scale = in.bytes(cells * size), zero = in.bytes(cells), bias = in.bytes(cells * size),
                             codes = in.bytes(rows * pitch);
  std::vector<float> y(tokens * rows);
  PackedMatrix matrix{codes.data(), rows, cols, pitch};
  matrix.tables = {scale.data(),
                   offset == 1 ? zero.data() : nullptr,
                   offset == 2 ? bias.data() : nullptr,
                   groups,
                   std::min(group, cols),
                   tall,
                   type,
                   8};
  matrix.owned = codes.size();
  const PackedJob job{&matrix, &k, nullptr, y.data()};
  multiply_packed({&job, 1}, x.data(), tokens, rows, rounding);
}

void transposed(Input in) {
  const size_t k = 8 * in.number(40), columns = in.number(20);
  const std::vector<uint8_t> raw = in.bytes(4 * k * columns);
  std::vector<uint32_t> words(k * columns), out(k * columns);
  if (!raw.empty()) std::memcpy(words.data(), raw.data(), raw.size());
  if (words.empty()) return;
  transpose_words(words.data(), k, columns, out.data());
  awq_rows(words.data(), k, columns, out.data());
}

void trellis(Input in) {
  use_kernels(in.number(2) ? "plain" : "");
  const unsigned bits = unsigned(in.between(1, 8)), window = bits + unsigned(in.number(17 - bits));
  const Book book = Book(in.number(5));
  const size_t block_k = size_t(1) << in.number(8), block_n = size_t(1) << in.number(8);
  const size_t inputs = block_k * in.between(1, std::max<size_t>(1, 300 / block_k)),
               outputs = block_n * in.between(1, std::max<size_t>(1, 200 / block_n));
  const size_t groups = std::min(inputs, in.between(1, 3)), span = (inputs + groups - 1) / groups;
  const size_t columns = (outputs + 15) / 16, states = size_t(1) << window, tokens = in.between(1, 10);
  const auto rounding = Rounding(in.number(4));
  const bool halves = in.number(2), ordered = in.number(2);
  const std::vector<uint8_t> tiles = in.bytes((inputs + 15) / 16 * columns * 32 * bits);
  std::vector<uint8_t> order = in.bytes(kTile);
  for (size_t j = 0; j < kTile; ++j)  // as the bindings require
    order[j] = uint8_t((order[kTile - 32 + j % 32] & 0xF0) | (order[j] & 0x0F));
  std::vector<int16_t> levels(states + 1);
  std::vector<float> numbers(states);
  for (size_t i = 0; i < states; ++i) levels[i] = int16_t(i * 40503), numbers[i] = float(levels[i]);
  const std::vector<float> scales = in.floats(groups * columns * 16), su = in.floats(inputs), sv = in.floats(outputs),
                           x = in.floats(tokens * inputs);
  const TrellisMatrix matrix{tiles.data(),
                             inputs,
                             outputs,
                             bits,
                             window,
                             book,
                             levels.data(),
                             numbers.data(),
                             1.0f / 128,
                             0.5f,
                             ordered ? order.data() : nullptr,
                             block_k,
                             block_n,
                             groups,
                             span,
                             scales.data(),
                             su.data(),
                             sv.data(),
                             halves,
                             trellis_set().find(bits, book, !ordered)};
  std::vector<float> whole(inputs * outputs), y(2 * tokens * outputs);
  trellis_dequantize(matrix, whole.data());
  if (groups > 1 && span % 128) return;
  const TrellisJob jobs[] = {{&matrix, y.data()}, {&matrix, y.data() + outputs}};
  multiply_trellis(jobs, x.data(), tokens, 2 * outputs, rounding);
}

}  // namespace polyquant::fuzz
