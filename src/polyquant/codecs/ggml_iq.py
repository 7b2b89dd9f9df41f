"""ggml's codebook types: blocks of 256 weights whose values come 8 or 4 at a time from a codebook (IQ4_NL: 32, one at a time).

    IQ2_XXS  66 bytes  2.0625 bpw  [d f16][8 x ([index u8 x 4][signs 4 x 7 bits, s 4 bits: u32])]   w = d (s + 1/2) / 4 * +-grid
    IQ2_XS   74        2.3125      [d f16][index 9 bits, signs 7: u16 x 32][s 4 bits x 16]          w = d (s + 1/2) / 4 * +-grid
    IQ2_S    82        2.5625      [d f16][index u8 x 32][signs u8 x 32][index high 2 bits x 32][s 4 bits x 16]         the same
    IQ3_XXS  98        3.0625      [d f16][index u8 x 64][signs 4 x 7 bits, s 4 bits: u32 x 8]      w = d (s + 1/2) / 2 * +-grid
    IQ3_S   110        3.4375      [d f16][index u8 x 64][index high bit x 64][signs u8 x 32][s 4 bits x 8]  w = d (2s + 1) * +-grid
    IQ1_S    50        1.5625      [d f16][index u8 x 32][index high 3 bits x 4, s 3 bits, shift 1 bit: u16 x 8]
                                                                                                    w = d (2s + 1) (grid +- 1/8)
    IQ1_M    56        1.75        [index u8 x 32][index high 3 bits, shift 1 bit: 4 bits x 32][s 3 bits x 4, d nibble: u16 x 4]
                                                                                                    w = d (2s + 1) (grid +- 1/8)
    IQ4_NL   18        4.5         [d f16][code 4 bits x 32: weights j and j + 16 share a byte]     w = d * LEVELS[code]
    IQ4_XS  136        4.25        [d f16][s high 2 bits x 8: u16][s low 4 bits x 8][8 x 16 bytes as IQ4_NL]
                                                                                                    w = d (s - 32) * LEVELS[code]
    (byte 0 at the left, bit 0 first)

The IQ1, IQ2 and IQ3 types are read only. IQ4_NL and IQ4_XS are written with our own search for the least squared error, weighted by
importance: the scale of 32 weights starts where the largest magnitude meets one of a dozen places beside the outer levels, of both
signs; each start is followed by the least-squares scale of its codes, and the best of them once more. IQ4_XS then tries five ways to
share one d among 8 scales. ggml weights the squares by w^2 and tries one sign only: its plain error is 2 to 4 % larger.

A scale s serves 32 weights, in IQ2_XS, IQ2_S and IQ1_M 16. Grids and the signs of 7 bits: iq_codebooks.py. The shift bit set means
-1/8. IQ1_M's d is the four nibbles of its scale words put together, lowest first. Products are rounded in the order ggml takes:
(d * scale) * value; a value +-grid or grid +- 1/8 is exact.

Source: ggml-common.h and ggml-quants.c of llama.cpp 0c1e570. Disagreement: ggml declares the sign words of IQ2_XXS as u16 but reads
them as u32, and IQ1_M's scale words as u8 but reads u16; big-endian files swap what the struct declares, and so do `fields`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.blocks import BlockCodec
from polyquant.codecs.iq_codebooks import SIGNS, codebook
from polyquant.types import F32, I8, U8

Words: TypeAlias = NDArray[np.integer[Any]]

LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_BETWEEN = (LEVELS[1:].astype(np.float32) + LEVELS[:-1]) / 2  # [15] a value above the k-th takes a code above k
_STARTS = np.array([-142, -134, -126, -118, -110, -102, 92, 100, 108, 116, 124, 132], np.float32)
_SHARES = np.array([-32, -31, -30, -29, -28], np.float32)  # what the largest of 8 scales becomes
_HALF_MAX = np.float32(65504)
_HALF, _QUARTER, _EIGHTH = np.float32(0.5), np.float32(0.25), np.float32(0.125)


def _f16(x: NDArray[np.uint8] | NDArray[np.uint16]) -> F32:
    """fp16 field u8 [n, 2] or u16 [n, 1] -> float32 [n, 1]; signalling NaNs made quiet, or each product would warn."""
    with np.errstate(invalid="ignore"):
        out = x.copy().view(np.float16).astype(np.float32)
    out[np.isnan(out)] = np.nan
    return out


def _fields(x: Words, bits: int, count: int) -> Words:
    """[n, m] words -> [n, m * count] fields of that many bits, lowest first."""
    shifts = (bits * np.arange(count)).astype(x.dtype)
    return ((x[:, :, None] >> shifts) & x.dtype.type((1 << bits) - 1)).reshape(len(x), -1)


def _words(x: U8, dtype: str) -> Words:
    """u8 [n, bytes] -> little-endian words [n, m]"""
    return np.ascontiguousarray(x).view(dtype)


def _signed(grid: I8, signs: Words) -> I8:
    """Magnitudes [n, m, width], sign bits [n, 32] of 8 weights each (set: minus) -> [n, 256]"""
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


def _tree(x: NDArray[Any]) -> NDArray[Any]:
    """[..., 2^k] -> [..., 1]; halves added to halves, the order in which the native twin adds."""
    while (half := x.shape[-1] // 2) > 0:
        x = x[..., :half] + x[..., half:]
    return x


def _inverse(x: F32) -> F32:
    """1 / x, and 0 for 0."""
    return np.where(x != 0, np.float32(1) / np.where(x != 0, x, np.float32(1)), np.float32(0))


def _largest(x: F32) -> F32:
    """[n, m] -> [n, 1] the first of largest magnitude, with its sign"""
    out: F32 = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    return out


def _fit(y: F32, weight: F32, inverse: F32 | np.float32) -> tuple[F32, F32]:
    """The least-squares scale of the codes that `inverse` gives, and how much of the square sum it explains. [n, 32] -> [n, 1] each"""
    v = LEVELS.astype(np.float32)[np.searchsorted(_BETWEEN, y * inverse)]
    wv = weight * v
    a, b = _tree(wv * y), _tree(wv * v)
    scale = (a / np.where(b > 0, b, np.float32(1))).astype(np.float32)
    return scale, a * scale


def _best_scales(x: F32, weight: F32) -> F32:
    """[n, 32] -> [n, 1] float32, 0 for a block of zeros"""
    top = _largest(x)
    y = (x / np.where(top != 0, top, np.float32(1))).astype(np.float32)
    best, most = np.zeros_like(top), np.zeros_like(top)  # [n, 1]
    for start in _STARTS:
        scale, gain = _fit(y, weight, start)
        better = gain > most
        best, most = np.where(better, scale, best), np.where(better, gain, most)
    return _fit(y, weight, _inverse(best))[0] * top


def _to_half(d: F32) -> NDArray[np.float16]:
    """Rounded to what is stored; the largest half instead of infinity."""
    return np.clip(d, -_HALF_MAX, _HALF_MAX).astype(np.float16)


def _nibbles(codes: NDArray[np.intp]) -> U8:
    """[..., 32] -> [..., 16]"""
    return (codes[..., :16] | codes[..., 16:] << 4).astype(np.uint8)


@np.errstate(all="ignore")
def encode_iq4_nl(w: F32, importance: F32 | None) -> U8:
    """[n, 32] -> [n, 18]"""
    d = _to_half(_best_scales(w, np.ones_like(w) if importance is None else importance))
    codes = np.searchsorted(_BETWEEN, w * _inverse(d.astype(np.float32)))
    return np.concatenate([d.view(np.uint8), _nibbles(codes)], axis=1)


@np.errstate(all="ignore")
def encode_iq4_xs(w: F32, importance: F32 | None) -> U8:
    """[n, 256] -> [n, 136]"""
    x = w.reshape(-1, 8, 32)
    weight = np.ones_like(x) if importance is None else importance.reshape(x.shape)
    scales = _best_scales(x.reshape(-1, 32), weight.reshape(-1, 32)).reshape(-1, 8)
    best, least = np.empty((len(x), 136), np.uint8), np.full(len(x), np.inf)
    for share in _SHARES:
        d = _to_half(_largest(scales) / share)  # [n, 1]
        wide = d.astype(np.float32)
        s = np.fmax(np.fmin(np.rint(scales * _inverse(wide)), np.float32(31)), np.float32(-32))  # [n, 8]
        step = (wide * s)[:, :, None]
        codes = np.searchsorted(_BETWEEN, x * _inverse(step))  # [n, 8, 32]
        off = x.astype(np.float64) - step * LEVELS.astype(np.float32)[codes]
        error = _tree(_tree(weight * off * off)[:, :, 0])[:, 0]  # [n]
        stored = (s + 32).astype(np.uint8)
        high = np.bitwise_or.reduce((stored >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16), axis=1)
        low = (stored[:, ::2] & 15) | (stored[:, 1::2] & 15) << 4
        block = [d.view(np.uint8), high[:, None].view(np.uint8), low, _nibbles(codes).reshape(len(x), 128)]
        better = (error < least) | (share == _SHARES[0])
        best[better], least[better] = np.concatenate(block, axis=1)[better], error[better]
    return best


IQ1_S = BlockCodec("iq1_s", 19, 256, 50, decode_iq1_s, fields=((0, 2, 1), (34, 2, 8)))
IQ1_M = BlockCodec("iq1_m", 29, 256, 56, decode_iq1_m)
IQ2_XXS = BlockCodec("iq2_xxs", 16, 256, 66, decode_iq2_xxs, fields=((0, 2, 33),))
IQ2_XS = BlockCodec("iq2_xs", 17, 256, 74, decode_iq2_xs, fields=((0, 2, 33),))
IQ2_S = BlockCodec("iq2_s", 22, 256, 82, decode_iq2_s, fields=((0, 2, 1),))
IQ3_XXS = BlockCodec("iq3_xxs", 18, 256, 98, decode_iq3_xxs, fields=((0, 2, 1),))
IQ3_S = BlockCodec("iq3_s", 21, 256, 110, decode_iq3_s, fields=((0, 2, 1),))
IQ4_NL = BlockCodec("iq4_nl", 20, 32, 18, decode_iq4_nl, encode_iq4_nl, fields=((0, 2, 1),))
IQ4_XS = BlockCodec("iq4_xs", 23, 256, 136, decode_iq4_xs, encode_iq4_xs, fields=((0, 2, 2),))
