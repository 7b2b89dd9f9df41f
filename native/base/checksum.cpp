#include "base/checksum.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

#include "base/simd.hpp"

namespace polyquant {
namespace {

// Polynomials modulo 2 with the coefficient of x^0 in the highest bit. The message is such a polynomial, too: its first
// bit, the lowest of the first byte, has the highest power.
constexpr uint32_t kPolynomial = 0xedb88320;  // without x^32

constexpr uint32_t times_x(uint32_t p) { return p >> 1 ^ (p & 1 ? kPolynomial : 0); }

constexpr std::array<uint32_t, 256> bytewise() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    table[i] = i;
    for (int bit = 0; bit < 8; ++bit) table[i] = times_x(table[i]);
  }
  return table;
}
constexpr auto kBytewise = bytewise();

// The register after these bytes.
uint32_t shifted(uint32_t state, const uint8_t* data, size_t n) {
  for (size_t i = 0; i < n; ++i) state = state >> 8 ^ kBytewise[(state ^ data[i]) & 255];
  return state;
}

#if defined(__x86_64__) && defined(__GNUC__)

// x^n modulo the polynomial, as the factor of a carry-less product of reflected operands, which lacks one bit.
constexpr uint64_t power(int n) {
  uint32_t p = 0x80000000;
  for (int i = 0; i < n; ++i) p = times_x(p);
  return uint64_t(p) << 1;
}

// A vector of 128 bits, moved ahead by `bits`: its first 64 bits are multiplied by x^(bits + 32), the others by
// x^(bits - 32). Congruent modulo the polynomial, and again 128 bits.
template <int bits>
__attribute__((target("pclmul,sse4.1"), always_inline)) inline __m128i ahead(__m128i v) {
  constexpr auto first = int64_t(power(bits + 32)), second = int64_t(power(bits - 32));
  const __m128i factors = _mm_set_epi64x(second, first);
  return _mm_xor_si128(_mm_clmulepi64_si128(v, factors, 0x00), _mm_clmulepi64_si128(v, factors, 0x11));
}

// The register after a multiple of 64 bytes, at least 64: four vectors at a time.
__attribute__((target("pclmul,sse4.1"))) uint32_t folded(uint32_t state, const uint8_t* data, size_t n) {
  const auto at = [data](size_t i) __attribute__((target("pclmul,sse4.1"))) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + i));
  };
  __m128i v[4] = {_mm_xor_si128(at(0), _mm_cvtsi32_si128(int(state))), at(16), at(32), at(48)};
  for (size_t i = 64; i < n; i += 64)
    for (size_t j = 0; j < 4; ++j) v[j] = _mm_xor_si128(ahead<512>(v[j]), at(i + 16 * j));
  for (size_t j = 1; j < 4; ++j) v[j] = _mm_xor_si128(ahead<128>(v[j - 1]), v[j]);
  uint8_t last[16];
  std::memcpy(last, &v[3], 16);
  return shifted(0, last, 16);
}

#endif

}  // namespace

uint32_t crc32(uint32_t crc, const uint8_t* data, size_t n) {
  uint32_t state = ~crc;
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool fast = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (fast && n >= 64) {
    const size_t whole = n / 64 * 64;
    state = folded(state, data, whole);
    data += whole, n -= whole;
  }
#endif
  return ~shifted(state, data, n);
}

}  // namespace polyquant
