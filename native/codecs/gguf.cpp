#include "codecs/gguf.hpp"

#include "base/half.hpp"

namespace polyquant {
namespace {

template <class Length, bool Swap>
int64_t skip(const uint8_t* data, size_t size, size_t at, uint64_t count, int64_t* starts) {
  for (uint64_t i = 0; i < count; ++i) {
    if (size - at < sizeof(Length)) return -1;
    Length n = load<Length>(data + at);
    if constexpr (Swap) n = sizeof(Length) == 8 ? Length(__builtin_bswap64(n)) : Length(__builtin_bswap32(uint32_t(n)));
    if (starts) starts[i] = int64_t(at);
    at += sizeof(Length);
    if (n > size - at) return -1;
    at += size_t(n);
  }
  return int64_t(at);
}

}  // namespace

int64_t gguf_skip_strings(const uint8_t* data, size_t size, size_t offset, uint64_t count, bool big_endian, bool wide,
                          int64_t* starts) {
  if (offset > size) return -1;
  const bool swap = big_endian != (std::endian::native == std::endian::big);
  if (wide)
    return swap ? skip<uint64_t, true>(data, size, offset, count, starts)
                : skip<uint64_t, false>(data, size, offset, count, starts);
  return swap ? skip<uint32_t, true>(data, size, offset, count, starts)
              : skip<uint32_t, false>(data, size, offset, count, starts);
}

}  // namespace polyquant
