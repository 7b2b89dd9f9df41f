"""MXFP8 in Hugging Face and MLX folders: 8-bit floats (E4M3) with a power of two per 32 columns.

    weight        e4m3 [N, K]
    weight_scale  u8 [N, K / 32]    e: w = E4M3[q] * 2^(e - 127)

8.25 bits per weight. compressed-tensors, ModelOpt and MLX (there uint32 words of the same bytes) store the same bytes.
Source: OCP Microscaling Formats 1.0 (facts).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.float_codec import FloatCodec, codes_form, stored_scales
from polyquant.codecs.keeping import SmallFloats
from polyquant.ops import grouped
from polyquant.types import U8, ArraySpec, Parts, ScaledFloats, Shape, as_matrix

__all__ = ["HF_MXFP8", "HFMxfp8"]

GROUP = 32
_E4M3, _U8 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.uint8)


@dataclass(frozen=True, slots=True)
class HFMxfp8(FloatCodec):
    """MXFP8; see the module docstring."""

    @property
    def name(self) -> str:
        """The name."""
        return "hf_mxfp8"

    @property
    def granule(self) -> tuple[int, int]:
        """Groups of 32 columns."""
        return 1, GROUP

    @property
    def floats(self) -> SmallFloats:
        """8-bit floats with a power of two per 32 columns."""
        return SmallFloats("e4m3", "e8m0", (1, GROUP))

    @property
    def lines(self) -> dict[str, int]:
        """Everything by rows."""
        return {"weight": 1, "weight_scale": 1}

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [..., K]. Raises CodecError if K is not a multiple of 32."""
        n, k = self._rows(shape, GROUP)
        return {"weight": ArraySpec((n, k), _E4M3), "weight_scale": ArraySpec((n, k // GROUP), _U8)}

    def tables(self, parts: Parts, shape: Shape) -> ScaledFloats:
        """The scales."""
        scale = np.ascontiguousarray(self._part(parts, shape, "weight_scale"))
        return ScaledFloats("e4m3", np.empty((0, shape[-1]), np.uint8), "e8m0", scale, (1, GROUP))

    def codes_of(self, parts: Parts, shape: Shape, rows: slice) -> U8:
        """The bytes of the floats."""
        return np.ascontiguousarray(self._part(parts, shape, "weight")[rows]).view(np.uint8)

    def pack(self, codes: ScaledFloats) -> dict[str, NDArray[Any]]:
        """Pack codes to parts. Raises CodecError for scales that are not powers of two."""
        given = codes_form(self, codes)
        spec = self.specs(codes.codes.shape)["weight_scale"]
        scale = stored_scales(self.name, given, self.floats, spec.shape)
        return {"weight": np.ascontiguousarray(given.codes).view(_E4M3), "weight_scale": scale}

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """Return a matmul handle (ops/matmul.py) on the stored bytes; None without a native kernel.

        Raises CodecError if a part does not fit.
        """
        weight, scale = (self._part(parts, shape, key) for key in ("weight", "weight_scale"))
        return grouped.handle(
            grouped.Grouped(np.ascontiguousarray(weight).view(np.uint8), "e4m3", as_matrix(shape), scale, GROUP)
        )


HF_MXFP8 = HFMxfp8()
