"""Shared code of the ternary codecs: exact ternarization, a single scale, and layouts of four 2-bit symbols per byte.

    byte p of a block of `width` bytes      bits 7-6   5-4         3-2          1-0
    high_first                              w[p]       w[width+p]  w[2width+p]  w[3width+p]      I2_S
    not high_first                          w[3width+p] ...                     w[p]             HF, Trinity

Symbols 0, 1, 2 are -1, 0, +1 (bitnet.cpp, HF) or 0, +1, -1 (Trinity: `zero_first`). Symbol 3 is never written; sources
disagree on it (ik_llama.cpp reads +2, bitnet.cpp 0): it decodes to 0 here and `validate` counts it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.arguments import non_finite, real
from polyquant.errors import CodecError
from polyquant.ops import matmul, native
from polyquant.types import F32, I8, U8, Ternary, as_matrix

__all__ = [
    "Lanes",
    "check_codes",
    "count_bytes",
    "count_symbols",
    "likely_zero_symbol",
    "one_scale",
    "refuse_several",
    "repacked",
    "scaled",
    "ternarize",
    "used_scales",
]

_CHUNK = 1 << 22  # bytes or weights per step of a numpy reference; bounds its temporaries
_FLOOR = np.float32(1e-6)  # bitnet.cpp writes 0 below 1e-6 (compared in double; this float32 is below it)


class Lanes(NamedTuple):
    """A layout of four 2-bit symbols per byte (see the module docstring). width: bytes per block."""

    width: int
    high_first: bool = True
    zero_first: bool = False

    def shift(self, lane: int) -> int:
        """Left shift of lane 0..3 in its byte."""
        return 6 - 2 * lane if self.high_first else 2 * lane

    def unpack(self, payload: U8) -> I8:
        """uint8 [n / 4] -> codes int8 [n]."""
        payload = np.ascontiguousarray(payload)
        codes = np.empty(4 * payload.size, np.int8)
        lib = native.lib()
        if lib is not None:
            lib.unpack_lanes(payload, codes, *self)
            return codes
        code_of = np.array([0, 1, -1, 0] if self.zero_first else [-1, 0, 1, 0], np.int8)
        blocks, out = payload.reshape(-1, self.width), codes.reshape(-1, 4, self.width)
        for lane in range(4):
            out[:, lane] = code_of[(blocks >> self.shift(lane)) & 3]
        return codes

    def pack(self, codes: I8, payload: U8) -> None:
        """codes int8 [n] -> payload uint8 [n / 4], C-contiguous. Raises CodecError on a code outside -1..1."""
        codes = np.ascontiguousarray(codes, np.int8).reshape(-1)
        lib = native.lib()
        if lib is not None:
            good = bool(lib.pack_lanes(codes, payload, *self))
        else:
            good = bool(((codes >= -1) & (codes <= 1)).all())
            blocks, out = codes.reshape(-1, 4, self.width), payload.reshape(-1, self.width)
            out[:] = 0
            for lane in range(4):
                symbol = blocks[:, lane] % 3 if self.zero_first else blocks[:, lane] + 1
                out |= symbol.astype(np.uint8) << self.shift(lane)
        if not good:
            check_codes(codes)

    def dequantize(self, payload: U8, scale: float, out: F32) -> None:
        """uint8 [n / 4] -> out float32 [n] = codes * scale."""
        lib = native.lib()
        if lib is not None:
            lib.dequantize_lanes(np.ascontiguousarray(payload), out, scale, *self)
        else:
            scaled(self.unpack(payload), np.array([scale], np.float32), out)


def check_codes(codes: I8) -> None:
    """Raises CodecError on a code outside -1..1."""
    if codes.size and not -1 <= codes.min() <= codes.max() <= 1:
        raise CodecError("ternary codes must be -1, 0 or +1", found=f"{codes.min()} to {codes.max()}")


def scaled(codes: I8, scale: F32, out: F32) -> F32:
    """Write codes * scale to out; infinite or NaN scales raise no warning."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.multiply(codes, scale, out=out, dtype=np.float32)


def ternarize(name: str, w: F32, lossy: bool) -> Ternary:
    """Return the codes and the scale max|w| of a weight whose values are -s, 0 and +s.

    lossy: accept any weight as bitnet.cpp does: keep the sign, and set magnitudes below 1e-6 to 0.
    Raises CodecError on NaN and infinity, and on a weight that is not ternary unless lossy.
    """
    w = real(name, w)
    rows, k = as_matrix(w.shape)
    flat = np.ascontiguousarray(w, np.float32).reshape(-1)
    codes = np.empty(flat.size, np.int8)
    floor = _FLOOR if lossy else np.float32(0)
    lib = native.lib()
    if lib is not None:
        good, bits = lib.ternarize_tensor(flat, codes, not lossy, float(floor))
        top = np.array([bits], np.uint32).view(np.float32)[0]
    else:
        top = max((np.abs(part).max() for part in _chunks(flat)), default=np.float32(0))
        good = bool(np.isfinite(top))
        for part, out in zip(_chunks(flat), _chunks(codes), strict=True):
            size = np.abs(part)
            out[:] = np.where(size > floor, np.where(np.signbit(part), -1, 1), 0)
            good = good and (lossy or bool(((size == 0) | (size == top)).all()))
    if not np.isfinite(top):
        raise non_finite(name, w)
    if not good:
        raise CodecError(
            f"{name} needs ternary weights: every value -s, 0 or +s",
            found=f"other magnitudes than max|w| = {top:.6g}",
            hint="ternarize a BitNet model's master weights first, or accept the loss in Python: "
            "polyquant.codec(name, lossy=True)",
        )
    return Ternary(codes.reshape(rows, k), np.array([top], np.float32))


def _chunks(flat: NDArray[np.generic]) -> list[NDArray[np.generic]]:
    return [flat[a : a + _CHUNK] for a in range(0, flat.size, _CHUNK)]


def one_scale(name: str, codes: Ternary) -> np.float32:
    """Return the tensor's single scale; group scales must be equal, except those of all-zero groups.

    Raises CodecError if the groups differ.
    """
    if codes.scale.size == 1:
        return np.float32(codes.scale.reshape(-1)[0])
    used = used_scales(codes)
    refuse_several(name, used)
    return np.float32(used[0] if used.size else 0)


def used_scales(codes: Ternary) -> F32:
    """Return the different scales of the groups that are not all zero, sorted."""
    rows, k = codes.codes.shape
    scale = np.asarray(codes.scale, np.float32).reshape(-1, codes.scale.shape[-1])
    if codes.codes.size == 0:
        return np.empty(0, np.float32)
    if scale.size > 1 and scale.min() == scale.max():
        scale = scale[:1, :1]
    groups = codes.codes.reshape(rows, scale.shape[1], k // scale.shape[1])
    used = np.broadcast_to(scale, groups.shape[:2])[groups.any(axis=2)] if scale.size > 1 else scale[codes.codes.any()]
    return np.unique(used, equal_nan=False)


def refuse_several(name: str, scales: F32) -> None:
    """Raise CodecError if a codec with one scale per tensor gets several."""
    if scales.size > 1:
        raise CodecError(
            f"{name} has one scale per tensor",
            found=f"scales from {scales.min():.6g} to {scales.max():.6g}",
            hint="requantize, or choose a type with block scales: tq2_0, tq1_0",
        )


def repacked(codes: Ternary) -> Any | None:
    """Return a matmul handle (ops/matmul.py) for any ternary weight with one scale, repacked to 2 bits per weight.

    A byte holds rows r, r + R/4, r + R/2, r + 3R/4 of a column. None if R is not a multiple of 4, K is not a multiple
    of 32, or there are several scales.
    """
    rows, k = codes.codes.shape
    if rows % 4 or k % 32 or codes.scale.size != 1:
        return None
    payload = np.empty(rows * k // 4, np.uint8)
    Lanes(max(1, rows * k // 4), high_first=False).pack(codes.codes, payload)
    return matmul.packed("hf_bitnet", payload, rows, k, scale=float(codes.scale.reshape(-1)[0]), lane_step=rows // 4)


def count_bytes(payload: U8) -> NDArray[np.int64]:
    """Return the counts of byte values, int64 [256]."""
    counts = np.zeros(256, np.int64)
    for part in _chunks(payload):
        counts += np.bincount(part, minlength=256)
    return counts


def count_symbols(payload: U8) -> NDArray[np.uint64]:
    """Return the counts of the four 2-bit symbols, uint64 [4]."""
    payload = np.ascontiguousarray(payload).reshape(-1)
    counts = np.zeros(4, np.uint64)
    lib = native.lib()
    if lib is not None:
        lib.count_symbols(payload, counts)
        return counts
    seen = count_bytes(payload).astype(np.uint64)
    for lane in range(4):
        np.add.at(counts, np.arange(256) >> 2 * lane & 3, seen)
    return counts


def likely_zero_symbol(histogram: NDArray[np.integer]) -> int | None:
    """Guess which of the symbols 0, 1, 2 means zero: 1 in bitnet.cpp's order, 0 in Trinity's, None if unclear.

    In a trained weight -1 and +1 are about equally frequent, so zero is the symbol with the outlying count. Its
    distance must be four times the difference of the other two, and above sampling noise.
    """
    counts = [int(c) for c in histogram[:3]]
    gaps = []
    for zero in range(3):
        a, b = (counts[i] for i in range(3) if i != zero)
        gaps.append((abs(a - b), abs(counts[zero] - (a + b) / 2), zero))
    between, apart, zero = min(gaps, key=lambda g: (g[0], -g[1]))
    clear = apart > 4 * between and apart > 4 * math.sqrt(sum(counts))
    return zero if clear else None
