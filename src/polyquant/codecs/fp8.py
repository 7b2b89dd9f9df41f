"""Matrices of 8-bit floats with scales, as stored by compressed-tensors, FBGEMM, DeepSeek and ModelOpt.

    weight            f8 [N, K]        e4m3 (4 exponent bits, 3 mantissa bits, no infinity, up to 448) or e5m2
    weight_scale      [N, 1]           one per row
                      [1]              one per tensor ("tensor")
    weight_scale_inv  [N / B, K / B]   one per B x B block, partial at the edges ("b128"); a multiplier despite its name
    input_scale       [1]              scale of statically quantized inputs ("static"), in the dtype of the scales

    w = weight * scale

Names: fp8.e4m3   fp8.e4m3.tensor   fp8.e4m3.b128   .inv (the part is called weight_scale_inv)   .static
       .f16 .f32 .e8m0 (dtype of the scales; default bf16)
Source: github.com/vllm-project/compressed-tensors, DeepSeek-V3's inference code, ModelOpt's export (facts).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.affine_codec import stored_table
from polyquant.codecs.arguments import matrix_of
from polyquant.codecs.float_codec import FloatCodec, codes_form, scaled_inputs, stored_scalar, stored_scales
from polyquant.codecs.keeping import FLOAT_TYPES, SmallFloats
from polyquant.errors import CodecError, UnknownNameError
from polyquant.ops import grouped
from polyquant.types import U8, ArraySpec, Parts, ScaledFloats, Shape

__all__ = ["FP8", "NAMES", "fp8_named"]

_KINDS = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2)}
_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
_SCALES = {**FLOAT_TYPES, "e8m0": np.dtype(ml_dtypes.float8_e8m0fnu)}
NAMES: tuple[str, ...] = (
    "fp8.e4m3", "fp8.e5m2", "fp8.e4m3.tensor", "fp8.e4m3.tensor.f32", "fp8.e4m3.b128", "fp8.e4m3.b128.inv.f32",
    "fp8.e4m3.b128.inv.e8m0",
)  # fmt: skip
"""Common names of the family, suggested by errors."""


@dataclass(frozen=True, slots=True)
class FP8(FloatCodec):
    """8-bit floats with scales.

    kind: e4m3 or e5m2. block: side of the blocks, 0 for rows. tensor: one scale. inv: the scales are called
    weight_scale_inv. dtype: of the scales. static: with a scale of the inputs.
    """

    kind: str
    block: int = 0
    tensor: bool = False
    inv: bool = False
    dtype: str = "bf16"
    static: bool = False

    @property
    def name(self) -> str:
        """Codec name: the kind, and the options that are not the default."""
        flags = {
            f"b{self.block}": self.block, "tensor": self.tensor, "inv": self.inv, self.dtype: self.dtype != "bf16",
            "static": self.static,
        }  # fmt: skip
        return ".".join(["fp8", self.kind, *(word for word, given in flags.items() if given)])

    @property
    def scale(self) -> str:
        """Name of the scale part."""
        return "weight_scale_inv" if self.inv else "weight_scale"

    @property
    def floats(self) -> SmallFloats:
        """One float per byte with a scale per row, block or tensor."""
        block = (0, 0) if self.tensor else (self.block, self.block) if self.block else (1, 0)
        return SmallFloats(self.kind, self.dtype, block)  # type: ignore[arg-type]

    @property
    def lines(self) -> dict[str, int]:
        """One scale for each row, for a block of rows, or for all of them."""
        lines = {"weight": 1, self.scale: 0 if self.tensor else self.block or 1}
        return lines | ({"input_scale": 0} if self.static else {})

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [N, K]. Raises CodecError for a non-matrix."""
        n, k = matrix_of(self.name, shape)
        b = self.block
        table: Shape = (1,) if self.tensor else (-(-n // b), -(-k // b)) if b else (n, 1)
        parts = {"weight": ArraySpec((n, k), _KINDS[self.kind]), self.scale: ArraySpec(table, _SCALES[self.dtype])}
        return parts | ({"input_scale": ArraySpec((1,), self._inputs_dtype)} if self.static else {})

    @property
    def scales_inputs(self) -> bool:
        """True with static inputs."""
        return self.static

    def with_inputs(self, codes: ScaledFloats, low: float, high: float) -> ScaledFloats:
        """The codes with the scale that maps the largest input to the largest float."""
        return scaled_inputs(codes, low, high, _LARGEST[self.kind])

    @property
    def _inputs_dtype(self) -> np.dtype[Any]:
        return FLOAT_TYPES.get(self.dtype, np.dtype(np.float32))

    def tables(self, parts: Parts, shape: Shape) -> ScaledFloats:
        """The scales, and that of the inputs."""
        stored = self._part(parts, shape, self.scale)
        table = stored.reshape(1, 1) if self.tensor else stored
        scale: NDArray[Any] = (
            np.ascontiguousarray(table).view(np.uint8) if self.dtype == "e8m0" else table.astype(np.float32)
        )
        inputs = self._part(parts, shape, "input_scale").astype(np.float32) if self.static else None
        codes = np.empty((0, shape[1]), np.uint8)
        return ScaledFloats(self.kind, codes, self.dtype, scale, self.floats.block, inputs=inputs)

    def codes_of(self, parts: Parts, shape: Shape, rows: slice) -> U8:
        """The bytes of the floats."""
        return np.ascontiguousarray(self._part(parts, shape, "weight")[rows]).view(np.uint8)

    def pack(self, codes: ScaledFloats) -> dict[str, NDArray[Any]]:
        """Pack codes to parts. Raises CodecError for scales that the codec cannot hold."""
        given, (n, k) = codes_form(self, codes), codes.codes.shape
        specs = self.specs((n, k))
        spec = specs[self.scale]
        scale = stored_scales(self.name, given, self.floats, (1, 1) if self.tensor else spec.shape)
        if scale.dtype == np.uint8:
            table = scale.view(spec.dtype)
        else:
            table = stored_table(self.name, "scales", scale, spec.dtype)
        parts = {
            "weight": np.ascontiguousarray(given.codes).view(_KINDS[self.kind]), self.scale: table.reshape(spec.shape)
        }  # fmt: skip
        if self.static:
            if given.inputs is None:
                raise CodecError(f"{self.name} needs the scale of the inputs", hint="choose a codec without .static")
            inputs = stored_scalar(given.inputs, given.divides, dividing=False)
            parts["input_scale"] = stored_table(self.name, "input scales", inputs, self._inputs_dtype)
        return parts

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """Return a matmul handle (ops/matmul.py) on the stored bytes; None without a native kernel.

        Raises CodecError if a part does not fit.
        """
        weight, scale = (self._part(parts, shape, key) for key in ("weight", self.scale))
        n, k = shape
        tall = n if self.tensor else self.block or 1
        stored = np.ascontiguousarray(weight).view(np.uint8)
        kind: Literal["e4m3", "e5m2"] = "e4m3" if self.kind == "e4m3" else "e5m2"
        scales = np.ascontiguousarray(scale).view(np.uint8) if self.dtype == "e8m0" else scale
        return grouped.handle(grouped.Grouped(stored, kind, shape, scales, self.block or k, tall=tall))


@cache
def fp8_named(name: str) -> FP8:
    """Return the codec called `name`, e.g. "fp8.e4m3.b128.inv.f32". Raises UnknownNameError."""
    _, kind, *words = [*name.split("."), ""]
    block = next((int(w[1:]) for w in words if w[:1] == "b" and w[1:].isdecimal() and len(w) < 8), 0)
    dtype = next((w for w in words if w in _SCALES), "bf16")
    codec = FP8(kind, block, "tensor" in words, "inv" in words, dtype, "static" in words)
    if kind not in _KINDS or codec.name != name or (block and codec.tensor):
        raise UnknownNameError("codec", name, NAMES)
    return codec
