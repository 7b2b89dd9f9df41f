// Codes packed along the outputs, as GPTQ and AWQ store them, to rows that are bit streams.
#pragma once

#include <cstddef>
#include <cstdint>

namespace polyquant {

// words [rows, cols] -> out [cols, rows]: GPTQ's columns are the bit streams of its rows.
void transpose_words(const uint32_t* words, size_t rows, size_t cols, uint32_t* out);

// AWQ's words [K, N / 8], K a multiple of 8 -> rows of nibbles [N, K / 8]: nibble i of a word is output
// (0, 2, 4, 6, 1, 3, 5, 7)[i] of eight.
void awq_rows(const uint32_t* words, size_t k, size_t columns, uint32_t* out);

}  // namespace polyquant
