"""ggml's K types: super-blocks of 256 weights, sub-blocks of 16 or 32 whose scales are themselves quantized.

    Q2_K   84 bytes  2.625 bpw   [sub u8 x 16: scale low nibble, min high][q 2 bit: 64][d f16][dmin f16]
    Q3_K  110 bytes  3.4375 bpw  [high bits 32][low 2 bits 64][sub 6 bit x 16: 12][d f16]
    Q4_K  144 bytes  4.5 bpw     [d f16][dmin f16][sc, m 6 bit x 8: 12][q 4 bit: 128]
    Q5_K  176 bytes  5.5 bpw     [d f16][dmin f16][sc, m 6 bit x 8: 12][high bits 32][low 4 bits 128]
    Q6_K  210 bytes  6.5625 bpw  [low 4 bits 128][high 2 bits 64][sc i8 x 16][d f16]
    Q8_K  292 bytes  9.125 bpw   [d f32][q i8 x 256][sums of 16 q: i16 x 16]
    (byte 0 at the left; sub-blocks of 16 in Q2_K, Q3_K and Q6_K, of 32 in Q4_K and Q5_K)

    Q2_K, Q4_K, Q5_K  w = (d*sc)*q - (dmin*m)         Q3_K  w = (d*(sc-32))*(q-4)
    Q6_K              w = (d*sc)*(q-32)               Q8_K  w = d*q

Positions of the codes: Q2_K and Q3_K store weight 128*h + 32*p + i in bit pair p of byte 32*h + i, Q3_K's high bit in
bit 4*h + p of byte i. Q4_K and Q5_K store weight 64*h + 32*p + i in nibble p of byte 32*h + i, Q5_K's high bit in bit
2*h + p of byte i. Q6_K stores the low nibble of weight 128*h + 64*n + i (i < 64) in nibble n of byte 64*h + i, and its
high bits as Q2_K does.

The twelve bytes of sub-scales: Q3_K, sub-scale j: low nibble j/8 of byte j%8, bit pair j/4 of byte 8 + j%4. Q4_K and
Q5_K: scales 0..3 and minima 0..3 in the low 6 bits of bytes 0..7; entries 4..7 in the nibbles of bytes 8..11 (scale
low, min high) with their high bit pairs at the top of bytes 0..3 (scales) and 4..7 (minima).

Multiplication order is ggml's, sub-scale first: any other order differs by one ulp. Source: ggml-quants.c,
ggml-common.h of llama.cpp 0c1e570.

Differences between encoders: super-scales may be negative; in ggml d of Q3_K, Q6_K and Q8_K, here also d and dmin of
Q2_K, Q4_K and Q5_K blocks entirely above zero. ggml weights the error by importance * sqrt(sigma^2 + w^2), and without
importance by |w|, w^2 or similar; quantizers/k_search.py minimises the squared error, times importance if given.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.blocks import BlockCodec
from polyquant.registry import Search
from polyquant.types import F32, I8, U8

_PAIRS = np.array([0, 2, 4, 6], np.uint8)[:, None]
_NIBBLES = np.array([0, 4], np.uint8)[:, None]
_BITS = np.arange(8, dtype=np.uint8)[:, None]


def _half(x: U8) -> F32:
    """fp16 fields uint8 [n, 2] -> float32 [n, 1]."""
    return x.copy().view(np.float16).astype(np.float32)


def _affine(scale: F32, q: NDArray[Any], minimum: F32) -> F32:
    """scale, minimum [n, S], codes of S sub-blocks -> weights [n, 256].

    Infinities in random bytes give NaN, as in C.
    """
    n, s = scale.shape
    with np.errstate(invalid="ignore", over="ignore"):
        return (scale[:, :, None] * q.reshape(n, s, -1).astype(np.float32) - minimum[:, :, None]).reshape(n, 256)


def _symmetric(scale: F32, q: NDArray[np.int8]) -> F32:
    """scale [n, 16], signed codes [n, 256] -> weights [n, 256]."""
    with np.errstate(invalid="ignore", over="ignore"):
        return (scale[:, :, None] * q.reshape(len(q), 16, 16).astype(np.float32)).reshape(len(q), 256)


def _times(d: F32, sub: NDArray[np.generic]) -> F32:
    """Super-scale [n, 1] times integer sub-scales [n, S], rounded to float32 as ggml does."""
    with np.errstate(invalid="ignore", over="ignore"):
        return d * sub.astype(np.float32)


def _split(b: U8, width: int, shifts: U8, mask: int) -> U8:
    """Unpack bit fields [n, m] -> [n, m * fields]. Field f of each `width` bytes comes before field f + 1."""
    return (b.reshape(len(b), -1, 1, width) >> shifts & np.uint8(mask)).reshape(len(b), -1)


def unpack_scale_min(b: U8) -> tuple[U8, U8]:
    """Twelve bytes [n, 12] -> 6-bit scales [n, 8] and minima [n, 8]."""
    a, m, x = b[:, :4], b[:, 4:8], b[:, 8:]
    return np.hstack([a & 63, x & 15 | a >> 6 << 4]), np.hstack([m & 63, x >> 4 | m >> 6 << 4])


def decode_q2_k(b: U8) -> F32:
    """[n, 84] -> [n, 256]"""
    scale, minimum = _times(_half(b[:, 80:82]), b[:, :16] & 15), _times(_half(b[:, 82:84]), b[:, :16] >> 4)
    return _affine(scale, _split(b[:, 16:80], 32, _PAIRS, 3), minimum)


def decode_q3_k(b: U8) -> F32:
    """[n, 110] -> [n, 256]"""
    low = _split(b[:, 96:104], 8, _NIBBLES, 15)  # [n, 16]
    sub = (low | _split(b[:, 104:108], 4, _PAIRS, 3) << 4).astype(np.int8) - np.int8(32)
    q = _split(b[:, 32:96], 32, _PAIRS, 3) | _split(b[:, :32], 32, _BITS, 1) << 2
    return _symmetric(_times(_half(b[:, 108:110]), sub), q.astype(np.int8) - np.int8(4))


def decode_q4_k(b: U8) -> F32:
    """[n, 144] -> [n, 256]"""
    sub, minimum = unpack_scale_min(b[:, 4:16])
    q = _split(b[:, 16:], 32, _NIBBLES, 15)
    return _affine(_times(_half(b[:, :2]), sub), q, _times(_half(b[:, 2:4]), minimum))


def decode_q5_k(b: U8) -> F32:
    """[n, 176] -> [n, 256]"""
    sub, minimum = unpack_scale_min(b[:, 4:16])
    q = _split(b[:, 48:], 32, _NIBBLES, 15) | _split(b[:, 16:48], 32, _BITS, 1) << 4
    return _affine(_times(_half(b[:, :2]), sub), q, _times(_half(b[:, 2:4]), minimum))


def decode_q6_k(b: U8) -> F32:
    """[n, 210] -> [n, 256]"""
    q = _split(b[:, :128], 64, _NIBBLES, 15) | _split(b[:, 128:192], 32, _PAIRS, 3) << 4
    return _symmetric(_times(_half(b[:, 208:]), b[:, 192:208].view(np.int8)), q.astype(np.int8) - np.int8(32))


def decode_q8_k(b: U8) -> F32:
    """[n, 292] -> [n, 256]; the sums are only for dot products."""
    return _times(b[:, :4].copy().view(np.float32), b[:, 4:260].view(np.int8))


def _fp16(d: F32) -> U8:
    """float32 [n, 1] -> fp16 field uint8 [n, 2]."""
    return d.astype(np.float16).view(np.uint8)


def _join(q: NDArray[Any], width: int, shifts: U8) -> U8:
    """Inverse of _split: small integers [n, m * fields] -> bytes [n, m]."""
    fields = q.reshape(len(q), -1, len(shifts), width) << shifts
    joined: U8 = np.bitwise_or.reduce(fields, axis=2).reshape(len(q), -1)
    return joined


def pack_scale_min(sub: U8, minimum: U8) -> U8:
    """6-bit scales [n, 8] and minima [n, 8] -> twelve bytes [n, 12]."""
    (a, b), (m, n) = np.hsplit(sub, 2), np.hsplit(minimum, 2)
    return np.hstack([a | b >> 4 << 6, m | n >> 4 << 6, b & 15 | (n & 15) << 4])


def pack_q2_k(d: F32, dmin: F32, sub: U8, minimum: U8, q: U8) -> U8:
    """Super-scales [n, 1], integers [n, 16], codes [n, 256] -> [n, 84]"""
    return np.hstack([sub | minimum << 4, _join(q, 32, _PAIRS), _fp16(d), _fp16(dmin)])


def pack_q3_k(d: F32, signed: I8, q: U8) -> U8:
    """Super-scale [n, 1], sub-scales [n, 16], codes + 4 [n, 256] -> [n, 110]"""
    sub = (signed + np.int8(32)).view(np.uint8)
    packed = [_join(sub & 15, 8, _NIBBLES), _join(sub >> 4, 4, _PAIRS)]
    return np.hstack([_join(q >> 2, 32, _BITS), _join(q & 3, 32, _PAIRS), *packed, _fp16(d)])


def pack_q4_k(d: F32, dmin: F32, sub: U8, minimum: U8, q: U8) -> U8:
    """Super-scales [n, 1], integers [n, 8], codes [n, 256] -> [n, 144]"""
    return np.hstack([_fp16(d), _fp16(dmin), pack_scale_min(sub, minimum), _join(q, 32, _NIBBLES)])


def pack_q5_k(d: F32, dmin: F32, sub: U8, minimum: U8, q: U8) -> U8:
    """Super-scales [n, 1], integers [n, 8], codes [n, 256] -> [n, 176]"""
    codes = [_join(q >> 4, 32, _BITS), _join(q & 15, 32, _NIBBLES)]
    return np.hstack([_fp16(d), _fp16(dmin), pack_scale_min(sub, minimum), *codes])


def pack_q6_k(d: F32, sub: I8, q: U8) -> U8:
    """Super-scale [n, 1], sub-scales [n, 16], codes + 32 [n, 256] -> [n, 210]"""
    return np.hstack([_join(q & 15, 64, _NIBBLES), _join(q >> 4, 32, _PAIRS), sub.view(np.uint8), _fp16(d)])


def encode_q8_k(w: F32, importance: F32 | None) -> U8:
    """[n, 256] -> [n, 292]; bytes equal to ggml's. No search: the largest magnitude maps to -127."""
    with np.errstate(all="ignore"):
        magnitude = np.where(np.isnan(w), np.float32(0), np.abs(w))
        peak = np.take_along_axis(w, magnitude.argmax(axis=1)[:, None], axis=1)  # [n, 1]
        factor = np.where(magnitude.max(axis=1, keepdims=True) > 0, np.float32(-127) / peak, np.float32(0))
        d = np.where(factor != 0, np.float32(1) / factor, np.float32(0))
        v = w * factor
        q = np.rint(np.where(v > -128, np.minimum(v, np.float32(127)), np.float32(-128))).astype(np.int8)
    sums = q.reshape(len(q), 16, 16).sum(axis=2, dtype=np.int16)
    return np.hstack([d.view(np.uint8), q.view(np.uint8), sums.view(np.uint8)])


def _search(name: str) -> Search:
    return Search(f"polyquant.quantizers.k_search:{name}")


Q2_K = BlockCodec("q2_k", 10, 256, 84, decode_q2_k, _search("q2_k"), fields=((80, 2, 2),))
Q3_K = BlockCodec("q3_k", 11, 256, 110, decode_q3_k, _search("q3_k"), fields=((108, 2, 1),))
Q4_K = BlockCodec("q4_k", 12, 256, 144, decode_q4_k, _search("q4_k"), fields=((0, 2, 2),))
Q5_K = BlockCodec("q5_k", 13, 256, 176, decode_q5_k, _search("q5_k"), fields=((0, 2, 2),))
Q6_K = BlockCodec("q6_k", 14, 256, 210, decode_q6_k, _search("q6_k"), fields=((208, 2, 1),))
Q8_K = BlockCodec("q8_k", 15, 256, 292, decode_q8_k, encode_q8_k, fields=((0, 4, 1), (260, 2, 16)))
