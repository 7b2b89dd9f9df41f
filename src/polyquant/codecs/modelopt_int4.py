"""ModelOpt's INT4 AWQ weights (quant_algo W4A16_AWQ): symmetric 4-bit codes, two rows in a byte.

    weight           u8 [N / 2, K]     low nibble row 2 i, high nibble row 2 i + 1, two's complement
    weight_scale     f32 [N, G]        one per K / G columns
    pre_quant_scale  bf16 [K]          "pre": the layer's inputs are multiplied by it

    w = q * scale                      y = W x
    w = q * (scale * pre)              "pre": y = (q * scale) (pre * x), the same product

AWQ scales the inputs of every layer. Where a norm comes before the layer, ModelOpt has folded the factors into the
norm; elsewhere (o_proj, down_proj) they remain a separate tensor. They are part of the weight here, so its values are
those that fit the unscaled inputs; no other packing of integers has a factor per column.
4 bits per weight and the scales.
Names: modelopt.int4.g128   modelopt.int4 (one scale per row)   .pre   .f16 .f32 (dtype of the factors; default bf16)
Source: github.com/NVIDIA/Model-Optimizer, export/quant_utils.py (facts); golden values by ModelOpt 0.47.0 in
tests/vectors/hub.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from polyquant.codecs.affine_codec import AffineCodec, group_count, stored_codes
from polyquant.codecs.arguments import exact_part
from polyquant.codecs.keeping import FLOAT_TYPES, Integers
from polyquant.errors import CodecError, UnknownNameError
from polyquant.ops import small_floats
from polyquant.types import F32, I8, U8, Affine, ArraySpec, Parts, Shape

__all__ = ["NAMES", "ModelOptInt4", "modelopt_int4_named"]

NAMES: tuple[str, ...] = ("modelopt.int4.g128", "modelopt.int4.g128.pre")
"""Common names of the family, suggested by errors."""
_U8 = np.dtype(np.uint8)


@dataclass(frozen=True, slots=True)
class ModelOptInt4(AffineCodec):
    """INT4 AWQ. group: columns per scale, 0 for the whole row. pre: dtype of the factors of the inputs, "" without."""

    group: int = 0
    pre: str = ""

    @property
    def name(self) -> str:
        """Codec name: the group, and the factors with their dtype if it is not bf16."""
        words = {f"g{self.group}": self.group, "pre": self.pre, self.pre: self.pre not in ("", "bf16")}
        return ".".join(["modelopt.int4", *(word for word, given in words.items() if given)])

    @property
    def bits(self) -> int:
        """Bits per code."""
        return 4

    @property
    def writable(self) -> bool:
        """False with factors: these come from ModelOpt's calibration and are copied with the codes."""
        return not self.pre

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [N, K]. Raises CodecError for an odd N, or if groups do not divide K."""
        groups = group_count(self.name, shape, self.group)
        n, k = shape
        if n % 2:
            raise CodecError(f"{self.name} packs two rows per byte", expected="an even number of rows", found=n)
        parts = {"weight": ArraySpec((n // 2, k), _U8), "weight_scale": ArraySpec((n, groups), FLOAT_TYPES["f32"])}
        return parts | ({"pre_quant_scale": ArraySpec((k,), FLOAT_TYPES[self.pre])} if self.pre else {})

    @property
    def integers(self) -> Integers:
        """Symmetric 4-bit codes; with factors, each column has a separate one."""
        return Integers(4, self.group, "f32", factors=bool(self.pre))

    def tables(self, parts: Parts, shape: Shape) -> tuple[F32, F32, None]:
        """Scales [N, G] and zeros; with factors [N, K]."""
        return self._scales(parts, shape, slice(None))

    def _scales(self, parts: Parts, shape: Shape, rows: slice) -> tuple[F32, F32, None]:
        specs = self.specs(shape)
        scale: F32 = exact_part(parts, "weight_scale", specs["weight_scale"])[rows]
        if self.pre:
            factors = exact_part(parts, "pre_quant_scale", specs["pre_quant_scale"]).astype(np.float32)
            with np.errstate(all="ignore"):
                scale = np.repeat(scale, self.group or shape[1], axis=1) * factors
        scale = np.ascontiguousarray(scale, np.float32)
        return scale, np.zeros_like(scale), None

    def unpack_rows(self, parts: Parts, shape: Shape, rows: slice) -> Affine:
        """Unpack rows [a, b) of complete parts; with factors, a scale per column. Raises CodecError if a part does not
        fit.
        """
        scale, offset, _ = self._scales(parts, shape, rows)
        return Affine(4, self.codes_of(parts, shape, rows), scale, offset)

    def codes_of(self, parts: Parts, shape: Shape, rows: slice) -> I8:
        """Signed codes of rows [a, b)."""
        first, last = rows.start // 2, -(-rows.stop // 2)
        stored = exact_part(parts, "weight", self.specs(shape)["weight"])[first:last].view(np.int8)
        codes = np.empty((2 * len(stored), shape[1]), np.int8)
        np.right_shift(np.left_shift(stored, 4), 4, out=codes[0::2])
        np.right_shift(stored, 4, out=codes[1::2])
        return codes[rows.start - 2 * first : rows.stop - 2 * first]

    def stream(self, parts: Parts, shape: Shape) -> U8 | None:
        """The codes as rows of unsigned nibbles, a copy; None with factors, and for an odd K."""
        if self.pre or shape[1] % 2:
            return None
        return small_floats.pairs(self.codes_of(parts, shape, slice(0, shape[0])).view(np.uint8) + np.uint8(8))

    def pack_rows(self, codes: Affine, start: int, out: dict[str, Any], shape: Shape) -> None:
        """Write two rows into each byte. Raises CodecError for zero points, and for codes with factors."""
        if self.pre:
            AffineCodec.pack_rows(self, codes, start, out, shape)
        got = stored_codes(self.name, codes, self.integers, out["weight_scale"].shape[1])
        signed = (got.codes ^ np.uint8(8)) & np.uint8(15)
        out["weight"][start // 2 : (start + len(signed)) // 2] = signed[0::2] | signed[1::2] << np.uint8(4)
        out["weight_scale"][start : start + len(signed)] = got.scale


@cache
def modelopt_int4_named(name: str) -> ModelOptInt4:
    """Return the codec called `name`, e.g. "modelopt.int4.g128". Raises UnknownNameError."""
    words = name.split(".")[2:]
    group = next((int(w[1:]) for w in words if w[:1] == "g" and w[1:].isascii() and w[1:].isdecimal()), 0)
    dtype = next((w for w in words if w in FLOAT_TYPES), "bf16")
    codec = ModelOptInt4(group, dtype if "pre" in words else "")
    if len(name) > 60 or codec.name != name:
        raise UnknownNameError("codec", name, NAMES)
    return codec
