"""torchao's integer weights: one code per byte, with a scale and an integer zero point per group.

    _weight_qdata       i8 [N, K]          signed codes of 1 to 8 bits
    _weight_scale       [N, G]             one per K / G columns
    _weight_zero_point  i8 [N, G]          absent: "sym"

    w = (q - zero) * scale

Int8Tensor (Int8WeightOnlyConfig and others) and IntxUnpackedToInt8Tensor (IntxWeightOnlyConfig) store this. torchao's
packed 4-bit tensors have other parts, which only GPUs make, and are not decoded. Its 8-bit floats are fp8.e4m3.
Bits per weight: 8, whatever the codes have.
Names: torchao.int4.g32   torchao.int8 (one scale per row)   .sym   .f16 .f32 (dtype of the scales; default bf16)
Source: github.com/pytorch/ao, quantization/quantize_/workflows (facts); golden values by torchao 0.18.0 in
tests/vectors/hub and hub_readonly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.affine_codec import AffineCodec, group_count
from polyquant.codecs.arguments import exact_part
from polyquant.codecs.keeping import FLOAT_TYPES, Integers
from polyquant.errors import CodecError, UnknownNameError
from polyquant.types import F32, I8, ArraySpec, Parts, Shape

__all__ = ["BITS", "NAMES", "TorchAOInt", "torchao_named"]

BITS = (4, 8)
"""Declared ranges of the codes: those of 1 to 3 bits are also in the range of 4."""
NAMES: tuple[str, ...] = ("torchao.int4.g32", "torchao.int4.g128", "torchao.int8.f32", "torchao.int8.g32.f32")
"""Common names of the family, suggested by errors."""
_INT8 = np.dtype(np.int8)


@dataclass(frozen=True, slots=True)
class TorchAOInt(AffineCodec):
    """Integer weights. bits: 4 or 8. group: columns per scale, 0 for the whole row. sym: no zero points.

    dtype: of the scales.
    """

    bits: int
    group: int = 0
    sym: bool = False
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        """Codec name: the range of the codes, and the options that are not the default."""
        flags = {f"g{self.group}": self.group, "sym": self.sym, self.dtype: self.dtype != "bf16"}
        return ".".join(["torchao", f"int{self.bits}", *(word for word, given in flags.items() if given)])

    @property
    def row_sliced(self) -> bool:
        """True: rows are independent."""
        return True

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [N, K]. Raises CodecError if groups do not divide it."""
        groups = group_count(self.name, shape, self.group)
        parts = {
            "_weight_qdata": ArraySpec(shape, _INT8),
            "_weight_scale": ArraySpec((shape[0], groups), FLOAT_TYPES[self.dtype]),
        }
        return parts | ({} if self.sym else {"_weight_zero_point": ArraySpec((shape[0], groups), _INT8)})

    @property
    def writable(self) -> bool:
        """False: a reader needs a description of torchao's classes in the file."""
        return False

    @property
    def integers(self) -> Integers:
        """Codes in groups, with or without zero points."""
        return Integers(self.bits, self.group, self.dtype, "none" if self.sym else "integer")  # type: ignore[arg-type]

    def tables(self, parts: Parts, shape: Shape) -> tuple[F32, F32, None]:
        """Scales and zero points, [N, G]. Raises CodecError for zero points beyond the declared bits."""
        specs = self.specs(shape)
        scale = np.ascontiguousarray(exact_part(parts, "_weight_scale", specs["_weight_scale"]), np.float32)
        if self.sym:
            return scale, np.zeros_like(scale), None
        stored = exact_part(parts, "_weight_zero_point", specs["_weight_zero_point"])
        self._check_range("zero points", stored)
        return scale, np.ascontiguousarray(stored, np.float32), None

    def codes_of(self, parts: Parts, shape: Shape, rows: slice) -> I8:
        """Signed codes of rows [a, b). Raises CodecError for codes beyond the declared bits."""
        codes = np.ascontiguousarray(exact_part(parts, "_weight_qdata", self.specs(shape)["_weight_qdata"])[rows])
        self._check_range("codes", codes)
        return codes

    def _check_range(self, what: str, values: NDArray[Any]) -> None:
        if self.bits == 4 and values.size and (values.min() < -8 or values.max() > 7):
            raise CodecError(
                f"{self.name} has {what} out of range", expected="-8 to 7", found=f"{values.min()} to {values.max()}"
            )


@cache
def torchao_named(name: str) -> TorchAOInt:
    """Return the codec called `name`, e.g. "torchao.int4.g32". Raises UnknownNameError."""
    _, kind, *words = [*name.split("."), ""]
    group = next((int(w[1:]) for w in words if w[:1] == "g" and w[1:].isascii() and w[1:].isdecimal()), 0)
    dtype = next((w for w in words if w in FLOAT_TYPES), "bf16")
    bits = next((b for b in BITS if kind == f"int{b}"), 0)
    codec = TorchAOInt(bits, group, "sym" in words, dtype)
    if not bits or len(name) > 60 or codec.name != name:
        raise UnknownNameError("codec", name, NAMES)
    return codec
