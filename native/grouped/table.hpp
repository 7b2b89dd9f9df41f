// The kernels of matrices with tables for one instruction set: included by grouped/plain.cpp, grouped/avx2.cpp and
// grouped/vnni.cpp.
#include "grouped/codes.hpp"
#include "grouped/floats.hpp"

namespace polyquant {
namespace {

template <class T>
PQ_INLINE float number_of(int8_t code) {
  return T::top ? float(uint8_t(code)) : float(code);
}

// A row as floats: (code - zero) * scale, or code * scale + bias, each operation rounded once.
template <class T>
void dequantize_grouped(const PackedMatrix& w, size_t v, float* out) {
  const Tables& t = w.tables;
  const size_t groups = (t.groups + 7) / 8 * 8, room = table_floats<T>(w.cols);
  float *const scale = table_scratch(room + 3 * groups) + room, *const other = scale + groups;
  group_scales(w, v, T::halved, scale, other);
  const TableRow row = table_row(w, v);
  if (t.bias)
    fill_type({row.bias, nullptr, nullptr}, {nullptr, nullptr, nullptr, t.groups, t.group, t.tall, t.type, 0}, 1, 0,
              false, other, other + groups);
  else
    for (size_t g = 0; g < t.groups; ++g) other[g] = T::shift - (t.zero ? float(row.zero[g]) : t.common);
  const Row<T> from{w.data + v * w.line_bytes, whole_units<T>(w, v), scale - room, scale - room};
  for (size_t u = 0; u * kUnit < w.cols; ++u) {
    Codes c;
    take_unit(from, u, w.cols, c);
    alignas(64) float unit[256];
    for (size_t k = 0; k < 256 && u * kUnit + k < w.cols; k += 16) {
      const int8_t* q = c.q + place<T>(int(k));
      const size_t g = t.groups == 1 ? 0 : (u * kUnit + k) / t.group;
      const float s = scale[g], o = other[g];
      if (t.bias)
        for (size_t j = 0; j < 16; ++j) unit[k + j] = (number_of<T>(q[j]) + T::shift) * s + o;
      else
        for (size_t j = 0; j < 16; ++j) unit[k + j] = (number_of<T>(q[j]) + o) * s;
    }
    std::memcpy(out + u * kUnit, unit, (w.cols - u * kUnit < kUnit ? w.cols - u * kUnit : kUnit) * sizeof(float));
  }
}

#if defined(__AVX2__)
#define PQ_FEW_FLOATS(e5m2) floats_few<e5m2>
#else
#define PQ_FEW_FLOATS(e5m2) nullptr
#endif
#define PQ_FLOATS(name, e5m2)                                                                                       \
  PackedKernel {                                                                                                    \
    name, 1, 1, 1, nullptr, dequantize_floats<e5m2>, PQ_FEW_FLOATS(e5m2), kFewTokens, kNever, true, /*rounds=*/true \
  }
#define PQ_GROUPED(name, ...)                                                                                         \
  PackedKernel {                                                                                                      \
    name, __VA_ARGS__::block, __VA_ARGS__::bytes, 1, multiply<__VA_ARGS__>, dequantize_grouped<__VA_ARGS__>, nullptr, \
        kAlone<__VA_ARGS__>, kTiled<__VA_ARGS__>, kOrders<__VA_ARGS__>                                                \
  }

constexpr PackedKernel kGrouped[] = {
    PQ_GROUPED("2.32", GroupedCodes<2, 32>),
    PQ_GROUPED("2.16", GroupedCodes<2, 16>),
    PQ_GROUPED("3.32", GroupedCodes<3, 32>),
    PQ_GROUPED("3.16", GroupedCodes<3, 16>),
    PQ_GROUPED("4.32", GroupedCodes<4, 32>),
    PQ_GROUPED("4.16", GroupedCodes<4, 16>),
    PQ_GROUPED("5.32", GroupedCodes<5, 32>),
    PQ_GROUPED("5.16", GroupedCodes<5, 16>),
    PQ_GROUPED("6.32", GroupedCodes<6, 32>),
    PQ_GROUPED("6.16", GroupedCodes<6, 16>),
    PQ_GROUPED("8.32", GroupedCodes<8, 32>),
    PQ_GROUPED("8.16", GroupedCodes<8, 16>),
    PQ_GROUPED("e2m1.32", GroupedFp4<32>),
    PQ_GROUPED("e2m1.16", GroupedFp4<16>),
    PQ_FLOATS("e4m3", false),
    PQ_FLOATS("e5m2", true),
};

#undef PQ_FLOATS
#undef PQ_FEW_FLOATS
#undef PQ_GROUPED

}  // namespace
}  // namespace polyquant
