// 4-bit floats (E2M1) with E8M0 or UE4M3 scales. src/polyquant/codecs/ggml_fp4.py has the byte diagrams.
#include <array>

#include "base/half.hpp"
#include "base/round.hpp"
#include "codecs/blocks.hpp"

namespace polyquant {
namespace {

using Bytes16 = uint8_t __attribute__((vector_size(16)));

// Twice the E2M1 value of 4 bits: 0 1 2 3 4 6 8 12, then their negatives (a comparison of vectors gives 0 or -1).
PQ_INLINE void twice_e2m1(const Bytes16& codes, int8_t* values) {
  const Bytes16 m = codes & 7, minus = Bytes16(codes > 7);
  const Bytes16 v = m - Bytes16(m > 4) - Bytes16(m > 5) + (Bytes16(m > 6) & 3);
  const Bytes16 signed_v = (v ^ minus) - minus;
  std::memcpy(values, &signed_v, 16);
}

// 16 bytes of nibbles: all low ones, then all high ones.
PQ_INLINE void unpack_nibbles(const uint8_t* src, int8_t* low, int8_t* high) {
  const auto nibbles = load<Bytes16>(src);
  twice_e2m1(nibbles & 15, low);
  twice_e2m1(nibbles >> 4, high);
}

// The nearest of twice-E2M1 times d; ties go towards zero. d = 0 gives 0. The midpoints are exact.
PQ_INLINE uint8_t nearest_e2m1(float x, float d) {
  const float a = std::fabs(x);
  const int m = int(a > 0.5f * d) + int(a > 1.5f * d) + int(a > 2.5f * d) + int(a > 3.5f * d) + int(a > 5 * d) +
                int(a > 7 * d) + int(a > 10 * d);
  const int minus = (std::bit_cast<int32_t>(x) >> 31) & 8;
  return uint8_t(d > 0 && m > 0 ? m | minus : 0);
}

template <int half>
PQ_INLINE void encode(const float* src, float d, uint8_t* nibbles) {
  uint8_t q[2 * half];
  PQ_LOOP
  for (int j = 0; j < 2 * half; ++j) q[j] = nearest_e2m1(src[j], d);
  PQ_LOOP
  for (int j = 0; j < half; ++j) nibbles[j] = uint8_t(q[j] | (q[j + half] << 4));
}

// Half of 2^(e - 127), because the codes count halves; 255 is the next power, not NaN, as in ggml.
PQ_INLINE float half_e8m0(uint8_t e) { return std::bit_cast<float>(e < 2 ? 0x00200000u << e : uint32_t(e - 1) << 23); }

// floor(log2(amax)) + 125. A value just below a power of two counts as that power if its log2 rounds to it.
PQ_INLINE uint8_t e8m0_for(float amax) {
  const uint32_t bits = std::bit_cast<uint32_t>(amax);
  int floor_log2 = int(bits >> 23) - 127;
  if ((bits & 0x7fffffu) > 0x7fff00u) floor_log2 = int(std::floor(float(std::log2(double(amax)))));
  return uint8_t(floor_log2 < -125 ? 0 : floor_log2 > 127 ? 252 : floor_log2 + 125);
}

PQ_SIMD void dequantize_mxfp4(const uint8_t* __restrict src, float* __restrict dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 17, dst += 32) {
    int8_t low[16], high[16];  // separate: a load across two fresh stores would wait for both
    const float d = half_e8m0(src[0]);
    unpack_nibbles(src + 1, low, high);
    PQ_LOOP
    for (int j = 0; j < 16; ++j) dst[j] = float(low[j]) * d;
    PQ_LOOP
    for (int j = 0; j < 16; ++j) dst[j + 16] = float(high[j]) * d;
  }
}

PQ_SIMD void quantize_mxfp4(const float* src, uint8_t* dst, size_t rows, size_t cols, const float*) {
  for (size_t i = 0; i < rows * cols / 32; ++i, src += 32, dst += 17) {
    const float amax = abs_max<32>(src);
    dst[0] = amax > 0 && amax <= std::numeric_limits<float>::max() ? e8m0_for(amax) : 0;
    encode<16>(src, half_e8m0(dst[0]), dst + 1);
  }
}

// Half of the UE4M3 value; bytes 0x00 and 0x7f are 0 and the top bit is ignored, as in ggml.
constexpr std::array<float, 256> half_ue4m3 = [] {
  std::array<float, 256> table{};
  for (int x = 0; x < 256; ++x) {
    const int exponent = x >> 3 & 15, mantissa = x & 7;
    float v = exponent ? float(8 + mantissa) / 8 : float(mantissa) / 4;
    for (int e = 7; e < exponent; ++e) v *= 2;
    for (int e = exponent; e < 7; ++e) v /= 2;
    table[size_t(x)] = x == 0 || x == 0x7f ? 0.0f : v / 2;
  }
  return table;
}();

// Half up on the fourth mantissa bit; from 248 on 0x7e, the only byte of the top exponent that ggml writes.
PQ_INLINE uint8_t ue4m3_for(float x) {
  if (!(x > 0)) return 0;
  const uint32_t bits = std::bit_cast<uint32_t>(x < 448 ? x : 448.0f);
  if (bits >> 23 < 121) {  // below 2^-6: multiples of 2^-9
    const int m = int(x * 512 + 0.5f);
    return uint8_t(m < 7 ? m : 7);
  }
  const uint32_t rounded = (bits - (120u << 23) + (1u << 19)) >> 20;
  return uint8_t(rounded < 0x78 ? rounded : 0x7e);
}

PQ_SIMD void dequantize_nvfp4(const uint8_t* __restrict src, float* __restrict dst, size_t blocks) {
  for (size_t i = 0; i < blocks; ++i, src += 36) {
    int8_t low[32], high[32];
    unpack_nibbles(src + 4, low, high);
    unpack_nibbles(src + 20, low + 16, high + 16);
    for (int s = 0; s < 4; ++s, dst += 16) {
      const float d = half_ue4m3[src[s]];
      PQ_LOOP
      for (int j = 0; j < 8; ++j) dst[j] = float(low[8 * s + j]) * d;
      PQ_LOOP
      for (int j = 0; j < 8; ++j) dst[j + 8] = float(high[8 * s + j]) * d;
    }
  }
}

PQ_SIMD void quantize_nvfp4(const float* src, uint8_t* dst, size_t rows, size_t cols, const float*) {
  for (size_t i = 0; i < rows * cols / 64; ++i, dst += 36)
    for (int s = 0; s < 4; ++s, src += 16) {
      dst[s] = ue4m3_for(abs_max<16>(src) / 6);
      encode<8>(src, half_ue4m3[dst[s]], dst + 4 + 8 * s);
    }
}

constexpr BlockKernel table[] = {
    {"mxfp4", 32, 17, dequantize_mxfp4, quantize_mxfp4},
    {"nvfp4", 64, 36, dequantize_nvfp4, quantize_nvfp4},
};

}  // namespace

KernelTable fp4_kernels() { return table; }

}  // namespace polyquant
