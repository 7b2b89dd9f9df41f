// Sums for error metrics: stretches in float32, their totals in double, so the order of a billion terms does not
// matter.
#include "codecs/metrics.hpp"

#include <algorithm>
#include <cmath>

#include "base/simd.hpp"

namespace polyquant {
namespace {

constexpr size_t lanes = 16, stretch = 512;  // 32 terms per lane: the error of a sum stays near that of its terms

// Independent accumulators: the compiler maps each row of lanes to vector registers.
PQ_SIMD void sums_of_stretch(const float* a, const float* b, double out[5]) {
  float aa[lanes] = {}, bb[lanes] = {}, ab[lanes] = {}, dd[lanes] = {}, worst[lanes] = {};
  for (size_t i = 0; i < stretch; i += lanes) PQ_LOOP
  for (size_t j = 0; j < lanes; ++j) {
    const float x = a[i + j], y = b[i + j], d = x - y, m = std::fabs(d);
    aa[j] += x * x;
    bb[j] += y * y;
    ab[j] += x * y;
    dd[j] += d * d;
    worst[j] = m > worst[j] ? m : worst[j];
  }
  for (size_t j = 0; j < lanes; ++j) {
    out[0] += aa[j];
    out[1] += bb[j];
    out[2] += ab[j];
    out[3] += dd[j];
    out[4] = worst[j] > out[4] ? worst[j] : out[4];
  }
}

void accumulate(const float* a, const float* b, size_t n, double out[5]) {
  for (size_t i = 0; i < n; ++i) {
    const double x = a[i], y = b[i], d = x - y;
    out[0] += x * x;
    out[1] += y * y;
    out[2] += x * y;
    out[3] += d * d;
    out[4] = std::fmax(out[4], std::fabs(a[i] - b[i]));
  }
}

// The sum of all lanes, halves first.
PQ_INLINE float total(float (&lane)[lanes]) {
  for (size_t half = lanes / 2; half; half /= 2)
    for (size_t j = 0; j < half; ++j) lane[j] += lane[j + half];
  return lane[0];
}

// Sums of squares of a and b, of products, and of squared differences over n values, n a multiple of the lanes.
PQ_SIMD void sums_of_unit(const float* a, const float* b, size_t n, float out[4]) {
  float aa[lanes] = {}, bb[lanes] = {}, ab[lanes] = {}, dd[lanes] = {};
  for (size_t i = 0; i < n; i += lanes) PQ_LOOP
  for (size_t j = 0; j < lanes; ++j) {
    const float x = a[i + j], y = b[i + j], d = x - y;
    aa[j] += x * x;
    bb[j] += y * y;
    ab[j] += x * y;
    dd[j] += d * d;
  }
  out[0] = total(aa), out[1] = total(bb), out[2] = total(ab), out[3] = total(dd);
}

// True if float32 represents the squares with full precision.
bool plain(const double s[5]) { return s[0] > 1e-20 && s[0] < 1e30 && s[1] < 1e30 && (s[3] > 1e-30 || s[4] == 0); }

}  // namespace

void add_errors(const float* a, const float* b, size_t n, ErrorSums& sums) {
  double s[5] = {sums.aa, sums.bb, sums.ab, sums.dd, sums.worst};
  size_t i = 0;
  for (; i + stretch <= n; i += stretch) {
    double some[5] = {};
    sums_of_stretch(a + i, b + i, some);
    if (!plain(some)) {
      std::fill_n(some, 5, 0.0);
      accumulate(a + i, b + i, stretch, some);
    }
    for (size_t j = 0; j < 4; ++j) s[j] += some[j];
    s[4] = std::max(s[4], some[4]);
  }
  accumulate(a + i, b + i, n - i, s);
  sums = {s[0], s[1], s[2], s[3], s[4]};
}

ErrorSums error_sums(const float* a, const float* b, size_t n) {
  ErrorSums sums{};
  add_errors(a, b, n, sums);
  return sums;
}

void unit_errors(const float* a, const float* b, size_t units, size_t unit, float* out, size_t apart) {
  for (size_t u = 0; u < units; ++u, a += unit, b += unit) {
    const size_t even = unit / lanes * lanes;
    double rest[5] = {};
    float sums[4];
    sums_of_unit(a, b, even, sums);
    accumulate(a + even, b + even, unit - even, rest);
    for (size_t j = 0; j < 4; ++j) out[j * apart + u] = sums[j] + float(rest[j]);
  }
}

}  // namespace polyquant
