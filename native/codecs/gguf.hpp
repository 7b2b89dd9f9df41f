// Scanning the length-prefixed strings of a GGUF header, the only part of it that is too slow in Python.
#pragma once

#include <cstddef>
#include <cstdint>

namespace polyquant {

// Offset after `count` strings that start at `offset`, or -1 if one of them extends past `size`.
// wide: 64-bit lengths (version 2 and later), else 32-bit. starts: receives the offset of each length field, or null.
int64_t gguf_skip_strings(const uint8_t* data, size_t size, size_t offset, uint64_t count, bool big_endian, bool wide,
                          int64_t* starts);

}  // namespace polyquant
