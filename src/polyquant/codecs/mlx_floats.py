"""Small floats of Apple's MLX with a scale byte per group of a row.

                weight u32                  scales u8           w
    mlx.mxfp4   [N, K / 8]   E2M1 nibbles   [N, K / 32] E8M0    E2M1[q] * 2^(e - 127)
    mlx.nvfp4   [N, K / 8]   E2M1 nibbles   [N, K / 16] E4M3    E2M1[q] * E4M3[e]
    mlx.mxfp8   [N, K / 4]   E4M3 bytes     [N, K / 32] E8M0    E4M3[q] * 2^(e - 127)

The words are bytes in order; of two nibbles the lower one is the even column. The bytes are those of hf_mxfp4,
hf_nvfp4.plain and hf_mxfp8. A stack of experts [E, N, K] has parts of E N rows here; files hold them as [E, N, ...].

4.25, 4.5 and 8.25 bits per weight.
Source: github.com/ml-explore/mlx, mlx/ops.cpp and mlx/backend/cpu/quantized.cpp (facts).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.float_codec import FloatCodec, codes_form, paired_codes, stored_scales
from polyquant.codecs.keeping import SmallFloats
from polyquant.ops import grouped, small_floats
from polyquant.types import U8, ArraySpec, Parts, ScaledFloats, Shape, as_matrix

__all__ = ["MODES", "MLXFloats"]

_MODES: dict[str, tuple[Literal["e2m1", "e4m3"], Literal["e8m0", "e4m3"], int]] = {
    "mxfp4": ("e2m1", "e8m0", 32), "nvfp4": ("e2m1", "e4m3", 16), "mxfp8": ("e4m3", "e8m0", 32),
}  # fmt: skip
MODES = tuple(_MODES)
"""The modes of mlx.core.quantize, without "affine"."""


@dataclass(frozen=True, slots=True)
class MLXFloats(FloatCodec):
    """A mode of MLX with small floats. mode: one of MODES."""

    mode: str

    @property
    def name(self) -> str:
        """Codec name: the mode."""
        return f"mlx.{self.mode}"

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return small_floats.ELEMENTS[_MODES[self.mode][0]].bits

    @property
    def group(self) -> int:
        """Columns per scale."""
        return _MODES[self.mode][2]

    @property
    def granule(self) -> tuple[int, int]:
        """Whole groups."""
        return 1, self.group

    @property
    def floats(self) -> SmallFloats:
        """Floats of 4 or 8 bits with a scale byte per group."""
        element, scale, group = _MODES[self.mode]
        return SmallFloats(element, scale, (1, group))

    @property
    def lines(self) -> dict[str, int]:
        """Everything by rows."""
        return {"weight": 1, "scales": 1}

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [..., K]. Raises CodecError if K is not a multiple of the group."""
        n, k = self._rows(shape, self.group)
        words = ArraySpec((n, k * self.bits // 32), np.dtype(np.uint32))
        return {"weight": words, "scales": ArraySpec((n, k // self.group), np.dtype(np.uint8))}

    def tables(self, parts: Parts, shape: Shape) -> ScaledFloats:
        """The scales."""
        element, kind, group = _MODES[self.mode]
        scale = np.ascontiguousarray(self._part(parts, shape, "scales"))
        return ScaledFloats(element, np.empty((0, shape[-1]), np.uint8), kind, scale, (1, group))

    def codes_of(self, parts: Parts, shape: Shape, rows: slice) -> U8:
        """The nibbles or bytes of each row."""
        stream = np.ascontiguousarray(self._part(parts, shape, "weight")[rows]).view(np.uint8)
        return stream if self.bits == 8 else small_floats.nibbles(stream)

    def unpack_paired(self, parts: Parts, shape: Shape) -> ScaledFloats | None:
        """The bytes of nibbles as they are; None for mxfp8."""
        if self.bits == 8:
            return None
        stream = np.ascontiguousarray(self._part(parts, shape, "weight")).view(np.uint8)
        return replace(self.tables(parts, shape), codes=stream, paired=True)

    def pack(self, codes: ScaledFloats) -> dict[str, NDArray[Any]]:
        """Pack codes to parts. Raises CodecError for scales that the codec cannot hold."""
        given = codes_form(self, codes)
        spec = self.specs(given.shape)["scales"]
        scale = stored_scales(self.name, given, self.floats, spec.shape)
        stream = given.codes if self.bits == 8 else paired_codes(given)
        return {"weight": np.ascontiguousarray(stream).view("<u4"), "scales": scale}

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """Return a matmul handle (ops/matmul.py) on the stored bytes; None without a native kernel.

        Raises CodecError if a part does not fit.
        """
        element, kind, group = _MODES[self.mode]
        stream = np.ascontiguousarray(self._part(parts, shape, "weight")).view(np.uint8)
        scale = self._part(parts, shape, "scales")
        scales = scale.view(ml_dtypes.float8_e4m3fn) if kind == "e4m3" else scale
        return grouped.handle(grouped.Grouped(stream, element, as_matrix(shape), scales, group))
