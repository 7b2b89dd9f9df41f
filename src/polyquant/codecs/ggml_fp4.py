"""4-bit floats (E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) under small scales.

    MXFP4  17 bytes  4.25 bpw  [e u8][qs 16]       blocks of 32: w = E2M1[q] * 2^(e - 127)
    NVFP4  36 bytes  4.5 bpw   [d u8 x 4][qs 32]   blocks of 64, one UE4M3 scale per 16: w = E2M1[q] * UE4M3[d]

Low nibble of qs[j] = weight j, high nibble = weight j + 16 (NVFP4: within each 16, bytes 8s .. 8s+7, j and j + 8); bit
3 is the sign. A code of -0 decodes to +0. Scales are kept at half their value and codes at twice, so that all codes are
integers.

Quantizing: e = floor(log2(amax)) - 2 + 127, d = amax / 6 rounded half up to UE4M3; each weight takes the nearest value,
ties toward zero. log2 is rounded to float32 first, so an amax a few ulp below a power of two counts as that power.
Source: ggml-quants.c and ggml-impl.h of llama.cpp 0c1e570. Disagreements: in the OCP MX specification e = 255 is NaN,
in ggml 2^128; in E4M3 0x7f is NaN, in ggml 0, and its sign bit is ignored. ggml's C code wraps e for amax below 2^-125
and, where a weight exceeds its largest NVFP4 scale, picks codes from rounded ties; here such e is 0 and such weights
take the largest code. Neither type has a search.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.blocks import BlockCodec
from polyquant.types import F32, U8

__all__ = ["MXFP4", "NVFP4"]

_TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
_MIDPOINTS = np.array([0.5, 1.5, 2.5, 3.5, 5, 7, 10], np.float32)


def _half_e8m0(e: U8) -> F32:
    """Return half of 2^(e - 127); subnormal for e < 2."""
    wide = e.astype(np.uint32)
    bits = np.where(wide < 2, np.uint32(0x00200000) << (wide & 1), (wide - np.uint32(1)) << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32)


def _ue4m3_table() -> F32:
    """Return half the value of each UE4M3 byte, float32 [256]."""
    x = np.arange(256)
    exponent, mantissa = x >> 3 & 15, x & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.where((x == 0) | (x == 0x7F), 0, value / 2).astype(np.float32)


_HALF_UE4M3 = _ue4m3_table()


def _ue4m3_for(x: F32) -> U8:
    """float32 -> UE4M3 byte, rounding half up; 0x7e from 248 on; 0 for NaN."""
    x = np.fmin(np.fmax(x, np.float32(0)), np.float32(448))
    small = np.minimum((x * np.float32(512) + np.float32(0.5)).astype(np.int64), 7)  # counts of 2^-9
    rounded = (x.view(np.uint32).astype(np.int64) - (120 << 23) + (1 << 19)) >> 20
    normal = np.where(rounded < 0x78, rounded, 0x7E)
    return np.where(x < np.float32(2.0**-6), small, normal).astype(np.uint8)


def _nearest(w: F32, d: F32) -> NDArray[np.uint8]:
    """Return the nearest codes of w [..., m] at scale d [..., 1]; code 0 where d = 0. Midpoints times d are exact."""
    magnitude = np.abs(w)
    m = sum((magnitude > mid * d).astype(np.uint8) for mid in _MIDPOINTS)
    return np.where((d > 0) & (m > 0), m | np.signbit(w) << 3, 0).astype(np.uint8)


def decode_mxfp4(b: U8) -> F32:
    """[n, 17] -> [n, 32]"""
    codes = np.concatenate([b[:, 1:] & 15, b[:, 1:] >> 4], axis=1)
    return np.asarray(_TWICE[codes] * _half_e8m0(b[:, :1]), np.float32)


def encode_mxfp4(w: F32, importance: F32 | None) -> U8:
    """[n, 32] -> [n, 17]"""
    amax = np.abs(w).max(axis=1, keepdims=True)
    usable = (amax > 0) & np.isfinite(amax)
    power = np.floor(np.log2(np.where(usable, amax, 1), dtype=np.float64).astype(np.float32))
    e = np.where(usable, np.clip(power + 125, 0, 252), 0).astype(np.uint8)
    q = _nearest(w, _half_e8m0(e))
    return np.concatenate([e, q[:, :16] | q[:, 16:] << 4], axis=1)


def decode_nvfp4(b: U8) -> F32:
    """[n, 36] -> [n, 64]"""
    qs = b[:, 4:].reshape(-1, 4, 8)
    codes = np.concatenate([qs & 15, qs >> 4], axis=2)  # [n, 4, 16]
    w: F32 = _TWICE[codes] * _HALF_UE4M3[b[:, :4, None]]
    return w.reshape(-1, 64)


def encode_nvfp4(w: F32, importance: F32 | None) -> U8:
    """[n, 64] -> [n, 36]"""
    groups = w.reshape(-1, 4, 16)
    d = _ue4m3_for(np.abs(groups).max(axis=2) / np.float32(6))  # [n, 4]
    q = _nearest(groups, _HALF_UE4M3[d][:, :, None])
    return np.concatenate([d, (q[:, :, :8] | q[:, :, 8:] << 4).reshape(-1, 32)], axis=1)


MXFP4 = BlockCodec("mxfp4", 39, 32, 17, decode_mxfp4, encode_mxfp4)
NVFP4 = BlockCodec("nvfp4", 40, 64, 36, decode_nvfp4, encode_nvfp4)
