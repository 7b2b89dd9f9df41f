"""Floats of 4 and 8 bits: values, rounding, sums of errors, orders. The native counterpart is
native/codecs/float_streams.cpp.

    e2m1   sign, 2 exponent bits, 1 mantissa bit    0 0.5 1 1.5 2 3 4 6
    e4m3   sign, 4, 3                               up to 448; 0x7F and 0xFF are NaN, no infinity
    e5m2   sign, 5, 2                               up to 57344; then infinity and NaN
    e8m0   no sign, 8 exponent bits                 2^(byte - 127); 255 is NaN

Rounding is to nearest, ties to even, and saturates. The sign of zero is kept. All arithmetic is float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from polyquant.ops import native
from polyquant.types import F32, U8

__all__ = [
    "ELEMENTS", "Element", "amax", "decode", "encode", "errors", "join_blocks", "nibbles", "pairs", "split_blocks",
    "values",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Element:
    """A small float. bits: of a code. mantissa, bias: of its fields. top: the largest code of a finite value."""

    name: str
    bits: int
    mantissa: int
    bias: int
    top: int

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return float(values(self.name)[self.top])


ELEMENTS = {
    "e2m1": Element("e2m1", 4, 1, 1, 0x7), "e4m3": Element("e4m3", 8, 3, 7, 0x7E),
    "e5m2": Element("e5m2", 8, 2, 15, 0x7B),
}  # fmt: skip
_LANES = 16
"""Partial sums of an error: both engines add in this order."""


def _tables() -> dict[str, F32]:
    codes = np.arange(256, dtype=np.uint8)
    half = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    with np.errstate(all="ignore"):
        tables = {
            "e2m1": np.tile(np.concatenate([half, -half]), 16),
            "e4m3": codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32),
            "e5m2": codes.view(ml_dtypes.float8_e5m2).astype(np.float32),
            "e8m0": codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32),
        }
    for table in tables.values():
        table.flags.writeable = False
    return tables


_VALUES = _tables()


def values(kind: str) -> F32:
    """The value of each byte of an element or a scale, float32 [256]; e2m1 by the lower four bits."""
    return _VALUES[kind]


def decode(codes: U8, kind: str, scale: F32, block: tuple[int, int], out: F32, start: int = 0) -> F32:
    """Write value(code) * scale into out [rows, K]; scale [R, C] per block (rows, columns).

    start: the first of these rows in the table of blocks.
    """
    rows, k = codes.shape
    high, wide = block
    if (lib := native.lib()) is not None and hasattr(lib, "decode_small"):
        lib.decode_small(codes, _VALUES[kind], np.ascontiguousarray(scale), out.reshape(rows, k), high, wide, start)
        return out
    flat = out.reshape(rows, k)
    with np.errstate(all="ignore"):
        np.multiply(_VALUES[kind][codes], spread(scale, block, start, rows, k), out=flat)
    return out


def spread(scale: F32, block: tuple[int, int], start: int, rows: int, k: int) -> F32:
    """A table of block scales [R, C] as one per weight, or broadcastable, of rows [start, start + rows) of K."""
    high, wide = block
    table = scale if high == 0 else scale[np.arange(start, start + rows) // high]
    return table if wide == 0 else np.repeat(table, wide, 1)[:, :k]


def amax(w: F32, group: int) -> F32:
    """Largest magnitude of each group of columns, float32 [rows, ceil(K / group)]."""
    rows, k = w.shape
    groups = -(-k // group)
    out = np.zeros((rows, groups), np.float32)
    if (lib := native.lib()) is not None and hasattr(lib, "amax_groups"):
        lib.amax_groups(np.ascontiguousarray(w), out, group)
        return out
    if k == 0:
        return out
    return np.maximum.reduceat(np.abs(w), np.arange(0, k, group), axis=1).astype(np.float32, copy=False)


def encode(w: F32, kind: str, scale: F32, group: int) -> U8:
    """Codes of the floats nearest to w / scale, uint8 [rows, K]; scale [rows, G] per group of columns, 0 gives 0."""
    rows, k = w.shape
    codes = np.empty((rows, k), np.uint8)
    element = ELEMENTS[kind]
    if (lib := native.lib()) is not None and hasattr(lib, "encode_small"):
        lib.encode_small(np.ascontiguousarray(w), np.ascontiguousarray(scale), codes, group, kind)
        return codes
    codes[:] = _rounded(_quotient(w, _columns(scale, group, k)), element)[0]
    return codes


def errors(w: F32, kind: str, scale: F32, group: int, weights: F32 | None = None) -> F32:
    """Sums of the squared errors of each group for each candidate: scale [rows, G, C] -> float32 [rows, G, C].

    weights: of the columns, [K].
    """
    rows, k = w.shape
    groups, count = scale.shape[1:]
    out = np.zeros(scale.shape, np.float32)
    element = ELEMENTS[kind]
    weights = np.ones(k, np.float32) if weights is None else weights
    if (lib := native.lib()) is not None and hasattr(lib, "errors_small"):
        lib.errors_small(np.ascontiguousarray(w), np.ascontiguousarray(scale), weights, out, group, kind)
        return out
    lines = -(-group // _LANES)
    for c in range(count):
        wide = _columns(scale[:, :, c], group, k)
        error = np.abs(_rounded(_quotient(w, wide), element)[1]) * wide - np.abs(w)
        padded = np.zeros((rows, groups * group), np.float32)
        padded[:, :k] = error * error * weights
        cells = np.zeros((rows, groups, lines * _LANES), np.float32)
        cells[:, :, :group] = padded.reshape(rows, groups, group)
        lanes = np.zeros((rows, groups, _LANES), np.float32)
        for line in range(lines):
            lanes += cells[:, :, line * _LANES : (line + 1) * _LANES]
        while lanes.shape[2] > 1:
            half = lanes.shape[2] // 2
            lanes = lanes[:, :, :half] + lanes[:, :, half:]
        out[:, :, c] = lanes[:, :, 0]
    return out


def _columns(scale: F32, group: int, k: int) -> F32:
    return np.repeat(scale, group, 1)[:, :k]


def _quotient(w: F32, scale: F32) -> F32:
    with np.errstate(all="ignore"):
        out: F32 = np.where(scale > 0, w / scale, np.float32(0) * w).astype(np.float32)
    return out


def _rounded(x: F32, element: Element) -> tuple[U8, F32]:
    """Codes and values of the floats nearest to x."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    drop = np.uint32(23 - element.mantissa)
    up = magnitude + (np.uint32((1 << int(drop)) // 2 - 1) + (magnitude >> drop & np.uint32(1)))
    normal = (up >> drop).astype(np.int64) - ((127 - element.bias) << element.mantissa)
    steps = np.float32(2.0 ** (element.bias - 1 + element.mantissa))
    small_limit = np.float32(2.0 ** (1 - element.bias)).view(np.uint32)
    with np.errstate(all="ignore"):
        small = np.rint(np.minimum(np.abs(x) * steps, 2.0**element.mantissa)).astype(np.int64)
    code = np.where(magnitude < small_limit, small, np.minimum(normal, element.top)).astype(np.uint8)
    value = _VALUES[element.name][code]
    sign = (bits >> np.uint32(31)).astype(np.uint8)
    return code | sign << np.uint8(element.bits - 1), np.where(sign, -value, value).astype(np.float32)


def nibbles(stream: U8) -> U8:
    """Bytes [..., n] -> their halves, the lower one first, uint8 [..., 2 n]."""
    out = np.empty((*stream.shape[:-1], 2 * stream.shape[-1]), np.uint8)
    np.bitwise_and(stream, 15, out=out[..., 0::2])
    np.right_shift(stream, 4, out=out[..., 1::2])
    return out


def pairs(codes: U8) -> U8:
    """The inverse of `nibbles`."""
    return np.asarray(codes[..., 0::2] | codes[..., 1::2] << 4, np.uint8)


def join_blocks(stream: U8, scales: U8, size: int, together: int) -> U8:
    """Rows of pairs [rows, K / 2] and scales [rows, K / size] as ggml's blocks: the scales of `together` groups, then
    each group with columns j and j + size / 2 in byte j. uint8 [rows, K / 2 + K / size].
    """
    rows, groups = scales.shape
    if (lib := native.lib()) is not None and hasattr(lib, "join_fp4"):
        out = np.empty((rows, stream.shape[1] + groups), np.uint8)
        lib.join_fp4(np.ascontiguousarray(stream), np.ascontiguousarray(scales), out, size, together)
        return out
    cells = nibbles(stream).reshape(rows, groups, size)
    halves = (cells[:, :, : size // 2] | cells[:, :, size // 2 :] << 4).reshape(
        rows, groups // together, together * size // 2
    )
    blocks = np.concatenate([scales.reshape(rows, groups // together, together), halves], 2)
    return np.asarray(blocks.reshape(rows, stream.shape[1] + groups), np.uint8)


def split_blocks(blocks: U8, size: int, together: int) -> tuple[U8, U8]:
    """The inverse of `join_blocks`: pairs and scales."""
    rows, width = blocks.shape
    groups = width // (size // 2 + 1)
    if (lib := native.lib()) is not None and hasattr(lib, "split_fp4"):
        stream, scales = np.empty((rows, width - groups), np.uint8), np.empty((rows, groups), np.uint8)
        lib.split_fp4(np.ascontiguousarray(blocks), stream, scales, size, together)
        return stream, scales
    cells = blocks.reshape(rows, groups // together, together * (size // 2 + 1))
    halves = np.ascontiguousarray(cells[:, :, together:]).reshape(rows, groups, size // 2)
    codes = np.concatenate([halves & 15, halves >> 4], 2).reshape(rows, groups * size)
    return pairs(codes), np.ascontiguousarray(cells[:, :, :together]).reshape(rows, groups)
