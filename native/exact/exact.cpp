#include "exact/exact.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "base/threads.hpp"
#include "exact/set.hpp"

namespace polyquant {
namespace {

constexpr size_t kDepth = 256;                          // of packed blocks: both fit the outer caches
constexpr size_t kMostRows = 512, kMostColumns = 1008;  // of a block
constexpr size_t kGroup = 8;                            // panels of b per task
constexpr size_t kBlock = 64;                           // columns of the Cholesky factor at a time
constexpr size_t kSmall = size_t(1) << 18;              // multiplications for which no thread is woken
constexpr size_t kPiece = size_t(1) << 14;              // exponentials per task

const ExactSet& set_of(ExactIsa isa) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (isa == ExactIsa::avx512 || (isa == ExactIsa::best && exact_supports(ExactIsa::avx512))) return exact_avx512();
  if (isa == ExactIsa::avx2 || (isa == ExactIsa::best && exact_supports(ExactIsa::avx2))) return exact_avx2();
#else
  (void)isa;
#endif
  return exact_plain();
}

size_t panels(size_t n, size_t width) { return (n + width - 1) / width; }

template <class F>
void loop(size_t chunks, bool parallel, F&& work) {
  if (parallel) return parallel_for(chunks, std::forward<F>(work));
  for (size_t i = 0; i < chunks; ++i) work(i);
}

// Memory that grows, uninitialized.
class Scratch {
 public:
  double* of(size_t n) {
    if (n > size_) {
      data_.reset();
      data_ = std::make_unique_for_overwrite<double[]>(n);
      size_ = n;
    }
    return data_.get();
  }

 private:
  std::unique_ptr<double[]> data_;
  size_t size_ = 0;
};

// Scratch of one product: packed blocks of a and b, and the sums of a block. At most 7 MB, kept by the thread.
struct Room {
  Scratch a, b, sums;
};

Room& own_room() {
  thread_local Room room;
  return room;
}

// One product of two-dimensional matrices.
struct Product {
  const ExactSet& set;
  FloatMatrices a, b;
  ProductSize size;
  float* out;
  bool parallel;

  void run(Room& room) const {
    for (size_t j = 0; j < size.columns; j += kMostColumns)
      for (size_t i = 0; i < size.rows; i += kMostRows) {
        const size_t rows = std::min(kMostRows, size.rows - i), columns = std::min(kMostColumns, size.columns - j);
        if (!size.symmetric || j < i + rows) block(room, i, j, rows, columns);
      }
    if (size.depth == 0) std::fill_n(out, size.rows * size.columns, 0.0f);
    if (size.symmetric)
      for (size_t i = 0; i < size.rows; ++i)
        for (size_t j = i + 1; j < size.columns; ++j) out[i * size.columns + j] = out[j * size.columns + i];
  }

  void block(Room& room, size_t i, size_t j, size_t rows, size_t columns) const {
    const size_t left = panels(rows, set.rows), right = panels(columns, set.columns), stride = right * set.columns;
    double *pa = room.a.of(left * set.rows * kDepth), *pb = room.b.of(stride * kDepth),
           *sums = room.sums.of(left * set.rows * stride);
    const size_t bands = panels(left, kGroup), groups = panels(right, kGroup);
    for (size_t k = 0; k < size.depth; k += kDepth) {
      const size_t depth = std::min(kDepth, size.depth - k);
      loop(bands + groups, parallel, [&](size_t chunk) { pack(chunk, bands, i, j, rows, columns, k, depth, pa, pb); });
      loop(bands * groups, parallel, [&](size_t chunk) {
        const size_t band = chunk / groups * kGroup, group = chunk % groups * kGroup;
        for (size_t q = group; q < std::min(right, group + kGroup); ++q)
          for (size_t p = band; p < std::min(left, band + kGroup); ++p) {
            if (size.symmetric && j + q * set.columns >= i + (p + 1) * set.rows) continue;  // above the diagonal
            const size_t row = p * set.rows, column = q * set.columns;
            double* own = sums + row * stride + column;
            (k ? set.tile : set.start)(pa + row * depth, pb + column * depth, own, stride, depth);
            if (k + depth == size.depth)
              set.narrow(own, stride, out + (i + row) * size.columns + j + column, size.columns,
                         std::min(set.rows, rows - row), std::min(set.columns, columns - column));
          }
      });
    }
  }

  void pack(size_t chunk, size_t bands, size_t i, size_t j, size_t rows, size_t columns, size_t k, size_t depth,
            double* pa, double* pb) const {
    const bool left = chunk < bands;
    const size_t width = left ? set.rows : set.columns, length = left ? rows : columns;
    const size_t first = (left ? chunk : chunk - bands) * kGroup;
    const ptrdiff_t across = left ? a.row : b.column, along = left ? a.column : b.row;
    const float* from = (left ? a.data : b.data) + ptrdiff_t(left ? i : j) * across + ptrdiff_t(k) * along;
    for (size_t p = first; p < std::min(panels(length, width), first + kGroup); ++p)
      set.pack(from + ptrdiff_t(p * width) * across, across, along, std::min(width, length - p * width), depth, width,
               (left ? pa : pb) + p * width * depth);
  }
};

// The factor of the columns [start, start + count) of the rows within them, of which all earlier columns are
// subtracted.
bool factor_diagonal(double* h, size_t n, size_t start, size_t count) {
  for (size_t c = start; c < start + count; ++c) {
    const double pivot = h[c * n + c];
    if (!(pivot > 0) || !std::isfinite(pivot)) return false;
    const double root = std::sqrt(pivot);
    h[c * n + c] = root;
    for (size_t r = c + 1; r < start + count; ++r) h[r * n + c] /= root;
    for (size_t r = c + 1; r < start + count; ++r)
      for (size_t d = c + 1; d <= r; ++d) h[r * n + d] -= h[r * n + c] * h[d * n + c];
  }
  return true;
}

// The columns [start, start + count) of the rows below them: solved, and packed as panels of the tiles' sides.
void solve_below(const ExactSet& set, double* h, size_t n, size_t start, size_t count, double* left, double* right) {
  const size_t below = start + count, rows = n - below, width = set.columns;
  parallel_for(panels(rows, width), [=, &set](size_t panel) {
    const size_t first = below + panel * width, some = std::min(width, n - first);
    double* x = right + panel * width * count;
    for (size_t c = 0; c < count; ++c)
      for (size_t i = 0; i < width; ++i) x[c * width + i] = i < some ? h[(first + i) * n + start + c] : 0.0;
    set.solve(h + start * n + start, n, count, x);
    for (size_t i = 0; i < some; ++i)
      for (size_t c = 0; c < count; ++c) h[(first + i) * n + start + c] = x[c * width + i];
  });
  for (size_t r = 0; r < panels(rows, set.rows) * set.rows; ++r)
    for (size_t c = 0; c < count; ++c)
      left[r / set.rows * set.rows * count + c * set.rows + r % set.rows] =
          r < rows ? h[(below + r) * n + start + c] : 0.0;
}

// Subtracts the product of the packed columns from the lower triangle of the rows from `below` on.
void subtract_below(const ExactSet& set, double* h, size_t n, size_t below, size_t count, const double* left,
                    const double* right) {
  const size_t rows = n - below;
  parallel_for(panels(rows, set.rows), [=, &set](size_t p) {
    std::vector<double> edge(set.rows * set.columns);
    const size_t row = p * set.rows, high = std::min(set.rows, rows - row);
    for (size_t q = 0; q * set.columns < row + high; ++q) {
      const size_t column = q * set.columns, wide = std::min(set.columns, rows - column);
      double* own = h + (below + row) * n + below + column;
      if (high == set.rows && wide == set.columns) {
        set.subtract(left + row * count, right + column * count, own, n, count);
        continue;
      }
      for (size_t r = 0; r < high; ++r) std::copy_n(own + r * n, wide, edge.data() + r * set.columns);
      set.subtract(left + row * count, right + column * count, edge.data(), set.columns, count);
      for (size_t r = 0; r < high; ++r) std::copy_n(edge.data() + r * set.columns, wide, own + r * n);
    }
  });
}

template <class T>
void in_pieces(const T* x, T* out, size_t n, void (*f)(const T*, T*, size_t)) {
  parallel_for(panels(n, kPiece), [=](size_t chunk) {
    const size_t at = chunk * kPiece;
    f(x + at, out + at, std::min(kPiece, n - at));
  });
}

}  // namespace

bool exact_supports(ExactIsa isa) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (isa == ExactIsa::avx512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
  if (isa == ExactIsa::avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return isa == ExactIsa::best || isa == ExactIsa::plain;
}

void exact_product(const FloatMatrices& a, const FloatMatrices& b, const ProductSize& size, float* out, ExactIsa isa) {
  const ExactSet& set = set_of(isa);
  const size_t work = size.rows * size.columns * size.depth, outputs = size.rows * size.columns;
  const bool apart = size.items > 1 && work < (size_t(1) << 24);  // threads take whole products
  const auto one = [&](size_t item, Room& room, bool parallel) {
    FloatMatrices left = a, right = b;
    left.data += ptrdiff_t(item) * a.item, right.data += ptrdiff_t(item) * b.item;
    Product{set, left, right, size, out + item * outputs, parallel}.run(room);
  };
  if (apart) {
    loop(size.items, size.items * work > kSmall, [&](size_t item) { one(item, own_room(), false); });
  } else {
    for (size_t item = 0; item < size.items; ++item) one(item, own_room(), work > kSmall);
  }
}

bool exact_cholesky(double* h, size_t n, ExactIsa isa) {
  const ExactSet& set = set_of(isa);
  std::vector<double> left((n + set.rows) * kBlock), right((n + set.columns) * kBlock);
  for (size_t start = 0; start < n; start += kBlock) {
    const size_t count = std::min(kBlock, n - start);
    if (!factor_diagonal(h, n, start, count)) return false;
    if (start + count == n) break;
    solve_below(set, h, n, start, count, left.data(), right.data());
    subtract_below(set, h, n, start + count, count, left.data(), right.data());
  }
  return true;
}

void exact_exponential(const double* x, double* out, size_t n, ExactIsa isa) {
  in_pieces(x, out, n, set_of(isa).exponential);
}

void exact_exponential(const float* x, float* out, size_t n, ExactIsa isa) {
  in_pieces(x, out, n, set_of(isa).float_exponential);
}

void exact_softmax(const SoftmaxRows& all, ExactIsa isa) {
  const auto row = set_of(isa).softmax;
  const size_t step = std::max<size_t>(1, kPiece / std::max<size_t>(1, all.columns));
  parallel_for(panels(all.rows, step), [=, &all](size_t chunk) {
    for (size_t r = chunk * step; r < std::min(all.rows, (chunk + 1) * step); ++r)
      row(all.scores + r * all.columns, all.columns, size_t(all.low[r]), size_t(all.high[r]), all.scale,
          all.sinks ? all.sinks + r : nullptr);
  });
}

}  // namespace polyquant
