// Walking the length-prefixed strings of a GGUF header: the one part of it that is too long for Python.
#pragma once

#include <cstddef>
#include <cstdint>

namespace polyquant {

// Offset behind `count` strings that start at `offset`, or -1 if one of them runs past `size`.
// wide: 64-bit lengths (version 2 and later), else 32-bit. starts: where each string's length field lies, or null.
int64_t gguf_skip_strings(const uint8_t* data, size_t size, size_t offset, uint64_t count, bool big_endian, bool wide, int64_t* starts);

}  // namespace polyquant
