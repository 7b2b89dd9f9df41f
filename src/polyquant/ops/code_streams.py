"""Packings of b-bit codes. Native counterparts: native/codecs/code_streams.cpp.

    stream       code i of a row is bits [b i, b i + b) of its bytes, lowest bits first; b from 1 to 8
    columns      the stream of each row of codes is a column of 32-bit words: codes [N, K], words [K b / 32, N] (GPTQ)
    interleaved  4 bits: nibble p of word [k, j] is the code of row 8 j + (0, 2, 4, 6, 1, 3, 5, 7)[p], column k (AWQ)
    blocks       ggml's q4_0, q4_1, q5_0, q5_1, q8_0: numbers f16 (d, then m), the fifth bits of 32 codes, 16 or 32
                 bytes of codes: byte j has code j in its low and code j + 16 in its high bits

shift is subtracted modulo 256 from codes that are unpacked and added to codes that are packed: 2^(b - 1) makes unsigned
codes signed. Packing ignores higher bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.ops import native
from polyquant.types import U8

__all__ = [
    "BLOCK",
    "block_bytes",
    "pack",
    "pack_blocks",
    "pack_columns",
    "pack_interleaved",
    "pack_into",
    "pitch_of",
    "unpack",
    "unpack_blocks",
    "unpack_columns",
    "unpack_interleaved",
]

BLOCK = 32
"""Codes of a block."""
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pitch_of(count: int, bits: int, word: int = 4) -> int:
    """Bytes of a row of `count` codes, padded to whole words."""
    return -(-count * bits // (8 * word)) * word


def block_bytes(bits: int, numbers: int) -> int:
    """Bytes of a block with 4, 5 or 8 bits and one or two numbers."""
    return 2 * numbers + (4 if bits == 5 else 0) + (32 if bits == 8 else 16)


# ---------------------------------------------------------------- streams


def unpack(stream: U8, bits: int, count: int, shift: int = 0) -> U8:
    """Codes, uint8 [rows, count], of rows of at least count * bits / 8 bytes."""
    rows, pitch = stream.shape
    out = np.empty((rows, count), np.uint8)
    if (lib := native.lib()) is not None:
        lib.unpack_codes(np.ascontiguousarray(stream), out, bits, shift)
        return out
    if bits == 8:
        out[:] = stream[:, :count]
    elif 8 % bits == 0:
        per = 8 // bits
        for i in range(min(per, count)):
            lane = stream[:, : -(-(count - i) // per)] >> np.uint8(bits * i) & np.uint8(2**bits - 1)
            out[:, i::per] = lane
    else:
        eights = -(-count // 8)  # eight b-bit codes occupy b bytes
        padded = np.zeros((rows, eights * bits), np.uint8)
        padded[:, : min(pitch, eights * bits)] = stream[:, : eights * bits]
        wide = padded.reshape(rows, eights, bits).astype(np.uint64)
        joined = (wide << (8 * np.arange(bits, dtype=np.uint64))).sum(2, dtype=np.uint64)
        codes = joined[:, :, None] >> (bits * np.arange(8, dtype=np.uint64)) & np.uint64(2**bits - 1)
        out[:] = codes.reshape(rows, eights * 8)[:, :count]
    return out - np.uint8(shift)


def pack(codes: U8, bits: int, pitch: int, shift: int = 0) -> U8:
    """Rows of `pitch` bytes, uint8 [rows, pitch], of codes [rows, count]; the bits after the last code are 0."""
    out = np.empty((len(codes), pitch), np.uint8)
    pack_into(codes, out, bits, shift)
    return out


def pack_into(codes: U8, out: U8, bits: int, shift: int = 0) -> None:
    """Like `pack`, into C-contiguous rows `out`."""
    rows, count = codes.shape
    if (lib := native.lib()) is not None:
        lib.pack_codes(np.ascontiguousarray(codes), out, bits, shift)
        return
    out[:], codes = 0, codes + np.uint8(shift) & np.uint8(2**bits - 1)
    if bits == 8:
        out[:, :count] = codes
    elif 8 % bits == 0:
        per = 8 // bits
        for i in range(per):
            lane = codes[:, i::per]
            out[:, : lane.shape[1]] |= lane << np.uint8(bits * i)
    else:
        eights = -(-count // 8)
        padded = np.zeros((rows, eights * 8), np.uint64)
        padded[:, :count] = codes
        joined = (padded.reshape(rows, eights, 8) << (bits * np.arange(8, dtype=np.uint64))).sum(2, dtype=np.uint64)
        stream = (joined[:, :, None] >> (8 * np.arange(bits, dtype=np.uint64)) & np.uint64(255)).astype(np.uint8)
        used = min(out.shape[1], eights * bits)
        out[:, :used] = stream.reshape(rows, eights * bits)[:, :used]


# ---------------------------------------------------------------- transposed words


def unpack_columns(words: NDArray[Any], bits: int, shift: int = 0) -> U8:
    """Codes, uint8 [N, W * 32 / bits], of 32-bit words [W, N]; columns of a larger array are not copied."""
    height, n = words.shape
    count = height * 32 // bits
    if (lib := native.lib()) is not None:
        out = np.empty((n, count), np.uint8)
        lib.unpack_columns(_words(words), out, bits, shift)
        return out
    return unpack(_bytes(words.T), bits, count, shift)


def pack_columns(codes: U8, out: NDArray[Any], bits: int, shift: int = 0) -> None:
    """Write codes [N, K] into 32-bit words `out` [K * bits / 32, N], which may be columns of a larger array."""
    if (lib := native.lib()) is not None:
        lib.pack_columns(np.ascontiguousarray(codes), out.view(np.uint32), bits, shift)
    else:
        out[:] = pack(codes, bits, 4 * len(out), shift).view("<i4").T


def unpack_interleaved(words: NDArray[Any], shift: int = 0) -> U8:
    """4-bit codes, uint8 [8 * J, K], of 32-bit words [K, J]; columns of a larger array are not copied."""
    k, columns = words.shape
    out = np.empty((8 * columns, k), np.uint8)
    if (lib := native.lib()) is not None:
        lib.unpack_interleaved(_words(words), out, shift)
        return out
    lanes = _bytes(words.T).view("<u4")
    for i, place in enumerate(_ORDER):
        out[place::8] = lanes >> np.uint32(4 * i) & np.uint32(15)
    return out - np.uint8(shift)


def pack_interleaved(codes: U8, out: NDArray[Any], shift: int = 0) -> None:
    """Write codes [8 * J, K] into 32-bit words `out` [K, J], which may be columns of a larger array."""
    if (lib := native.lib()) is not None:
        lib.pack_interleaved(np.ascontiguousarray(codes), out.view(np.uint32), shift)
        return
    codes = codes + np.uint8(shift) & np.uint8(15)
    lanes = np.zeros((len(codes) // 8, codes.shape[1]), "<u4")
    for i, place in enumerate(_ORDER):
        lanes |= codes[place::8].astype(np.uint32) << np.uint32(4 * i)
    out[:] = lanes.T.view("<i4")


def _words(words: NDArray[Any]) -> NDArray[Any]:
    """32-bit words in rows of adjacent words."""
    adjacent = words.strides[1] == 4 and words.strides[0] >= 4 * words.shape[1]
    return (words if adjacent else np.ascontiguousarray(words)).view(np.uint32)


def _bytes(words: NDArray[Any]) -> U8:
    return np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8)


# ---------------------------------------------------------------- ggml's blocks


def unpack_blocks(blocks: U8, bits: int, numbers: int, shift: int = 0) -> tuple[U8, NDArray[np.float16]]:
    """Codes, uint8 [B, 32], and numbers, float16 [B, numbers], of blocks uint8 [B, size].

    Codes of 8 bits are stored signed, others count from 0.
    """
    out, halves = np.empty((len(blocks), BLOCK), np.uint8), np.empty((len(blocks), numbers), np.float16)
    if (lib := native.lib()) is not None:
        lib.unpack_blocks(np.ascontiguousarray(blocks), out, halves.view(np.uint16), bits, shift)
        return out, halves
    at = 2 * numbers
    halves[:] = np.ascontiguousarray(blocks[:, :at]).view("<f2")
    if bits == 8:
        out[:] = blocks[:, at:]
    else:
        out[:] = np.concatenate([blocks[:, -16:] & 15, blocks[:, -16:] >> 4], 1)
        if bits == 5:
            out |= np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4
    return out - np.uint8(shift), halves


def pack_blocks(codes: U8, halves: NDArray[np.float16], bits: int, shift: int = 0) -> U8:
    """Blocks, uint8 [B, size], of codes [B, 32] and numbers, float16 [B, 1 or 2]."""
    size = block_bytes(bits, halves.shape[1])
    if (lib := native.lib()) is not None:
        out = np.empty((len(codes), size), np.uint8)
        lib.pack_blocks(np.ascontiguousarray(codes), np.ascontiguousarray(halves).view(np.uint16), out, bits, shift)
        return out
    moved, fields = codes + np.uint8(shift), [np.ascontiguousarray(halves, "<f2").view(np.uint8)]
    if bits == 8:
        return np.concatenate([*fields, moved], 1)
    if bits == 5:
        fields.append(np.packbits(moved >> 4 & 1, axis=1, bitorder="little"))
    return np.concatenate([*fields, moved[:, :16] & 15 | moved[:, 16:] << 4], 1)
