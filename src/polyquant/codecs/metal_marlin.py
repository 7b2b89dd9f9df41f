"""Metal Marlin's Trellis layout: the plain grid, in tiles of [outputs, inputs].

    indices u8 [ceil(N / 16), ceil(K / 16), 32 k]   after a header byte (= k), which its readers skip; in a tile, code
                                                    16 o + i belongs to output o and input i; k bits each, least
                                                    significant bit first
    scales  f32 [G, N]                              one row per ceil(K / G) inputs, G = ceil(K / 128)
    su      f32 [K]      sv f32 [N]                 signs

    W[o, i] = float16(((grid[index] * scales[i // group, o]) * sv[o]) * su[i])
    grid[i] = (i - (2 ** k - 1) / 2) * 1.24371088

Its decoder distinguishes the sign vectors by length: for a square matrix it multiplies outputs by su and inputs by sv,
and so does this codec. `metal_marlin.4.h128` is the Hadamard variant as its quantizer intends it and its decoder
ignores it: blocks of 128 inputs are then rotated and multiplied by su, with no rounding and no swap. `.gN` sets the
number of groups.

With the codes of each tile transposed this is the grid of `trellis.K`, so the two convert without changing a value.
Source: Metal Marlin's Python (quantizer, packer, CPU decoder), which also wrote the vectors in tests/vectors/trellis.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyquant.codecs.arguments import exact_part, of_form, stored_bytes
from polyquant.codecs.trellis import GROUP, Trellis
from polyquant.errors import CodecError, UnknownNameError
from polyquant.ops import trellis as ops
from polyquant.types import F32, U8, ArraySpec, Parts, Shape, TrellisCodes, as_matrix

__all__ = ["NAMES", "MetalMarlin", "metal_marlin_named"]

NAMES: tuple[str, ...] = tuple(f"metal_marlin.{b}" for b in range(2, 9))
"""Common names of the family, suggested by errors."""


@dataclass(frozen=True, slots=True, eq=False)
class MetalMarlin:
    """A Metal Marlin layout.

    block: size of the Hadamard blocks along K, 1 for none. groups: rows of `scales`, None for one per 128 inputs.
    """

    bits: int
    block: int = 1
    groups: int | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """Codec name; includes every option that affects the bytes."""
        rotated = f".h{self.block}" if self.block > 1 else ""
        return f"metal_marlin.{self.bits}{rotated}" + (f".g{self.groups}" if self.groups is not None else "")

    @property
    def form(self) -> type[TrellisCodes]:
        """Trellis codes, per tile."""
        return TrellisCodes

    @property
    def granule(self) -> tuple[int, int]:
        """Any shape without a rotation, else whole Hadamard blocks."""
        return 1, self.block

    @property
    def row_sliced(self) -> bool:
        """False: tiles hold 16 outputs each."""
        return False

    def configure(self, **options: Any) -> MetalMarlin:
        """Return the codec with another block or groups.

        Raises TypeError for other options, CodecError for invalid values.
        """
        codec = replace(self, **options)
        if not 2 <= codec.bits <= 8 or codec.block not in (1, 128) or (codec.groups is not None and codec.groups < 1):
            raise CodecError("unsupported options", expected="2 to 8 bits, blocks of 1 or 128", found=codec.name)
        return codec

    def trellis(self, shape: Shape) -> Trellis:
        """Return the Trellis v3 codec that holds a weight of this shape with the same values."""
        _, k = as_matrix(shape)
        rows = self._group_count(shape)
        rotated = (self.block, 1) if self.block > 1 else False
        usual = 1 if rotated else -(-k // GROUP)
        return Trellis(self.bits).configure(
            codebook="grid", hadamard=rotated, groups=None if rows == usual else rows
        )  # fmt: skip

    def _group_count(self, shape: Shape) -> int:
        return self.groups if self.groups is not None else -(-as_matrix(shape)[1] // GROUP)

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [N, K]. Raises CodecError if blocks do not divide K."""
        seeds = self.trellis(shape).specs(shape)
        tiles_k, tiles_n, nbytes = seeds["indices"].shape
        return {**seeds, "indices": ArraySpec((tiles_n, tiles_k, nbytes), np.dtype(np.uint8))}

    # ------------------------------------------------------------ layout

    def _signs(self, su: F32, sv: F32) -> tuple[F32, F32]:
        """Swap the sign vectors of a square matrix, as its decoder does: (inputs, outputs) either way."""
        return (sv, su) if len(su) == len(sv) and self.block == 1 else (su, sv)

    def pack(self, codes: TrellisCodes) -> dict[str, NDArray[Any]]:
        """Pack codes to parts. Raises CodecError if they belong to another codec."""
        of_form(self, codes)
        su, sv = self._signs(codes.su, codes.sv)
        parts = self.trellis((len(codes.sv), len(codes.su))).pack(replace(codes, su=su, sv=sv))
        return {**parts, "indices": ops.pack_bits(_transposed_tiles(codes.codes), self.bits)}

    def unpack(self, parts: Parts, shape: Shape) -> TrellisCodes:
        """Unpack parts to codes, with tiles transposed to [K, N]. Raises CodecError if a part does not fit."""
        specs = self.specs(shape)
        packed = stored_bytes(self.name, parts, "indices", specs["indices"]).reshape(specs["indices"].shape)
        scales, su, sv = (exact_part(parts, key, specs[key]) for key in ("scales", "su", "sv"))
        codes = _transposed_tiles(ops.unpack_bits(packed, self.bits))
        return TrellisCodes(self.trellis(shape).code(shape), codes, scales, *self._signs(su, sv))

    # ------------------------------------------------------------ math

    def quantize(self, w: ArrayLike, *, importance: ArrayLike | None = None) -> TrellisCodes:
        """Quantize floats [N, K] to the nearest grid values. Raises CodecError for a non-matrix or NaN or infinity."""
        return self.trellis(np.shape(w)).quantize(w, importance=importance)

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Parts to float32 [N, K]; all rows are decoded even if only `rows` are returned."""
        codec = self.trellis(shape)
        return codec.dequantize(codec.pack(self.unpack(parts, shape)), shape, rows=rows, out=out)


def _transposed_tiles(codes: U8) -> U8:
    """Transpose tiles [a, b, 256] and the codes inside them: [b, a, 256]."""
    a, b, _ = codes.shape
    return np.ascontiguousarray(codes.reshape(a, b, 16, 16).transpose(1, 0, 3, 2)).reshape(b, a, ops.TILE)


def metal_marlin_named(name: str) -> MetalMarlin:
    """Return the codec called `name`, the inverse of `MetalMarlin.name`. Raises UnknownNameError."""
    unknown = UnknownNameError("codec", name, NAMES)
    options: dict[str, int] = {}
    try:
        bits, *words = name.split(".")[1:]
        for word in words:
            options[{"h": "block", "g": "groups"}[word[:1]]] = int(word[1:])
        codec = MetalMarlin(int(bits)).configure(**options)
    except (ValueError, KeyError, CodecError):
        raise unknown from None
    if codec.name != name:
        raise unknown
    return codec
