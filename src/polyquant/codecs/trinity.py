"""Trinity's own TQ2_0: ternary blocks of 32 weights in 10 bytes, 2.5 bpw. Not ggml's TQ2_0 (256 weights in 66 bytes).

    [d f16][codes u8 x 8]        w = code * d; byte j: weights 4j .. 4j + 3 in bits 1-0, 3-2, 5-4, 7-6; 0, +1, -1, 0
    (byte 0 at the left)

Trinity reads its types TQ1_0, TQ2_0 and IQ2_S this way (dequantizeIQ2_STensor); its documentation describes TQ1_0 as 8
bytes without a scale. llama.cpp files with these type numbers never use this layout. Source: gHashTag/trinity
af2d6c1bb; its documentation of GGUF.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.arguments import finite, of_form, output, packed_rows, part, real, stored_bytes
from polyquant.codecs.blocks import check_columns
from polyquant.codecs.ternary import Lanes, scaled
from polyquant.errors import CodecError
from polyquant.types import F32, U8, ArraySpec, Parts, Shape, Ternary, as_matrix

__all__ = ["TRINITY_TQ2_0", "TrinityTQ2"]

_LANES = Lanes(1, high_first=False, zero_first=True)


@dataclass(frozen=True, slots=True, eq=False)
class TrinityTQ2:
    """Blocks [d f16][8 bytes]."""

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def form(self) -> type[Ternary]:
        """Ternary codes with one scale per 32."""
        return Ternary

    @property
    def granule(self) -> tuple[int, int]:
        """Any number of rows, whole blocks along K."""
        return 1, 32

    @property
    def row_sliced(self) -> bool:
        """True: rows are independent."""
        return True

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """{"blocks": u8 [rows, K / 32 * 10]}. Raises CodecError."""
        rows, k = check_columns(self.name, shape, 32)
        return {"blocks": ArraySpec((rows, k // 32 * 10), np.dtype(np.uint8))}

    def quantize(self, w: F32, *, importance: F32 | None = None) -> Ternary:
        """Quantize floats [..., K] like ggml's TQ2_0: d = max|w| of a block, codes round(w / d).

        Raises CodecError on NaN and infinity.
        """
        w = real(self.name, w)
        rows, k = check_columns(self.name, w.shape, 32)
        blocks = finite(self.name, w).reshape(rows, k // 32, 32)
        d = np.abs(blocks).max(axis=2)  # [rows, K / 32]
        half = d[:, :, None] / 2
        codes = np.where(np.abs(blocks) >= half, np.sign(blocks), 0).astype(np.int8)
        return Ternary(codes.reshape(rows, k), d)

    def pack(self, codes: Ternary) -> dict[str, NDArray[np.uint8]]:
        """Pack codes to blocks; scales are rounded to fp16, d = 0 where all codes are 0.

        Raises CodecError if a block would need several scales.
        """
        of_form(self, codes)
        rows, k = codes.codes.shape
        groups = check_columns(self.name, (rows, k), 32)[1] // 32
        if groups == 0:
            return {"blocks": np.empty((rows, 0), np.uint8)}
        scale = np.broadcast_to(codes.scale, (rows, max(1, codes.scale.shape[-1])))
        if groups % scale.shape[1]:
            raise CodecError(
                f"{self.name} has one scale per 32 weights", found=f"{scale.shape[1]} scales in a row of {k}"
            )
        used = codes.codes.reshape(rows, groups, 32).any(axis=2)
        with np.errstate(over="ignore"):
            d = np.where(used, np.repeat(scale, groups // scale.shape[1], axis=1), 0).astype(np.float16)
        if not np.isfinite(d).all():
            raise CodecError(
                f"{self.name} stores scales as fp16, at most 65504", found=f"{np.abs(codes.scale).max():.6g}"
            )
        blocks = np.empty((rows, groups, 10), np.uint8)
        blocks[:, :, :2] = d.astype("<f2").reshape(rows, groups, 1).view(np.uint8)
        packed = np.empty(rows * k // 4, np.uint8)
        _LANES.pack(codes.codes, packed)
        blocks[:, :, 2:] = packed.reshape(rows, groups, 8)
        return {"blocks": blocks.reshape(rows, groups * 10)}

    def unpack(self, parts: Parts, shape: Shape) -> Ternary:
        """Unpack blocks to codes [rows, K] and scales [rows, K / 32].

        Raises CodecError if the size does not match the shape.
        """
        spec = self.specs(shape)["blocks"]
        blocks = stored_bytes(self.name, parts, "blocks", spec)
        return self._codes(blocks.reshape(spec.shape), as_matrix(shape)[1])

    def _codes(self, blocks: U8, k: int) -> Ternary:
        split = blocks.reshape(len(blocks), k // 32, 10)
        d = np.ascontiguousarray(split[:, :, :2]).view("<f2").astype(np.float32)[:, :, 0]
        return Ternary(_LANES.unpack(split[:, :, 2:].reshape(-1)).reshape(len(blocks), k), d)

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Return codes * d."""
        k = as_matrix(shape)[1]
        blocks = part(parts, "blocks").reshape(-1)
        spec = self.specs(shape)["blocks"]
        target = shape
        if rows is not None:
            if blocks.nbytes == spec.nbytes:
                blocks = blocks.reshape(spec.shape)[rows].reshape(-1)
            target = (len(range(spec.shape[0])[rows]), k)
        codes = self.unpack({"blocks": blocks}, target)
        out = output(out, target)
        split = (*codes.scale.shape, 32)
        scaled(codes.codes.reshape(split), codes.scale[:, :, None], out.reshape(split))
        return out

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """Return a matmul handle (ops/matmul.py). Raises CodecError if the size does not match the shape."""
        return packed_rows(self.name, parts, shape, self.specs(shape)["blocks"])


TRINITY_TQ2_0 = TrinityTQ2("trinity.tq2_0")
