// Ternary weights in blocks of 256. src/polyquant/codecs/ggml_ternary.py has the byte diagrams.
#include "base/half.hpp"
#include "base/round.hpp"
#include "codecs/blocks.hpp"

namespace polyquant {
namespace {

// TQ1_0 stores its 256 digits as 5 x 32 in 32 bytes, 5 x 16 in 16 bytes, 4 x 4 in 4 bytes, most significant digit
// first.
// A byte holds ceil(value * 256 / 243), so multiplying by 3 moves the next digit out at the top.
template <int width, int digits>
PQ_INLINE void take_digits(const uint8_t* bytes, int8_t* codes) {
  for (int n = 0, power = 1; n < digits; ++n, power *= 3) PQ_LOOP
  for (int m = 0; m < width; ++m) {
    const uint8_t rest = uint8_t(bytes[m] * power);
    codes[n * width + m] = int8_t(((uint16_t(rest) * 3) >> 8) - 1);
  }
}

template <int width, int digits>
PQ_INLINE void put_digits(const int8_t* codes, uint8_t* bytes) {
  PQ_LOOP
  for (int m = 0; m < width; ++m) {
    uint16_t number = 0;
    for (int n = 0; n < 5; ++n) number = uint16_t(3 * number + (n < digits ? codes[n * width + m] + 1 : 0));
    bytes[m] = uint8_t((number * 256 + 242) / 243);
  }
}

struct Tq1 {
  static constexpr int bytes = 54, scale = 52;
  PQ_INLINE static void take(const uint8_t* b, int8_t* codes) {
    take_digits<32, 5>(b, codes);
    take_digits<16, 5>(b + 32, codes + 160);
    take_digits<4, 4>(b + 48, codes + 240);
  }
  PQ_INLINE static void put(const int8_t* codes, uint8_t* b) {
    put_digits<32, 5>(codes, b);
    put_digits<16, 5>(codes + 160, b + 32);
    put_digits<4, 4>(codes + 240, b + 48);
  }
};

// TQ2_0: two halves of 128; byte m of a half holds weights m, m + 32, m + 64, m + 96, lowest bits first.
struct Tq2 {
  static constexpr int bytes = 66, scale = 64;
  PQ_INLINE static void take(const uint8_t* b, int8_t* codes) {
    for (int half = 0; half < 2; ++half)
      for (int n = 0; n < 4; ++n)
        for (int m = 0; m < 32; ++m) codes[128 * half + 32 * n + m] = int8_t((b[32 * half + m] >> (2 * n) & 3) - 1);
  }
  PQ_INLINE static void put(const int8_t* codes, uint8_t* b) {
    for (int half = 0; half < 2; ++half, codes += 128)
      for (int m = 0; m < 32; ++m)
        b[32 * half + m] =
            uint8_t((codes[m] + 1) | (codes[m + 32] + 1) << 2 | (codes[m + 64] + 1) << 4 | (codes[m + 96] + 1) << 6);
  }
};

template <class T>
PQ_INLINE void dequantize(const uint8_t* src, float* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += T::bytes, dst += 256) {
    int8_t codes[256];
    T::take(src, codes);
    const float d = load_half(src + T::scale);
    for (int j = 0; j < 256; ++j) dst[j] = float(codes[j]) * d;
  }
}

template <class T>
PQ_INLINE void unpack(const uint8_t* src, int8_t* codes, float* scale, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += T::bytes, codes += 256) {
    T::take(src, codes);
    scale[i] = load_half(src + T::scale);
  }
}

template <class T>
PQ_INLINE void pack(const int8_t* codes, const float* scale, uint8_t* dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, dst += T::bytes, codes += 256) {
    T::put(codes, dst);
    store_half(dst + T::scale, scale[i]);
  }
}

PQ_SIMD void dequantize_tq1_0(const uint8_t* src, float* dst, size_t blocks) { dequantize<Tq1>(src, dst, blocks); }
PQ_SIMD void dequantize_tq2_0(const uint8_t* src, float* dst, size_t blocks) { dequantize<Tq2>(src, dst, blocks); }
PQ_SIMD void unpack_tq1_0(const uint8_t* b, int8_t* codes, float* scale, size_t n) { unpack<Tq1>(b, codes, scale, n); }
PQ_SIMD void unpack_tq2_0(const uint8_t* b, int8_t* codes, float* scale, size_t n) { unpack<Tq2>(b, codes, scale, n); }
PQ_SIMD void pack_tq1_0(const int8_t* codes, const float* scale, uint8_t* b, size_t n) {
  pack<Tq1>(codes, scale, b, n);
}
PQ_SIMD void pack_tq2_0(const int8_t* codes, const float* scale, uint8_t* b, size_t n) {
  pack<Tq2>(codes, scale, b, n);
}

constexpr BlockKernel table[] = {
    {"tq1_0", 256, 54, dequantize_tq1_0, nullptr},
    {"tq2_0", 256, 66, dequantize_tq2_0, nullptr},
};

constexpr TernaryKernel ternaries[] = {
    {"tq1_0", 256, 54, pack_tq1_0, unpack_tq1_0},
    {"tq2_0", 256, 66, pack_tq2_0, unpack_tq2_0},
};

}  // namespace

PQ_SIMD void ternarize(const float* src, int8_t* codes, float* scale, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 256, codes += 256) {
    const float d = abs_max<256>(src), id = inverse(d);
    for (int j = 0; j < 256; ++j) codes[j] = int8_t(round_half_away(clamp(src[j] * id, -1, 1)));
    scale[i] = d;
  }
}

KernelTable ternary_kernels() { return table; }
std::span<const TernaryKernel> ternary_layouts() { return ternaries; }

}  // namespace polyquant
