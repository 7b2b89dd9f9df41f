"""Affine weights of Apple's MLX: codes of 2, 3, 4, 5, 6 or 8 bits with a scale and a float bias per group of a row.

    weight  u32 [N, K b / 32]     row n: codes as a b-bit stream, lowest bits first, across words for 3, 5 and 6 bits
    scales  [N, K / group]        f16, bf16 or f32; half of those that mlx computes are negative
    biases  [N, K / group]        in the dtype of the scales

    w = q * scale + bias                     q from 0 to 2^b - 1

The group is 32, 64 or 128 columns. A stack of experts [E, N, K] has parts of E N rows here; files hold them as [E, N,
...]. mlx computes in the dtype of the scales, with two roundings; `dequantize` computes in float32, with one.

The modes with small floats are in codecs/mlx_floats.py.

Bits per weight: b + 32 / group, with float32 scales b + 64 / group.
Names: mlx.4.g64 (bf16 scales)   .f16 .f32   mlx.mxfp4   mlx.nvfp4   mlx.mxfp8
Source: github.com/ml-explore/mlx, mlx/ops.cpp and mlx/backend/cpu/quantized.cpp (facts).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from polyquant.codecs.affine_codec import (
    AffineCodec,
    group_count,
    stored_codes,
    stored_table,
    unpacked_bits,
)
from polyquant.codecs.arguments import exact_part
from polyquant.codecs.keeping import FLOAT_TYPES, Integers
from polyquant.codecs.mlx_floats import MODES, MLXFloats
from polyquant.errors import CodecError, UnknownNameError
from polyquant.ops import code_streams, halves
from polyquant.types import F32, I8, U8, Affine, ArraySpec, Parts, Shape, as_matrix

__all__ = ["BITS", "GROUPS", "MLX", "NAMES", "mlx_named"]

BITS = (2, 3, 4, 5, 6, 8)
"""Widths of codes that mlx has kernels for."""
GROUPS = (32, 64, 128)
"""Columns per scale that mlx has kernels for."""
NAMES: tuple[str, ...] = (
    "mlx.4.g64", "mlx.2.g32", "mlx.3.g64", "mlx.5.g64", "mlx.6.g64", "mlx.8.g64", "mlx.4.g32.f16", "mlx.4.g128.f32",
    "mlx.mxfp4", "mlx.nvfp4", "mlx.mxfp8",
)  # fmt: skip
"""Common names of the family, suggested by errors."""
_UINT32 = np.dtype(np.uint32)


@dataclass(frozen=True, slots=True)
class MLX(AffineCodec):
    """MLX's affine weights. bits: of a code. group: columns per scale. dtype: of the scales and biases."""

    bits: int
    group: int = 64
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        """Codec name: bits, group, and the dtype if it is not the default."""
        return f"mlx.{self.bits}.g{self.group}" + (f".{self.dtype}" if self.dtype != "bf16" else "")

    @property
    def granule(self) -> tuple[int, int]:
        """Whole groups."""
        return 1, self.group

    @property
    def row_sliced(self) -> bool:
        """True: every part has one entry per row."""
        return True

    @property
    def integers(self) -> Integers:
        """Codes of `bits` bits with a scale and a bias per group."""
        return Integers(self.bits, self.group, self.dtype, "bias")  # type: ignore[arg-type]

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [..., N, K]. Raises CodecError if groups do not divide it."""
        if len(shape) < 2:
            raise CodecError(f"{self.name} needs a matrix", expected="[..., N, K]", found=list(shape))
        n, k = as_matrix(shape)
        table = ArraySpec((n, group_count(self.name, (n, k), self.group)), FLOAT_TYPES[self.dtype])
        return {"weight": ArraySpec((n, k * self.bits // 32), _UINT32), "scales": table, "biases": table}

    def tables(self, parts: Parts, shape: Shape) -> tuple[F32, F32, F32]:
        """Scales, offsets of -2^(bits - 1), and biases, [N, G]."""
        specs = self.specs(shape)
        scale, bias = (halves.widen(exact_part(parts, part, specs[part])) for part in ("scales", "biases"))
        return scale, np.full_like(scale, -(2 ** (self.bits - 1))), bias

    def codes_of(self, parts: Parts, shape: Shape, rows: slice) -> I8:
        """Signed codes of rows [a, b)."""
        words = exact_part(parts, "weight", self.specs(shape)["weight"])[rows]
        return unpacked_bits(words.view(np.int32), self.bits, shift=2 ** (self.bits - 1)).view(np.int8)

    def stream(self, parts: Parts, shape: Shape) -> U8:
        """The words as they are stored."""
        words = exact_part(parts, "weight", self.specs(shape)["weight"])
        return np.ascontiguousarray(words.astype("<u4", copy=False)).view(np.uint8)

    def pack_rows(self, codes: Affine, start: int, out: dict[str, Any], shape: Shape) -> None:
        """Write rows of codes. Raises CodecError if the codes, scales or biases cannot be held."""
        got = stored_codes(self.name, codes, self.integers, out["scales"].shape[1])
        rows = slice(start, start + len(got.raw))
        assert got.bias is not None
        code_streams.pack_into(got.raw, out["weight"][rows].view(np.uint8), self.bits, got.shift)
        out["scales"][rows] = stored_table(self.name, "scales", got.scale, out["scales"].dtype)
        out["biases"][rows] = stored_table(self.name, "biases", got.bias, out["biases"].dtype)

    def quantize(self, w: ArrayLike, *, importance: ArrayLike | None = None) -> Affine:
        """Quantize floats [..., K], see AffineCodec; the error is at most that of mlx's own choice in every group."""
        floats = np.asarray(w)
        matrix = floats.reshape(as_matrix(floats.shape)) if floats.ndim > 2 else floats
        return AffineCodec.quantize(self, matrix, importance=importance)


@cache
def mlx_named(name: str) -> MLX | MLXFloats:
    """Return the codec called `name`, e.g. "mlx.4.g64" or "mlx.mxfp4". Raises UnknownNameError."""
    _, bits, *words = [*name.split("."), ""]
    if bits in MODES and name == f"mlx.{bits}":
        return MLXFloats(bits)
    group = next((int(w[1:]) for w in words if w[:1] == "g" and w[1:].isdecimal() and len(w) < 5), 64)
    dtype = next((w for w in words if w in FLOAT_TYPES), "bf16")
    if bits in map(str, BITS) and group in GROUPS:
        codec = MLX(int(bits), group, dtype)
        if codec.name == name:
            return codec
    raise UnknownNameError("codec", name, NAMES)
