"""ggml's codebook types: 256 weights a block, taken 8 or 4 at a time from a codebook (IQ4_NL: 32, one at a time).

    IQ2_XXS  66 bytes  2.0625 bpw  [d f16][8 x ([index u8 x 4][signs 4 x 7 bits, s 4 bits: u32])]
                                                                            w = d (s + 1/2) / 4 * +-grid
    IQ2_XS   74        2.3125      [d f16][index 9 bits, signs 7: u16 x 32][s 4 bits x 16]
                                                                            w = d (s + 1/2) / 4 * +-grid
    IQ2_S    82        2.5625      [d f16][index u8 x 32][signs u8 x 32][index high 2 bits x 32][s 4 bits x 16]
                                                                            w = d (s + 1/2) / 4 * +-grid
    IQ3_XXS  98        3.0625      [d f16][index u8 x 64][signs 4 x 7 bits, s 4 bits: u32 x 8]
                                                                            w = d (s + 1/2) / 2 * +-grid
    IQ3_S   110        3.4375      [d f16][index u8 x 64][index high bit x 64][signs u8 x 32][s 4 bits x 8]
                                                                            w = d (2s + 1) * +-grid
    IQ1_S    50        1.5625      [d f16][index u8 x 32][index high 3 bits x 4, s 3 bits, shift 1 bit: u16 x 8]
                                                                            w = d (2s + 1) (grid +- 1/8)
    IQ1_M    56        1.75        [index u8 x 32][index high 3 bits, shift 1 bit: 4 bits x 32]
                                   [s 3 bits x 4, d nibble: u16 x 4]        w = d (2s + 1) (grid +- 1/8)
    IQ4_NL   18        4.5         [d f16][code 4 bits x 32: weights j and j + 16 share a byte]
                                                                            w = d * LEVELS[code]
    IQ4_XS  136        4.25        [d f16][s high 2 bits x 8: u16][s low 4 bits x 8][8 x 16 bytes as IQ4_NL]
                                                                            w = d (s - 32) * LEVELS[code]
    (byte 0 at the left, bit 0 first)

The IQ1, IQ2 and IQ3 types are read-only. IQ4_NL and IQ4_XS are written with a search (quantizers/iq4_search.py).

A scale s covers 32 weights, or 16 in IQ2_XS, IQ2_S and IQ1_M. Grids and the 7-bit signs: iq_codebooks.py. A set shift
bit means -1/8. IQ1_M's d is the four nibbles of its scale words joined, lowest first. Products are rounded in ggml's
order: (d * scale) * value; a value +-grid or grid +- 1/8 is exact.

Source: ggml-common.h and ggml-quants.c of llama.cpp 0c1e570. Disagreement: ggml declares the sign words of IQ2_XXS as
u16 but reads them as u32, and IQ1_M's scale words as u8 but reads u16; big-endian files swap what the struct declares,
and so do `fields`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.blocks import BlockCodec
from polyquant.codecs.iq_codebooks import SIGNS, codebook
from polyquant.registry import Search
from polyquant.types import F32, I8, U8

Words: TypeAlias = NDArray[np.integer[Any]]

LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_HALF, _QUARTER, _EIGHTH = np.float32(0.5), np.float32(0.25), np.float32(0.125)


def _f16(x: NDArray[np.uint8] | NDArray[np.uint16]) -> F32:
    """fp16 field u8 [n, 2] or u16 [n, 1] -> float32 [n, 1].

    Signalling NaNs are made quiet to avoid a warning per product.
    """
    with np.errstate(invalid="ignore"):
        out = x.copy().view(np.float16).astype(np.float32)
    out[np.isnan(out)] = np.nan
    return out


def _fields(x: Words, bits: int, count: int) -> Words:
    """[n, m] words -> [n, m * count] fields of `bits` bits, lowest first."""
    shifts = (bits * np.arange(count)).astype(x.dtype)
    return ((x[:, :, None] >> shifts) & x.dtype.type((1 << bits) - 1)).reshape(len(x), -1)


def _words(x: U8, dtype: str) -> Words:
    """u8 [n, bytes] -> little-endian words [n, m]"""
    return np.ascontiguousarray(x).view(dtype)


def _signed(grid: I8, signs: Words) -> I8:
    """Magnitudes [n, m, width], sign bits [n, 32] of 8 weights each (1: negative) -> [n, 256]"""
    minus = np.unpackbits(signs.astype(np.uint8), axis=1, bitorder="little").astype(bool)  # [n, 256]
    flat = grid.reshape(minus.shape)
    return np.where(minus, -flat, flat)


def _scaled(scale: F32, values: I8 | F32) -> F32:
    """Scales [n, G], values [n, weights] -> [n, weights]"""
    out: F32 = (scale[:, :, None] * values.reshape(*scale.shape, -1)).reshape(values.shape)
    return out


def decode_iq2_xxs(b: U8) -> F32:
    """[n, 66] -> [n, 256]"""
    pairs = _words(b[:, 2:], "<u4").reshape(-1, 8, 2)  # [n, 8, (indices, signs and scale)]
    index, tail = np.ascontiguousarray(pairs[:, :, 0]).view(np.uint8), pairs[:, :, 1]
    scale = _f16(b[:, :2]) * (_HALF + (tail >> 28).astype(np.float32)) * _QUARTER  # [n, 8]
    return _scaled(scale, _signed(codebook("iq2_xxs")[index], SIGNS[_fields(tail, 7, 4)]))


def decode_iq2_xs(b: U8) -> F32:
    """[n, 74] -> [n, 256]"""
    q = _words(b[:, 2:66], "<u2")  # [n, 32]
    scale = _f16(b[:, :2]) * (_HALF + _fields(b[:, 66:], 4, 2).astype(np.float32)) * _QUARTER  # [n, 16]
    return _scaled(scale, _signed(codebook("iq2_xs")[q & 511], SIGNS[q >> 9]))


def decode_iq2_s(b: U8) -> F32:
    """[n, 82] -> [n, 256]"""
    index = b[:, 2:34] | _fields(b[:, 66:74], 2, 4).astype(np.uint16) << 8  # [n, 32]
    scale = _f16(b[:, :2]) * (_HALF + _fields(b[:, 74:], 4, 2).astype(np.float32)) * _QUARTER  # [n, 16]
    return _scaled(scale, _signed(codebook("iq2_s")[index], b[:, 34:66]))


def decode_iq3_xxs(b: U8) -> F32:
    """[n, 98] -> [n, 256]"""
    tail = _words(b[:, 66:], "<u4")  # [n, 8]
    scale = _f16(b[:, :2]) * (_HALF + (tail >> 28).astype(np.float32)) * _HALF  # [n, 8]
    return _scaled(scale, _signed(codebook("iq3_xxs")[b[:, 2:66]], SIGNS[_fields(tail, 7, 4)]))


def decode_iq3_s(b: U8) -> F32:
    """[n, 110] -> [n, 256]"""
    index = b[:, 2:66] | _fields(b[:, 66:74], 1, 8).astype(np.uint16) << 8  # [n, 64]
    scale = _f16(b[:, :2]) * (1 + 2 * _fields(b[:, 106:], 4, 2)).astype(np.float32)  # [n, 8]
    return _scaled(scale, _signed(codebook("iq3_s")[index], b[:, 74:106]))


def _shifted(index: Words, minus: NDArray[np.bool_]) -> F32:
    """Codebook indices [n, 32], shift bits [n, 32] -> grid +- 1/8 [n, 256]"""
    shift = np.where(minus, -_EIGHTH, _EIGHTH)  # [n, 32]
    values: F32 = codebook("iq1")[index].astype(np.float32) + shift[:, :, None]
    return values.reshape(len(index), -1)


def decode_iq1_s(b: U8) -> F32:
    """[n, 50] -> [n, 256]"""
    qh = _words(b[:, 34:], "<u2")  # [n, 8]
    index = b[:, 2:34] | _fields(qh, 3, 4) << 8  # [n, 32]
    scale = _f16(b[:, :2]) * (2 * (qh >> 12 & 7) + 1).astype(np.float32)  # [n, 8]
    return _scaled(scale, _shifted(index, np.repeat(qh >= 0x8000, 4, axis=1)))


def decode_iq1_m(b: U8) -> F32:
    """[n, 56] -> [n, 256]"""
    qh, words = _fields(b[:, 32:48], 4, 2), _words(b[:, 48:], "<u2")  # [n, 32], [n, 4]
    d = np.bitwise_or.reduce((words >> 12) << np.array([0, 4, 8, 12], np.uint16), axis=1, keepdims=True)
    scale = _f16(d) * (2 * _fields(words, 3, 4) + 1).astype(np.float32)  # [n, 16]
    index = b[:, :32] | (qh & 7).astype(np.uint16) << 8  # [n, 32]
    return _scaled(scale, _shifted(index, qh >= 8))


def decode_iq4_nl(b: U8) -> F32:
    """[n, 18] -> [n, 32]"""
    return _scaled(_f16(b[:, :2]), LEVELS[np.concatenate([b[:, 2:] & 15, b[:, 2:] >> 4], axis=1)])


def decode_iq4_xs(b: U8) -> F32:
    """[n, 136] -> [n, 256]"""
    s = _fields(b[:, 4:8], 4, 2) | _fields(_words(b[:, 2:4], "<u2"), 2, 8) << 4  # [n, 8]
    q = b[:, 8:].reshape(-1, 8, 16)
    codes = np.concatenate([q & 15, q >> 4], axis=2).reshape(len(b), -1)  # [n, 256]
    with np.errstate(invalid="ignore"):  # infinity * 0
        scale = _f16(b[:, :2]) * (s.astype(np.float32) - 32)  # [n, 8]
    return _scaled(scale, LEVELS[codes])


def _nibbles(codes: NDArray[np.intp]) -> U8:
    """[..., 32] -> [..., 16]"""
    return (codes[..., :16] | codes[..., 16:] << 4).astype(np.uint8)


def pack_iq4_nl(d: NDArray[np.float16], codes: NDArray[np.intp]) -> U8:
    """d [n, 1], codes [n, 32] -> [n, 18]"""
    return np.concatenate([d.view(np.uint8), _nibbles(codes)], axis=1)


def pack_iq4_xs(d: NDArray[np.float16], s: F32, codes: NDArray[np.intp]) -> U8:
    """d [n, 1], integer scales -32 to 31 [n, 8], codes [n, 8, 32] -> [n, 136]"""
    stored = (s + 32).astype(np.uint8)
    high = np.bitwise_or.reduce((stored >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16), axis=1)
    low = (stored[:, ::2] & 15) | (stored[:, 1::2] & 15) << 4
    block = [d.view(np.uint8), high[:, None].view(np.uint8), low, _nibbles(codes).reshape(len(s), 128)]
    return np.concatenate(block, axis=1)


def _search(name: str) -> Search:
    return Search(f"polyquant.quantizers.iq4_search:{name}")


IQ1_S = BlockCodec("iq1_s", 19, 256, 50, decode_iq1_s, fields=((0, 2, 1), (34, 2, 8)))
IQ1_M = BlockCodec("iq1_m", 29, 256, 56, decode_iq1_m)
IQ2_XXS = BlockCodec("iq2_xxs", 16, 256, 66, decode_iq2_xxs, fields=((0, 2, 33),))
IQ2_XS = BlockCodec("iq2_xs", 17, 256, 74, decode_iq2_xs, fields=((0, 2, 33),))
IQ2_S = BlockCodec("iq2_s", 22, 256, 82, decode_iq2_s, fields=((0, 2, 1),))
IQ3_XXS = BlockCodec("iq3_xxs", 18, 256, 98, decode_iq3_xxs, fields=((0, 2, 1),))
IQ3_S = BlockCodec("iq3_s", 21, 256, 110, decode_iq3_s, fields=((0, 2, 1),))
IQ4_NL = BlockCodec("iq4_nl", 20, 32, 18, decode_iq4_nl, _search("iq4_nl"), fields=((0, 2, 1),))
IQ4_XS = BlockCodec("iq4_xs", 23, 256, 136, decode_iq4_xs, _search("iq4_xs"), fields=((0, 2, 2),))
