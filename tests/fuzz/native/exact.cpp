// libFuzzer target of the exact operations: no access out of bounds, and equal bits from every instruction set.
#include "exact/exact.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "input.hpp"

namespace polyquant::fuzz {
namespace {

std::vector<ExactIsa> supported() {
  std::vector<ExactIsa> out;
  for (const ExactIsa isa : {ExactIsa::plain, ExactIsa::avx2, ExactIsa::avx512})
    if (exact_supports(isa)) out.push_back(isa);
  return out;
}

template <class T>
void equal(const std::vector<T>& first, const std::vector<T>& other) {
  for (size_t i = 0; i < first.size(); ++i)
    if (first[i] != other[i] && !(std::isnan(first[i]) && std::isnan(other[i]))) std::abort();
}

// f(isa) of every instruction set.
template <class F>
void compare(const F& f) {
  const auto first = f(ExactIsa::plain);
  for (const ExactIsa isa : supported()) equal(first, f(isa));
}

void product(Input in) {
  const size_t items = in.between(1, 3), rows = in.between(1, 70), depth = in.number(4) * 100 + in.number(90);
  const bool symmetric = in.number(2), flipped = in.number(2);
  const size_t columns = symmetric ? rows : in.between(1, 70);
  const std::vector<float> a = in.floats(items * rows * depth), b = in.floats(items * columns * depth);
  const ptrdiff_t d = ptrdiff_t(depth), n = ptrdiff_t(columns), left = ptrdiff_t(rows) * d;
  const FloatMatrices x{a.data(), left, d, 1};
  const FloatMatrices y = symmetric ? FloatMatrices{a.data(), left, 1, d}
                          : flipped ? FloatMatrices{b.data(), n * d, 1, d}
                                    : FloatMatrices{b.data(), n * d, n, 1};
  compare([&](ExactIsa isa) {
    std::vector<float> out(items * rows * columns);
    exact_product(x, y, {items, rows, columns, depth, symmetric}, out.data(), isa);
    return out;
  });
}

void factor(Input in) {
  const size_t n = in.between(1, 150);
  const std::vector<float> values = in.floats(n * n);
  const double diagonal = double(in.number(200)) * 10;
  compare([&](ExactIsa isa) {
    std::vector<double> h(values.begin(), values.end());
    for (size_t i = 0; i < n; ++i) h[i * n + i] += diagonal;
    if (!exact_cholesky(h.data(), n, isa)) h.assign(h.size(), 0);
    for (size_t i = 0; i < n; ++i) std::fill(h.begin() + i * n + i + 1, h.begin() + (i + 1) * n, 0);
    return h;
  });
}

void softmax(Input in) {
  const size_t rows = in.between(1, 9), columns = in.between(1, 90);
  const bool sinks = in.number(2);
  const std::vector<float> scores = in.floats(rows * columns), extra = in.floats(rows);
  std::vector<int32_t> low(rows), high(rows);
  for (size_t r = 0; r < rows; ++r) {
    low[r] = int32_t(in.number(columns));
    high[r] = low[r] + int32_t(in.between(1, columns - size_t(low[r])));
  }
  compare([&](ExactIsa isa) {
    std::vector<float> out = scores;
    exact_softmax({out.data(), rows, columns, low.data(), high.data(), 0.125f, sinks ? extra.data() : nullptr}, isa);
    return out;
  });
}

void exponential(Input in) {
  const std::vector<float> values = in.floats(in.number(90));
  compare([&](ExactIsa isa) {
    std::vector<float> out(values.size());
    exact_exponential(values.data(), out.data(), out.size(), isa);
    return out;
  });
  compare([&](ExactIsa isa) {
    std::vector<double> out(values.begin(), values.end());
    const std::vector<double> from = out;
    exact_exponential(from.data(), out.data(), out.size(), isa);
    return out;
  });
}

}  // namespace

void exact(Input in) {
  switch (in.number(4)) {
    case 0:
      return product(in);
    case 1:
      return factor(in);
    case 2:
      return softmax(in);
    default:
      return exponential(in);
  }
}

}  // namespace polyquant::fuzz
