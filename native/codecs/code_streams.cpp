#include "codecs/code_streams.hpp"

#include <algorithm>
#include <cstring>

#include "base/simd.hpp"
#include "base/transposed.hpp"

namespace polyquant {

namespace {

constexpr size_t kTileColumns = 64;  // four cache lines of words: fewer pages per byte
constexpr size_t kTileWords = 96;    // 24 KB of words per tile
constexpr int kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};

// ---------------------------------------------------------------- widths that divide 8

PQ_SIMD void unpack_bytes(const uint8_t* in, uint8_t* out, size_t n, uint8_t shift) {
  for (size_t i = 0; i < n; ++i) out[i] = uint8_t(in[i] - shift);
}

PQ_SIMD void unpack_nibbles(const uint8_t* in, uint8_t* out, size_t n, uint8_t shift) {
  for (size_t i = 0; i < n; ++i) {
    out[2 * i] = uint8_t((in[i] & 15) - shift);
    out[2 * i + 1] = uint8_t((in[i] >> 4) - shift);
  }
}

PQ_SIMD void unpack_pairs(const uint8_t* in, uint8_t* out, size_t n, uint8_t shift) {
  for (size_t i = 0; i < n; ++i) {
    out[4 * i] = uint8_t((in[i] & 3) - shift);
    out[4 * i + 1] = uint8_t((in[i] >> 2 & 3) - shift);
    out[4 * i + 2] = uint8_t((in[i] >> 4 & 3) - shift);
    out[4 * i + 3] = uint8_t((in[i] >> 6) - shift);
  }
}

PQ_SIMD void pack_bytes(const uint8_t* in, uint8_t* out, size_t n, uint8_t shift) {
  for (size_t i = 0; i < n; ++i) out[i] = uint8_t(in[i] + shift);
}

PQ_SIMD void pack_nibbles(const uint8_t* in, uint8_t* out, size_t n, uint8_t shift) {
  for (size_t i = 0; i < n; ++i) out[i] = uint8_t(((in[2 * i] + shift) & 15) | ((in[2 * i + 1] + shift) & 15) << 4);
}

PQ_SIMD void pack_pairs(const uint8_t* in, uint8_t* out, size_t n, uint8_t shift) {
  for (size_t i = 0; i < n; ++i)
    out[i] = uint8_t(((in[4 * i] + shift) & 3) | ((in[4 * i + 1] + shift) & 3) << 2 |
                     ((in[4 * i + 2] + shift) & 3) << 4 | ((in[4 * i + 3] + shift) & 3) << 6);
}

// ---------------------------------------------------------------- any width: eight codes are `bits` bytes

constexpr uint64_t every_byte(uint8_t value) { return 0x0101010101010101ull * value; }

// Adds bytes without carries between them.
PQ_INLINE uint64_t add_bytes(uint64_t a, uint64_t b) {
  constexpr uint64_t top = every_byte(0x80);
  return ((a & ~top) + (b & ~top)) ^ ((a ^ b) & top);
}

template <int B>
PQ_INLINE uint64_t spread(uint64_t x) {  // 8 B bits -> 8 bytes: halves to 32, then 16, then 8 bits
  constexpr uint64_t four = (1ull << 4 * B) - 1, two = ((1ull << 2 * B) - 1) * 0x0000000100000001ull,
                     one = ((1ull << B) - 1) * 0x0001000100010001ull;
  x = (x & four) | (x >> 4 * B & four) << 32;
  x = (x & two) | (x >> 2 * B & two) << 16;
  return (x & one) | (x >> B & one) << 8;
}

template <int B>
PQ_INLINE uint64_t gather(uint64_t x) {  // the inverse
  constexpr uint64_t four = (1ull << 4 * B) - 1, two = ((1ull << 2 * B) - 1) * 0x0000000100000001ull,
                     one = ((1ull << B) - 1) * 0x0001000100010001ull;
  x = (x & one) | (x >> (8 - B) & one << B);
  x = (x & two) | (x >> (16 - 2 * B) & two << 2 * B);
  return (x & four) | (x >> (32 - 4 * B) & four << 4 * B);
}

// Full groups of eight codes; the last ones byte by byte where eight bytes would reach past `pitch`.
template <int B>
void unpack_eights(const uint8_t* in, size_t pitch, uint8_t* out, size_t count, uint8_t shift) {
  const uint64_t less = every_byte(uint8_t(-shift));
  for (size_t i = 0; 8 * i < count; ++i) {
    const size_t at = i * B, n = std::min<size_t>(8, count - 8 * i);
    uint64_t x = 0;
    if (at + 8 <= pitch)
      std::memcpy(&x, in + at, 8);
    else
      std::memcpy(&x, in + at, std::min<size_t>(B, pitch - at));
    if constexpr (B < 8) x &= (1ull << 8 * B) - 1;
    x = add_bytes(spread<B>(x), less);
    if (n == 8)
      std::memcpy(out + 8 * i, &x, 8);
    else
      std::memcpy(out + 8 * i, &x, n);
  }
}

template <int B>
void pack_eights(const uint8_t* in, size_t count, uint8_t* out, size_t pitch, uint8_t shift) {
  const uint64_t more = every_byte(shift);
  for (size_t i = 0; 8 * i < count; ++i) {
    const size_t at = i * B, n = std::min<size_t>(8, count - 8 * i);
    uint64_t x = 0;
    if (n == 8)
      std::memcpy(&x, in + 8 * i, 8);
    else
      std::memcpy(&x, in + 8 * i, n);
    x = add_bytes(x, more);
    if (n < 8) x &= (1ull << 8 * n) - 1;
    x = gather<B>(x);
    if (at + 8 <= pitch)
      std::memcpy(out + at, &x, 8);  // the bytes after these B are written next
    else
      std::memcpy(out + at, &x, std::min<size_t>(B, pitch - at));
  }
}

void unpack_stream(const uint8_t* in, size_t pitch, uint8_t* out, size_t count, int bits, uint8_t shift) {
  size_t whole = 0;  // codes of full bytes
  switch (bits) {
    case 8:
      return unpack_bytes(in, out, count, shift);
    case 4:
      unpack_nibbles(in, out, whole = count / 2, shift);
      if (count % 2) out[count - 1] = uint8_t((in[whole] & 15) - shift);
      return;
    case 2:
      unpack_pairs(in, out, whole = count / 4, shift);
      for (size_t i = 4 * whole; i < count; ++i) out[i] = uint8_t((in[whole] >> 2 * (i % 4) & 3) - shift);
      return;
    case 1:
      return unpack_eights<1>(in, pitch, out, count, shift);
    case 3:
      return unpack_eights<3>(in, pitch, out, count, shift);
    case 5:
      return unpack_eights<5>(in, pitch, out, count, shift);
    case 6:
      return unpack_eights<6>(in, pitch, out, count, shift);
    default:
      return unpack_eights<7>(in, pitch, out, count, shift);
  }
}

void pack_stream(const uint8_t* in, size_t count, uint8_t* out, size_t pitch, int bits, uint8_t shift) {
  const size_t used = (count * size_t(bits) + 7) / 8;
  size_t whole = 0;
  switch (bits) {
    case 8:
      pack_bytes(in, out, count, shift);
      break;
    case 4:
      pack_nibbles(in, out, whole = count / 2, shift);
      if (count % 2) out[whole] = uint8_t((in[count - 1] + shift) & 15);
      break;
    case 2:
      pack_pairs(in, out, whole = count / 4, shift);
      if (count % 4) out[whole] = 0;
      for (size_t i = 4 * whole; i < count; ++i) out[whole] |= uint8_t(((in[i] + shift) & 3) << 2 * (i % 4));
      break;
    case 1:
      pack_eights<1>(in, count, out, pitch, shift);
      break;
    case 3:
      pack_eights<3>(in, count, out, pitch, shift);
      break;
    case 5:
      pack_eights<5>(in, count, out, pitch, shift);
      break;
    case 6:
      pack_eights<6>(in, count, out, pitch, shift);
      break;
    default:
      pack_eights<7>(in, count, out, pitch, shift);
  }
  std::memset(out + used, 0, pitch - used);
}

// ---------------------------------------------------------------- transposed words

// The most words of a tile that full codes fill.
size_t tile_words(int bits) { return kTileWords / size_t(bits) * size_t(bits); }

// The tile words[0..height, 0..cols], a row every `pitch` words -> rows[cols, kTileWords], and back.
PQ_SIMD void rows_of(const uint32_t* words, size_t height, size_t cols, size_t pitch, uint32_t* rows) {
  transpose(words, height, cols, pitch, rows, kTileWords);
}

PQ_SIMD void columns_of(const uint32_t* rows, size_t height, size_t cols, size_t pitch, uint32_t* words) {
  transpose(rows, cols, height, kTileWords, words, pitch);
}

// Byte b of each word holds the nibbles of two rows of codes: kOrder[2 b] (low) and kOrder[2 b + 1] (high).
PQ_SIMD void split_words(const uint32_t* words, size_t n, uint8_t* codes, size_t pitch, uint8_t shift) {
  for (int b = 0; b < 4; ++b) {
    uint8_t *low = codes + size_t(kOrder[2 * b]) * pitch, *high = codes + size_t(kOrder[2 * b + 1]) * pitch;
    for (size_t i = 0; i < n; ++i) {
      const auto both = uint8_t(words[i] >> 8 * b);
      low[i] = uint8_t((both & 15) - shift);
      high[i] = uint8_t((both >> 4) - shift);
    }
  }
}

PQ_SIMD void join_words(const uint8_t* codes, size_t pitch, size_t n, uint32_t* words, uint8_t shift) {
  uint8_t bytes[4][kTileWords];
  for (int b = 0; b < 4; ++b) {
    const uint8_t *low = codes + size_t(kOrder[2 * b]) * pitch, *high = codes + size_t(kOrder[2 * b + 1]) * pitch;
    for (size_t i = 0; i < n; ++i) bytes[b][i] = uint8_t(((low[i] + shift) & 15) | ((high[i] + shift) & 15) << 4);
  }
  for (size_t i = 0; i < n; ++i)
    words[i] =
        uint32_t(bytes[0][i]) | uint32_t(bytes[1][i]) << 8 | uint32_t(bytes[2][i]) << 16 | uint32_t(bytes[3][i]) << 24;
}

// ---------------------------------------------------------------- ggml's blocks

template <int Bits, size_t Fields>
PQ_INLINE void unpack_each(const uint8_t* in, size_t count, uint8_t* out, uint16_t* numbers, uint8_t shift) {
  constexpr size_t head = 2 * Fields + (Bits == 5 ? 4 : 0), size = head + (Bits == 8 ? 32 : 16);
  for (size_t b = 0; b < count; ++b, in += size, out += 32, numbers += Fields) {
    std::memcpy(numbers, in, 2 * Fields);
    const uint8_t* codes = in + head;
    if constexpr (Bits == 8) {
      PQ_LOOP for (size_t i = 0; i < 32; ++i) out[i] = uint8_t(codes[i] - shift);
    } else if constexpr (Bits == 4) {
      PQ_LOOP for (size_t i = 0; i < 16; ++i) out[i] = uint8_t((codes[i] & 15) - shift);
      PQ_LOOP for (size_t i = 0; i < 16; ++i) out[16 + i] = uint8_t((codes[i] >> 4) - shift);
    } else {
      for (size_t i = 0; i < 4; ++i) {  // eight codes at a time
        uint64_t x;
        std::memcpy(&x, codes + 8 * (i % 2), 8);
        x = (x >> (i < 2 ? 0 : 4) & every_byte(15)) | spread<1>(in[2 * Fields + i]) << 4;
        x = add_bytes(x, every_byte(uint8_t(-shift)));
        std::memcpy(out + 8 * i, &x, 8);
      }
    }
  }
}

template <int Bits, size_t Fields>
PQ_INLINE void pack_each(const uint8_t* in, const uint16_t* numbers, size_t count, uint8_t* out, uint8_t shift) {
  constexpr size_t head = 2 * Fields + (Bits == 5 ? 4 : 0), size = head + (Bits == 8 ? 32 : 16);
  for (size_t b = 0; b < count; ++b, in += 32, out += size, numbers += Fields) {
    std::memcpy(out, numbers, 2 * Fields);
    uint8_t* codes = out + head;
    if constexpr (Bits == 8) {
      PQ_LOOP for (size_t i = 0; i < 32; ++i) codes[i] = uint8_t(in[i] + shift);
    } else {
      PQ_LOOP for (size_t i = 0; i < 16; ++i) codes[i] =
          uint8_t(((in[i] + shift) & 15) | ((in[16 + i] + shift) & 15) << 4);
      if constexpr (Bits == 5) {
        for (size_t i = 0; i < 4; ++i) {
          uint64_t x;
          std::memcpy(&x, in + 8 * i, 8);
          x = add_bytes(x, every_byte(shift)) >> 4 & every_byte(1);
          out[2 * Fields + i] = uint8_t(gather<1>(x));
        }
      }
    }
  }
}

PQ_SIMD void unpack_4_1(const uint8_t* in, size_t n, uint8_t* out, uint16_t* f, uint8_t s) {
  unpack_each<4, 1>(in, n, out, f, s);
}
PQ_SIMD void unpack_4_2(const uint8_t* in, size_t n, uint8_t* out, uint16_t* f, uint8_t s) {
  unpack_each<4, 2>(in, n, out, f, s);
}
PQ_SIMD void unpack_5_1(const uint8_t* in, size_t n, uint8_t* out, uint16_t* f, uint8_t s) {
  unpack_each<5, 1>(in, n, out, f, s);
}
PQ_SIMD void unpack_5_2(const uint8_t* in, size_t n, uint8_t* out, uint16_t* f, uint8_t s) {
  unpack_each<5, 2>(in, n, out, f, s);
}
PQ_SIMD void unpack_8_1(const uint8_t* in, size_t n, uint8_t* out, uint16_t* f, uint8_t s) {
  unpack_each<8, 1>(in, n, out, f, s);
}
PQ_SIMD void pack_4_1(const uint8_t* in, const uint16_t* f, size_t n, uint8_t* out, uint8_t s) {
  pack_each<4, 1>(in, f, n, out, s);
}
PQ_SIMD void pack_4_2(const uint8_t* in, const uint16_t* f, size_t n, uint8_t* out, uint8_t s) {
  pack_each<4, 2>(in, f, n, out, s);
}
PQ_SIMD void pack_5_1(const uint8_t* in, const uint16_t* f, size_t n, uint8_t* out, uint8_t s) {
  pack_each<5, 1>(in, f, n, out, s);
}
PQ_SIMD void pack_5_2(const uint8_t* in, const uint16_t* f, size_t n, uint8_t* out, uint8_t s) {
  pack_each<5, 2>(in, f, n, out, s);
}
PQ_SIMD void pack_8_1(const uint8_t* in, const uint16_t* f, size_t n, uint8_t* out, uint8_t s) {
  pack_each<8, 1>(in, f, n, out, s);
}

}  // namespace

void unpack_codes(const uint8_t* streams, size_t rows, size_t pitch, uint8_t* codes, size_t count, int bits,
                  uint8_t shift) {
  for (size_t r = 0; r < rows; ++r) unpack_stream(streams + r * pitch, pitch, codes + r * count, count, bits, shift);
}

void pack_codes(const uint8_t* codes, size_t rows, size_t count, uint8_t* streams, size_t pitch, int bits,
                uint8_t shift) {
  for (size_t r = 0; r < rows; ++r) pack_stream(codes + r * count, count, streams + r * pitch, pitch, bits, shift);
}

void unpack_columns(const uint32_t* words, size_t height, size_t cols, size_t pitch, uint8_t* codes, int bits,
                    uint8_t shift) {
  uint32_t rows[kTileColumns * kTileWords];
  const size_t count = height * 32 / size_t(bits), tallest = tile_words(bits);
  for (size_t n = 0; n < cols; n += kTileColumns)
    for (size_t w = 0; w < height; w += tallest) {
      const size_t wide = std::min(kTileColumns, cols - n), high = std::min(tallest, height - w);
      rows_of(words + w * pitch + n, high, wide, pitch, rows);
      const size_t first = w * 32 / size_t(bits), n_codes = high * 32 / size_t(bits);
      for (size_t i = 0; i < wide; ++i)
        unpack_stream(reinterpret_cast<const uint8_t*>(rows + i * kTileWords), 4 * high,
                      codes + (n + i) * count + first, n_codes, bits, shift);
    }
}

void pack_columns(const uint8_t* codes, size_t height, size_t cols, size_t pitch, uint32_t* words, int bits,
                  uint8_t shift) {
  uint32_t rows[kTileColumns * kTileWords];
  const size_t count = height * 32 / size_t(bits), tallest = tile_words(bits);
  for (size_t n = 0; n < cols; n += kTileColumns)
    for (size_t w = 0; w < height; w += tallest) {
      const size_t wide = std::min(kTileColumns, cols - n), high = std::min(tallest, height - w);
      const size_t first = w * 32 / size_t(bits), n_codes = high * 32 / size_t(bits);
      for (size_t i = 0; i < wide; ++i)
        pack_stream(codes + (n + i) * count + first, n_codes, reinterpret_cast<uint8_t*>(rows + i * kTileWords),
                    4 * high, bits, shift);
      columns_of(rows, high, wide, pitch, words + w * pitch + n);
    }
}

void unpack_interleaved(const uint32_t* words, size_t height, size_t cols, size_t pitch, uint8_t* codes,
                        uint8_t shift) {
  uint32_t rows[kTileColumns * kTileWords];
  for (size_t j = 0; j < cols; j += kTileColumns)
    for (size_t k = 0; k < height; k += kTileWords) {
      const size_t wide = std::min(kTileColumns, cols - j), high = std::min(kTileWords, height - k);
      rows_of(words + k * pitch + j, high, wide, pitch, rows);
      for (size_t i = 0; i < wide; ++i)
        split_words(rows + i * kTileWords, high, codes + 8 * (j + i) * height + k, height, shift);
    }
}

void pack_interleaved(const uint8_t* codes, size_t height, size_t cols, size_t pitch, uint32_t* words, uint8_t shift) {
  uint32_t rows[kTileColumns * kTileWords];
  for (size_t j = 0; j < cols; j += kTileColumns)
    for (size_t k = 0; k < height; k += kTileWords) {
      const size_t wide = std::min(kTileColumns, cols - j), high = std::min(kTileWords, height - k);
      for (size_t i = 0; i < wide; ++i)
        join_words(codes + 8 * (j + i) * height + k, height, high, rows + i * kTileWords, shift);
      columns_of(rows, high, wide, pitch, words + k * pitch + j);
    }
}

size_t block_bytes(int bits, size_t fields) {
  if (fields == 2) return bits == 4 ? 20 : bits == 5 ? 24 : 0;
  return fields != 1 ? 0 : bits == 4 ? 18 : bits == 5 ? 22 : bits == 8 ? 34 : 0;
}

void unpack_blocks(const uint8_t* blocks, size_t count, int bits, size_t fields, uint8_t* codes, uint16_t* numbers,
                   uint8_t shift) {
  if (bits == 8) return unpack_8_1(blocks, count, codes, numbers, shift);
  if (bits == 4) return (fields == 1 ? unpack_4_1 : unpack_4_2)(blocks, count, codes, numbers, shift);
  (fields == 1 ? unpack_5_1 : unpack_5_2)(blocks, count, codes, numbers, shift);
}

void pack_blocks(const uint8_t* codes, const uint16_t* numbers, size_t count, int bits, size_t fields, uint8_t* blocks,
                 uint8_t shift) {
  if (bits == 8) return pack_8_1(codes, numbers, count, blocks, shift);
  if (bits == 4) return (fields == 1 ? pack_4_1 : pack_4_2)(codes, numbers, count, blocks, shift);
  (fields == 1 ? pack_5_1 : pack_5_2)(codes, numbers, count, blocks, shift);
}

}  // namespace polyquant
