"""Products of weights whose scales are in separate tables: references and handles of native/grouped/codes.hpp.

A row is `pitch` bytes of codes; the tables have a number per row (or per `tall` rows) and group of columns.

    kind         codes of a row                                     weight
    2 ... 8      bit stream: code i is bits [b i, b i + b)          (code - zero) * scale, or code * scale + bias
    e2m1         byte j: columns 2 j (low nibble) and 2 j + 1       number * scale * factor
    e4m3, e5m2   a byte per column                                  number * scale * factor

The bits of such rows are used as they lie in files of compressed-tensors, MLX and others, without a second copy.
Activations are rounded as for other packed weights (ops/matmul.py); with e4m3 and e5m2 to bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from polyquant.ops import code_streams, native
from polyquant.ops.matmul import round_activations, round_to_bfloat16
from polyquant.types import F32, U8, Rounding, Shape

__all__ = ["FLOAT_KINDS", "Grouped", "Kind", "awq_rows", "dequantize", "handle", "multiply", "runs", "transposed_words"]

Kind: TypeAlias = Literal["2", "3", "4", "5", "6", "8", "e2m1", "e4m3", "e5m2"]
FLOAT_KINDS = ("e4m3", "e5m2")
"""Kinds that are multiplied as floats."""
_NUMBERS: dict[np.dtype[Any], str] = {
    np.dtype(np.float32): "f32",
    np.dtype(np.float16): "f16",
    np.dtype(ml_dtypes.bfloat16): "bf16",
    np.dtype(ml_dtypes.float8_e8m0fnu): "e8m0",
    np.dtype(np.uint8): "e8m0",
    np.dtype(ml_dtypes.float8_e4m3fn): "e4m3",
}
_BLOCK = {"e4m3": 1, "e5m2": 1}
"""Columns that a row is a multiple of; 8 for others."""
_LEAST_GROUP = 16
_TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Grouped:
    """A weight [N, K] with tables [T, G], T = ceil(N / tall), G = ceil(K / group).

    codes: uint8 [N, pitch]. scale: float32, float16, bfloat16, E4M3 or E8M0 (also as uint8). zero: uint8, or bias: of
    the type of the scales; without both, all zero points are `common`. group: columns per scale. tall: rows per scale.
    factor: of the whole weight.
    """

    codes: U8
    kind: Kind
    shape: Shape
    scale: NDArray[Any]
    group: int
    zero: U8 | None = None
    bias: NDArray[Any] | None = None
    common: int = 0
    tall: int = 1
    factor: float = 1.0


def runs(kind: Kind, shape: Shape, group: int) -> bool:
    """True if there are kernels for a weight [N, K] with a scale per `group` columns, if native kernels are built."""
    k = shape[-1]
    if len(shape) != 2 or 0 in shape or k % _BLOCK.get(kind, 8) or group <= 0:
        return False
    return kind in FLOAT_KINDS or group >= k or group % _LEAST_GROUP == 0


def handle(weight: Grouped) -> Any | None:
    """Return a handle for ops.matmul.Group, which keeps the arrays alive; None without a native kernel.

    Raises ValueError if an array does not fit the shape.
    """
    if not native.available() or not runs(weight.kind, weight.shape, weight.group):
        return None
    rows, cols = weight.shape
    return native.module().grouped(
        _bytes(weight.codes), weight.kind, rows, cols, weight.codes.shape[1], _bytes(weight.scale),
        _NUMBERS[weight.scale.dtype], weight.group, weight.tall, None if weight.zero is None else _bytes(weight.zero),
        None if weight.bias is None else _bytes(weight.bias.astype(weight.scale.dtype, copy=False)),
        float(weight.common), weight.factor,
    )  # fmt: skip


def _bytes(a: NDArray[Any]) -> U8:
    return np.ascontiguousarray(a).view(np.uint8).reshape(-1)


def multiply(x: F32, weight: Grouped, rounding: Rounding) -> F32:
    """Multiply x [T, K] -> float32 [T, N]: the reference of the kernels."""
    seen = (round_to_bfloat16 if weight.kind in FLOAT_KINDS else round_activations)(x, rounding)
    with np.errstate(all="ignore"):
        return np.asarray(seen @ dequantize(weight).T, np.float32)


def dequantize(weight: Grouped) -> F32:
    """Return the weight as float32 [N, K]; each operation is rounded once."""
    n, k = weight.shape
    codes = _numbers(weight)
    scale = _spread(_floats(weight.scale), weight)
    with np.errstate(all="ignore"):
        if weight.kind == "e2m1":  # codes are twice the numbers
            w = codes * _spread(_halved(weight.scale), weight)
        elif weight.bias is not None:
            w = codes * scale + _spread(_floats(weight.bias), weight)
        else:
            zero = np.float32(weight.common) if weight.zero is None else _spread(_floats_of(weight.zero), weight)
            w = (codes - zero) * scale
        return np.asarray(w * np.float32(weight.factor) if weight.factor != 1.0 else w, np.float32).reshape(n, k)


def _numbers(weight: Grouped) -> F32:
    """Return the codes as float32 [N, K]."""
    k = weight.shape[1]
    stream = np.ascontiguousarray(weight.codes)
    if weight.kind in FLOAT_KINDS:
        dtype = ml_dtypes.float8_e4m3fn if weight.kind == "e4m3" else ml_dtypes.float8_e5m2
        numbers: F32 = stream[:, :k].view(dtype).astype(np.float32)
        return numbers
    codes = code_streams.unpack(stream, 4 if weight.kind == "e2m1" else int(weight.kind), k)
    return _TWICE_E2M1[codes] if weight.kind == "e2m1" else codes.astype(np.float32)


def _floats_of(table: U8) -> F32:
    return table.astype(np.float32)


def _floats(table: NDArray[Any]) -> F32:
    if _NUMBERS[table.dtype] == "e8m0":
        return np.ldexp(np.float32(1), table.view(np.uint8).astype(np.int32) - 127).astype(np.float32)
    return table.astype(np.float32)


def _halved(table: NDArray[Any]) -> F32:
    if _NUMBERS[table.dtype] == "e8m0":
        return np.ldexp(np.float32(1), table.view(np.uint8).astype(np.int32) - 128).astype(np.float32)
    return _floats(table) * np.float32(0.5)


def _spread(table: F32, weight: Grouped) -> F32:
    """[T, G] -> [N, K]."""
    n, k = weight.shape
    rows = np.repeat(table.reshape(-(-n // weight.tall), -1), weight.tall, 0)[:n]
    return np.repeat(rows, min(weight.group, k), 1)[:, :k]


def transposed_words(words: NDArray[Any]) -> U8:
    """32-bit words [rows, cols] -> bytes of their transpose, uint8 [cols, 4 rows]: GPTQ's codes as rows."""
    stored = np.ascontiguousarray(words).view(np.uint32)
    lib = native.lib()
    if lib is None:
        return np.ascontiguousarray(stored.T).view(np.uint8)
    out = np.empty(stored.shape[::-1], np.uint32)
    lib.transpose_words(stored, out)
    return out.view(np.uint8)


def awq_rows(words: NDArray[Any]) -> U8:
    """AWQ's words [K, N / 8] (codecs/awq.py), K a multiple of 8 -> rows of nibbles, uint8 [N, K / 2]."""
    stored = np.ascontiguousarray(words).view(np.uint32)
    k, columns = stored.shape
    lib = native.lib()
    if lib is not None:
        out = np.empty((8 * columns, k // 8), np.uint32)
        lib.awq_rows(stored, out)
        return out.view(np.uint8)
    codes = np.empty((8 * columns, k), np.uint8)
    for i, place in enumerate(_AWQ_ORDER):
        codes[place::8] = (stored.T >> np.uint32(4 * i)) & np.uint32(15)
    return np.asarray(codes[:, ::2] | codes[:, 1::2] << np.uint8(4), np.uint8)
