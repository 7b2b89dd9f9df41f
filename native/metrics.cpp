// Sums for error figures, accumulated in double so that the order of a billion terms does not show.
#include "metrics.hpp"

#include <cmath>

#include "simd.hpp"

namespace polyquant {
namespace {

constexpr size_t lanes = 8;

// Eight independent accumulators a sum: the compiler turns each row of lanes into vector registers.
PQ_SIMD void accumulate(const float* a, const float* b, size_t n, double out[5]) {
  double aa[lanes] = {}, bb[lanes] = {}, ab[lanes] = {}, dd[lanes] = {};
  float worst[lanes] = {};
  size_t i = 0;
  for (; i + lanes <= n; i += lanes)
    PQ_LOOP
    for (size_t j = 0; j < lanes; ++j) {
      const double x = a[i + j], y = b[i + j], d = x - y;
      aa[j] += x * x;
      bb[j] += y * y;
      ab[j] += x * y;
      dd[j] += d * d;
      const float m = std::fabs(a[i + j] - b[i + j]);
      worst[j] = m > worst[j] ? m : worst[j];
    }
  for (; i < n; ++i) {
    const double x = a[i], y = b[i], d = x - y;
    aa[0] += x * x;
    bb[0] += y * y;
    ab[0] += x * y;
    dd[0] += d * d;
    worst[0] = std::fmax(worst[0], std::fabs(a[i] - b[i]));
  }
  for (size_t j = 0; j < lanes; ++j) {
    out[0] += aa[j];
    out[1] += bb[j];
    out[2] += ab[j];
    out[3] += dd[j];
    out[4] = worst[j] > out[4] ? worst[j] : out[4];
  }
}

}  // namespace

ErrorSums error_sums(const float* a, const float* b, size_t n) {
  double s[5] = {};
  accumulate(a, b, n, s);
  return {s[0], s[1], s[2], s[3], s[4]};
}

}  // namespace polyquant
