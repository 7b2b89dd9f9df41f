"""Metal Marlin's layout of Trellis: the plain grid, tiles of [outputs, inputs].

    indices u8 [ceil(N / 16), ceil(K / 16), 32 k]   after a header byte (= k), which its readers skip; in a tile, number 16 o + i
                                                    belongs to output o and input i; k bits each, least significant bit first
    scales  f32 [G, N]                              one row for each ceil(K / G) inputs, G = ceil(K / 128)
    su      f32 [K]      sv f32 [N]                 signs

    W[o, i] = float16(((grid[index] * scales[i // group, o]) * sv[o]) * su[i])      grid[i] = (i - (2 ** k - 1) / 2) * 1.24371088

Its decoder tells the two sign vectors apart by length: for a square matrix it multiplies outputs by su and inputs by sv, and so does this codec.
`metal_marlin.4.h128` is what the Hadamard flavour of its quantizer meant and its decoder forgets: afterwards blocks of 128 inputs are rotated, then
multiplied by su; nothing is rounded, nothing swapped. `.gN` says another number of groups.

With the codes of each tile transposed this is the grid of `trellis.K`: one becomes the other without a change of value. Source: Metal Marlin's
Python (quantizer, packer, CPU decoder); the vectors in tests/vectors/trellis were written by it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyquant.codecs.arguments import exact_part, stored_bytes
from polyquant.codecs.trellis import GROUP, Trellis
from polyquant.errors import CodecError, UnknownNameError
from polyquant.ops import trellis as ops
from polyquant.types import F32, U8, ArraySpec, Parts, Shape, TrellisCodes, as_matrix

__all__ = ["NAMES", "MetalMarlin", "metal_marlin_named"]

NAMES: tuple[str, ...] = tuple(f"metal_marlin.{b}" for b in range(2, 9))
"""Usual members of the family, for errors that say which names are near."""


@dataclass(frozen=True, slots=True, eq=False)
class MetalMarlin:
    """block: size of the Hadamard blocks along K, 1 for none. groups: rows of `scales`, None for one for each 128 inputs."""

    bits: int
    block: int = 1
    groups: int | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """Says everything that the bytes mean."""
        rotated = f".h{self.block}" if self.block > 1 else ""
        return f"metal_marlin.{self.bits}{rotated}" + (f".g{self.groups}" if self.groups is not None else "")

    @property
    def form(self) -> type[TrellisCodes]:
        """Codes of tiles."""
        return TrellisCodes

    @property
    def granule(self) -> tuple[int, int]:
        """Any shape without a rotation, else whole blocks."""
        return 1, self.block

    @property
    def row_sliced(self) -> bool:
        """Tiles hold 16 outputs each."""
        return False

    def configure(self, **options: Any) -> MetalMarlin:
        """block, groups. Raises TypeError for another option, CodecError for a value that makes no codec."""
        found = replace(self, **options)
        if not 2 <= found.bits <= 8 or found.block not in (1, 128) or (found.groups is not None and found.groups < 1):
            raise CodecError("no such codec", expected="2 to 8 bits, blocks of 1 or 128", found=found.name)
        return found

    def trellis(self, shape: Shape) -> Trellis:
        """The codec of Trellis v3 that holds a weight of this shape with every value as it is here."""
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
        """Sizes of the parts of a weight [N, K]. Raises CodecError for a K that blocks do not divide."""
        seeds = self.trellis(shape).specs(shape)
        tiles_k, tiles_n, nbytes = seeds["indices"].shape
        return {**seeds, "indices": ArraySpec((tiles_n, tiles_k, nbytes), np.dtype(np.uint8))}

    # ------------------------------------------------------------ layout

    def _signs(self, su: F32, sv: F32) -> tuple[F32, F32]:
        """(of inputs, of outputs), either way round."""
        return (sv, su) if len(su) == len(sv) and self.block == 1 else (su, sv)

    def pack(self, codes: TrellisCodes) -> dict[str, NDArray[Any]]:
        """Codes to parts. Raises CodecError if they mean something else than this codec's."""
        su, sv = self._signs(codes.su, codes.sv)
        parts = self.trellis((len(codes.sv), len(codes.su))).pack(replace(codes, su=su, sv=sv))
        return {**parts, "indices": ops.pack_bits(_turned(codes.codes), self.bits)}

    def unpack(self, parts: Parts, shape: Shape) -> TrellisCodes:
        """Parts to codes, tiles turned to [K, N]. Raises CodecError if a part does not fit."""
        specs = self.specs(shape)
        packed = stored_bytes(self.name, parts, "indices", specs["indices"]).reshape(specs["indices"].shape)
        scales, su, sv = (exact_part(parts, key, specs[key]) for key in ("scales", "su", "sv"))
        codes = _turned(ops.unpack_bits(packed, self.bits))
        return TrellisCodes(self.trellis(shape).code(shape), codes, scales, *self._signs(su, sv))

    # ------------------------------------------------------------ math

    def quantize(self, w: ArrayLike, *, importance: ArrayLike | None = None) -> TrellisCodes:
        """Floats [N, K] to codes: the nearest number of the grid. Raises CodecError for what is no matrix of finite numbers."""
        return self.trellis(np.shape(w)).quantize(w, importance=importance)

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Parts to float32 [N, K]; of `rows` all are decoded."""
        codec = self.trellis(shape)
        return codec.dequantize(codec.pack(self.unpack(parts, shape)), shape, rows=rows, out=out)


def _turned(codes: U8) -> U8:
    """Tiles [a, b, 256] with both the tiles and the numbers inside transposed: [b, a, 256]."""
    a, b, _ = codes.shape
    return np.ascontiguousarray(codes.reshape(a, b, 16, 16).transpose(1, 0, 3, 2)).reshape(b, a, ops.TILE)


def metal_marlin_named(name: str) -> MetalMarlin:
    """The codec of a name, the inverse of `MetalMarlin.name`. Raises UnknownNameError."""
    unknown = UnknownNameError("codec", name, NAMES)
    options: dict[str, int] = {}
    try:
        bits, *words = name.split(".")[1:]
        for word in words:
            options[{"h": "block", "g": "groups"}[word[:1]]] = int(word[1:])
        found = MetalMarlin(int(bits)).configure(**options)
    except (ValueError, KeyError, CodecError):
        raise unknown from None
    if found.name != name:
        raise unknown
    return found
