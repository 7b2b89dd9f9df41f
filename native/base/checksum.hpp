// CRC-32 as in zlib, PNG and gzip.
#pragma once

#include <cstddef>
#include <cstdint>

namespace polyquant {

// The checksum of the bytes so far -> that of these bytes appended to them; 0 for no bytes.
uint32_t crc32(uint32_t crc, const uint8_t* data, size_t n);

}  // namespace polyquant
