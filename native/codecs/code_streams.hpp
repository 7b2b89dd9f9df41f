// Rows of b-bit codes, b from 1 to 8, as little-endian bit streams: code i of a row is bits [b i, b i + b), lowest bits
// first; and the other packings of integer codes: along columns (GPTQ), in AWQ's order, in ggml's blocks of 32.
// Reference: src/polyquant/ops/code_streams.py.
//
// `shift` is subtracted modulo 256 from each code that is unpacked, and added to each that is packed, which makes
// unsigned codes signed. Higher bits of codes to be packed are ignored.
#pragma once

#include <cstddef>
#include <cstdint>

namespace polyquant {

// streams [rows, pitch], codes [rows, count]; pitch * 8 >= count * bits. Packing clears the bits after the last code.
void unpack_codes(const uint8_t* streams, size_t rows, size_t pitch, uint8_t* codes, size_t count, int bits,
                  uint8_t shift);
void pack_codes(const uint8_t* codes, size_t rows, size_t count, uint8_t* streams, size_t pitch, int bits,
                uint8_t shift);

// words [height, >= cols], a row every `pitch` words: column n holds the stream of codes[n], [cols, height * 32 /
// bits].
void unpack_columns(const uint32_t* words, size_t height, size_t cols, size_t pitch, uint8_t* codes, int bits,
                    uint8_t shift);
void pack_columns(const uint8_t* codes, size_t height, size_t cols, size_t pitch, uint32_t* words, int bits,
                  uint8_t shift);

// AWQ: words [height, >= cols], a row every `pitch` words. Nibble p of words[k, j] is codes[8 j + order[p], k] with the
// order 0 2 4 6 1 3 5 7; codes [8 cols, height].
void unpack_interleaved(const uint32_t* words, size_t height, size_t cols, size_t pitch, uint8_t* codes, uint8_t shift);
void pack_interleaved(const uint8_t* codes, size_t height, size_t cols, size_t pitch, uint32_t* words, uint8_t shift);

// ggml's q4_0, q4_1, q5_0, q5_1, q8_0: `count` blocks of `fields` 16-bit numbers (d, then m), the fifth bits, and 32
// codes of 4, 5 or 8 bits. Codes [count, 32] of 4 and 5 bits count from 0, of 8 bits from -128, before `shift`;
// numbers [count, fields].
void unpack_blocks(const uint8_t* blocks, size_t count, int bits, size_t fields, uint8_t* codes, uint16_t* numbers,
                   uint8_t shift);
void pack_blocks(const uint8_t* codes, const uint16_t* numbers, size_t count, int bits, size_t fields, uint8_t* blocks,
                 uint8_t shift);
size_t block_bytes(int bits, size_t fields);

}  // namespace polyquant
