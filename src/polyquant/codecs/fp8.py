"""Matrices of 8-bit floats with scales, as stored by compressed-tensors, FBGEMM and DeepSeek.

    weight            f8 [N, K]        e4m3 (4 exponent bits, 3 mantissa bits, no infinity, up to 448) or e5m2
    weight_scale      [N, 1]           one per row
                      [1]              one per tensor ("tensor")
    weight_scale_inv  [N / B, K / B]   one per B x B block, partial at the edges ("b128"); a multiplier despite its name

    w = weight * scale

Names: fp8.e4m3   fp8.e4m3.tensor   fp8.e4m3.b128   .inv (the part is called weight_scale_inv)
       .f16 .f32 (dtype of the scales; default bf16)
Source: github.com/vllm-project/compressed-tensors, DeepSeek-V3's inference code (facts).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyquant.codecs.affine_codec import FLOAT_TYPES
from polyquant.codecs.arguments import exact_part, output
from polyquant.errors import CodecError, UnknownNameError, UnsupportedError
from polyquant.ops import grouped
from polyquant.types import F32, ArraySpec, Blocks, Parts, Shape

__all__ = ["FP8", "NAMES", "fp8_named"]

_KINDS = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2)}
_HINT = "choose another codec, e.g. bf16 or w8a16"
NAMES: tuple[str, ...] = ("fp8.e4m3", "fp8.e5m2", "fp8.e4m3.tensor", "fp8.e4m3.b128.inv.f32")
"""Common names of the family, suggested by errors."""


@dataclass(frozen=True, slots=True)
class FP8:
    """8-bit floats with scales.

    kind: e4m3 or e5m2. block: side of the blocks, 0 for rows. tensor: one scale. inv: the scales are called
    weight_scale_inv. dtype: of the scales.
    """

    kind: str
    block: int = 0
    tensor: bool = False
    inv: bool = False
    dtype: str = "bf16"

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """Codec name: the kind, and the options that are not the default."""
        flags = {
            f"b{self.block}": self.block,
            "tensor": self.tensor,
            "inv": self.inv,
            self.dtype: self.dtype != "bf16",
        }
        return ".".join(["fp8", self.kind, *(word for word, given in flags.items() if given)])

    @property
    def form(self) -> type[Blocks]:
        """Blocks: codes that need the scale of their block."""
        return Blocks

    @property
    def granule(self) -> tuple[int, int]:
        """Any shape."""
        return 1, 1

    @property
    def row_sliced(self) -> bool:
        """True if each row has its own scale."""
        return not (self.block or self.tensor)

    @property
    def scale(self) -> str:
        """Name of the scale part."""
        return "weight_scale_inv" if self.inv else "weight_scale"

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [N, K]. Raises CodecError for a non-matrix."""
        if len(shape) != 2:
            raise CodecError(f"{self.name} needs a matrix", expected="[N, K]", found=list(shape))
        n, k = shape
        b = self.block
        table: Shape = (1,) if self.tensor else (-(-n // b), -(-k // b)) if b else (n, 1)
        return {"weight": ArraySpec((n, k), _KINDS[self.kind]), self.scale: ArraySpec(table, FLOAT_TYPES[self.dtype])}

    def quantize(self, w: ArrayLike, *, importance: ArrayLike | None = None) -> Blocks:
        """Raises UnsupportedError: this codec is read-only."""
        raise UnsupportedError(f"{self.name} is read-only", hint=_HINT)

    def pack(self, codes: Blocks) -> dict[str, NDArray[Any]]:
        """Raises UnsupportedError: this codec is read-only."""
        raise UnsupportedError(f"{self.name} is read-only", hint=_HINT)

    def unpack(self, parts: Parts, shape: Shape) -> Blocks:
        """Return the bytes of the floats. Raises CodecError if a part does not fit."""
        weight = exact_part(parts, "weight", self.specs(shape)["weight"])
        return Blocks(self.name, np.ascontiguousarray(weight).view(np.uint8))

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Parts to float32 [N, K], or only `rows` of it; the parts are always complete."""
        specs = self.specs(shape)
        weight, scale = (exact_part(parts, key, spec) for key, spec in specs.items())
        n, k = shape
        start, stop, _ = (slice(None) if rows is None else rows).indices(n)
        out = output(out, (stop - start, k) if rows is not None else shape)
        table = np.asarray(scale, np.float32)
        if self.block:
            lines = np.arange(start, stop) // self.block
            table = np.repeat(table[lines], self.block, 1)[:, :k]
        elif not self.tensor:
            table = table[start:stop]
        with np.errstate(all="ignore"):
            np.multiply(weight[start:stop].astype(np.float32), table, out=out.reshape(stop - start, k))
        return out

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """Return a matmul handle (ops/matmul.py) on the stored bytes; None without a native kernel.

        Raises CodecError if a part does not fit.
        """
        weight, scale = (exact_part(parts, key, spec) for key, spec in self.specs(shape).items())
        n, k = shape
        tall = n if self.tensor else self.block or 1
        stored = np.ascontiguousarray(weight).view(np.uint8)
        kind: Literal["e4m3", "e5m2"] = "e4m3" if self.kind == "e4m3" else "e5m2"
        return grouped.handle(grouped.Grouped(stored, kind, shape, scale, self.block or k, tall=tall))

    def multiply(self, parts: Parts, shape: Shape, x: F32, rounding: str) -> F32:
        """x [T, K] -> [T, N] in float32; inputs are not quantized. Raises CodecError if a part does not fit."""
        del rounding
        return x @ self.dequantize(parts, shape).T


@cache
def fp8_named(name: str) -> FP8:
    """Return the codec called `name`, e.g. "fp8.e4m3.b128.inv.f32". Raises UnknownNameError."""
    _, kind, *words = [*name.split("."), ""]
    block = next((int(w[1:]) for w in words if w[:1] == "b" and w[1:].isdecimal() and len(w) < 8), 0)
    dtype = next((w for w in words if w in FLOAT_TYPES), "bf16")
    codec = FP8(kind, block, "tensor" in words, "inv" in words, dtype)
    if kind not in _KINDS or codec.name != name or (block and codec.tensor):
        raise UnknownNameError("codec", name, NAMES)
    return codec
