"""Rows of b-bit codes as little-endian bit streams: code i of a row is bits [b i, b i + b), lowest bits first.

    unpack    uint8 [rows, pitch] -> uint8 [rows, count]
    pack      the inverse; the bits after the last code of a row are 0

b from 1 to 8. The functions here are numpy references with native counterparts in native/code_streams.cpp.
"""

from __future__ import annotations

import numpy as np

from polyquant.ops import native
from polyquant.types import U8

__all__ = ["pack", "pitch_of", "unpack"]


def pitch_of(count: int, bits: int, word: int = 4) -> int:
    """Bytes of a row of `count` codes, padded to whole words."""
    return -(-count * bits // (8 * word)) * word


def unpack(stream: U8, bits: int, count: int) -> U8:
    """Unsigned codes, uint8 [rows, count], of rows of at least count * bits / 8 bytes."""
    rows, pitch = stream.shape
    out = np.empty((rows, count), np.uint8)
    if (lib := native.lib()) is not None and hasattr(lib, "unpack_codes"):
        lib.unpack_codes(np.ascontiguousarray(stream), out, bits)
        return out
    if bits == 8:
        out[:] = stream[:, :count]
    elif 8 % bits == 0:
        per = 8 // bits
        for i in range(per):
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
    return out


def pack(codes: U8, bits: int, pitch: int) -> U8:
    """Rows of `pitch` bytes, uint8 [rows, pitch], of unsigned codes [rows, count]."""
    rows, count = codes.shape
    out = np.zeros((rows, pitch), np.uint8)
    if (lib := native.lib()) is not None and hasattr(lib, "pack_codes"):
        lib.pack_codes(np.ascontiguousarray(codes), out, bits)
        return out
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
        out[:] = stream.reshape(rows, eights * bits)[:, :pitch]
    return out
