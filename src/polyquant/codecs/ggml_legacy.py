"""ggml's legacy types (blocks of 32 weights, fp16 scale d, some with an fp16 minimum m), and the new Q1_0 and Q2_0.

    Q4_0   18 bytes  4.5 bpw    [d][qs 16]             w = (q - 8) * d
    Q4_1   20 bytes  5.0 bpw    [d][m][qs 16]          w = q * d + m
    Q5_0   22 bytes  5.5 bpw    [d][qh u32][qs 16]     w = (q - 16) * d
    Q5_1   24 bytes  6.0 bpw    [d][m][qh u32][qs 16]  w = q * d + m
    Q8_0   34 bytes  8.5 bpw    [d][qs i8 x 32]        w = q * d
    Q8_1   36 bytes  9.0 bpw    [d][s][qs i8 x 32]     w = q * d; s = d * sum of q (for activations only)
    Q1_0   18 bytes  1.125 bpw  [d][bits 16]           blocks of 128; w = +d where the bit is set, else -d
    Q2_0   18 bytes  2.25 bpw   [d][qs 16]             blocks of 64; w = (q - 1) * d; q = 3 is legal and means 2 * d
    (byte 0 at the left; fields little-endian)

Low nibble of qs[j] = weight j, high nibble = weight j + 16; bit j of qh = bit 4 of weight j. Q1_0 and Q2_0: weight j
from the lowest bits up. d is rounded to fp16 only when stored; codes come from the unrounded 1/d. Q4_0 and Q5_0 map the
first weight of greatest magnitude to code 0, so d has the opposite sign and a block of zeros stores d = -0.

With an importance vector ggml's quantizer searches Q4_0, Q4_1, Q5_0, Q5_1 (quantizers/legacy_search.py); the other
types ignore it. ggml's C code is undefined where 1/d is not finite; here such a block stores zero codes. Source:
ggml-quants.c of llama.cpp 0c1e570. Disagreement: a fork (PrismML) writes Q2_0 with blocks of 128; that is not this
codec.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.blocks import BlockCodec
from polyquant.ops.rounding import clamp, from_half, half_away, inverse, sequential_sum, to_half
from polyquant.registry import Search
from polyquant.types import F32, U8

__all__ = ["Q1_0", "Q2_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q8_1"]

_BITS = np.arange(32, dtype=np.uint32)


def _codes(b: U8, fifth: bool) -> NDArray[np.int32]:
    """[n, (4 +) 16] -> codes [n, 32]"""
    qs = b[:, -16:]
    q = np.concatenate([qs & 15, qs >> 4], axis=1).astype(np.int32)
    if fifth:
        q |= (b[:, :4].copy().view("<u4") >> _BITS & 1).astype(np.int32) << 4
    return q


def fields_of(q: U8, fifth: bool) -> U8:
    """Codes [n, 32] -> bytes of a block, [n, (4 +) 16]. fifth: codes have 5 bits."""
    qs = q[:, :16] & np.uint8(15) | q[:, 16:] << np.uint8(4)
    if not fifth:
        return qs
    qh: NDArray[np.uint32] = (q.astype(np.uint32) >> 4 << _BITS).sum(axis=1, keepdims=True, dtype=np.uint32)
    return np.concatenate([qh.astype("<u4").view(np.uint8), qs], axis=1)


def first_min(w: F32) -> F32:
    """[n, 32] -> minimum [n, 1]; of equal zeros the first, because its sign is stored."""
    return np.take_along_axis(w, w.argmin(axis=1)[:, None], axis=1)


def _decode_symmetric(b: U8, *, fifth: bool) -> F32:
    """[n, 18 or 22] -> [n, 32]"""
    return (_codes(b[:, 2:], fifth) - (16 if fifth else 8)).astype(np.float32) * from_half(b[:, :2])


def _decode_affine(b: U8, *, fifth: bool) -> F32:
    """[n, 20 or 24] -> [n, 32]"""
    return _codes(b[:, 4:], fifth).astype(np.float32) * from_half(b[:, :2]) + from_half(b[:, 2:4])


def _encode_symmetric(w: F32, importance: F32 | None, *, fifth: bool) -> U8:
    """[n, 32] -> [n, 18 or 22]; ignores importance."""
    half = 16 if fifth else 8
    extreme = np.take_along_axis(w, np.abs(w).argmax(axis=1)[:, None], axis=1)
    d = np.where(extreme == 0, np.float32(0), extreme) * np.float32(-1 / half)  # [n, 1]
    q = clamp(w * inverse(d) + np.float32(half + 0.5), 0, 2 * half - 1).astype(np.uint8)
    return np.concatenate([to_half(d), fields_of(q, fifth)], axis=1)


def _encode_affine(w: F32, importance: F32 | None, *, fifth: bool) -> U8:
    """[n, 32] -> [n, 20 or 24]; ignores importance."""
    levels = 31 if fifth else 15
    m = first_min(w)
    d = (w.max(axis=1, keepdims=True) - m) / np.float32(levels)
    d = np.where(d == 0, np.float32(0), d)
    q = clamp((w - m) * inverse(d) + np.float32(0.5), 0, levels).astype(np.uint8)
    return np.concatenate([to_half(d), to_half(m), fields_of(q, fifth)], axis=1)


# ---------------------------------------------------------------- 8, 1 and 2 bits


def decode_q8_0(b: U8) -> F32:
    """[n, 34] -> [n, 32]"""
    return b[:, 2:].view(np.int8).astype(np.float32) * from_half(b[:, :2])


def encode_q8_0(w: F32, importance: F32 | None) -> U8:
    """[n, 32] -> [n, 34]"""
    d = np.abs(w).max(axis=1, keepdims=True) / np.float32(127)  # [n, 1]
    q = half_away(clamp(w * inverse(d), -127, 127)).astype(np.int8)
    return np.concatenate([to_half(d), q.view(np.uint8)], axis=1)


def decode_q8_1(b: U8) -> F32:
    """[n, 36] -> [n, 32]"""
    return b[:, 4:].view(np.int8).astype(np.float32) * from_half(b[:, :2])


def encode_q8_1(w: F32, importance: F32 | None) -> U8:
    """[n, 32] -> [n, 36]"""
    b = encode_q8_0(w, None)
    d = np.abs(w).max(axis=1, keepdims=True) / np.float32(127)
    total = b[:, 2:].view(np.int8).sum(axis=1, keepdims=True, dtype=np.int32).astype(np.float32)
    return np.concatenate([b[:, :2], to_half(total * d), b[:, 2:]], axis=1)


def decode_q1_0(b: U8) -> F32:
    """[n, 18] -> [n, 128]"""
    d = from_half(b[:, :2])
    return np.where(np.unpackbits(b[:, 2:], axis=1, bitorder="little") == 1, d, -d)


def encode_q1_0(w: F32, importance: F32 | None) -> U8:
    """[n, 128] -> [n, 18]"""
    d = sequential_sum(np.abs(w)) / np.float32(128)
    return np.concatenate([to_half(d), np.packbits(w >= 0, axis=1, bitorder="little")], axis=1)


def decode_q2_0(b: U8) -> F32:
    """[n, 18] -> [n, 64]"""
    q = (b[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(len(b), 64)
    return (q.astype(np.float32) - np.float32(1)) * from_half(b[:, :2])


def encode_q2_0(w: F32, importance: F32 | None) -> U8:
    """[n, 64] -> [n, 18]"""
    d = np.abs(w).max(axis=1, keepdims=True)
    q = (half_away(clamp(w * inverse(d), -1, 2)) + 1).astype(np.uint8)
    qs = (q.reshape(len(w), 16, 4) << np.arange(0, 8, 2, dtype=np.uint8)).sum(axis=2, dtype=np.uint8)
    return np.concatenate([to_half(d), qs], axis=1)


def _nibbles(name: str, type_id: int, type_size: int, *, affine: bool, fifth: bool) -> BlockCodec:
    high = ((4 if affine else 2, 4, 1),) if fifth else ()
    decode, encode, search = (
        (_decode_affine, _encode_affine, Search("polyquant.quantizers.legacy_search:affine"))
        if affine
        else (_decode_symmetric, _encode_symmetric, Search("polyquant.quantizers.legacy_search:symmetric"))
    )
    return BlockCodec(
        name, type_id, 32, type_size, partial(decode, fifth=fifth), partial(encode, fifth=fifth),
        fields=((0, 2, 2 if affine else 1), *high), search=partial(search, fifth=fifth),
    )  # fmt: skip


Q4_0 = _nibbles("q4_0", 2, 18, affine=False, fifth=False)
Q4_1 = _nibbles("q4_1", 3, 20, affine=True, fifth=False)
Q5_0 = _nibbles("q5_0", 6, 22, affine=False, fifth=True)
Q5_1 = _nibbles("q5_1", 7, 24, affine=True, fifth=True)
Q8_0 = BlockCodec("q8_0", 8, 32, 34, decode_q8_0, encode_q8_0, fields=((0, 2, 1),))
Q8_1 = BlockCodec("q8_1", 9, 32, 36, decode_q8_1, encode_q8_1, fields=((0, 2, 2),))
Q1_0 = BlockCodec("q1_0", 41, 128, 18, decode_q1_0, encode_q1_0, fields=((0, 2, 1),))
Q2_0 = BlockCodec("q2_0", 42, 64, 18, decode_q2_0, encode_q2_0, fields=((0, 2, 1),))
