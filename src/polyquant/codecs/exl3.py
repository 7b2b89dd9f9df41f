"""EXL3, the trellis-coded weights of ExLlamaV3, in their safetensors layout.

    trellis  i16 [K / 16, N / 16, 16 k]   256 k-bit codes per tile: a circular stream of 32-bit words, most significant
                                          bit first; state j = the 16 bits that end with code j; positions in the order
                                          of a tensor-core fragment
    suh      f16 [K]      svh  f16 [N]    signs times channel scales
    mul1 or mcg  i32 [1]                  multiplier of that codebook; "3inst" has no such part

    W^T = diag(suh) . H_K . codebook(state) . H_N . diag(svh)             H: orthonormal, blocks of 128

Bits per weight: k + 16 (1 / K + 1 / N), k = 1 to 8. Read backwards, the stream is that of ops/trellis.py with 16-bit
windows that begin with their code, so reversing the 32-bit words of a tile converts to `trellis.K.CODEBOOK.16.exl3`.
Source: github.com/turboderp-org/exllamav3 (facts; the vectors in tests/vectors/trellis check them).

    exl3.3.mul1   exl3.4.mcg   exl3.2.3inst
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyquant.codecs.arguments import exact_part, finite, of_form, real
from polyquant.codecs.trellis import Trellis
from polyquant.errors import CodecError, UnknownNameError
from polyquant.ops import trellis as ops
from polyquant.types import F32, U8, ArraySpec, Parts, Shape, TrellisCodes

__all__ = ["BLOCK", "EXL3", "MULTIPLIERS", "NAMES", "exl3_named"]

BLOCK = 128
MULTIPLIERS = {"mul1": 0x83DCD12D, "mcg": 0xCBAC1FED}
_CODEBOOKS = (*MULTIPLIERS, "3inst")
NAMES: tuple[str, ...] = tuple(f"exl3.{bits}.{codebook}" for bits in range(1, 9) for codebook in _CODEBOOKS)
"""Every codec name of the family."""


@dataclass(frozen=True, slots=True, eq=False)
class EXL3:
    """EXL3 weights. bits: 1 to 8. codebook: mul1, mcg or 3inst."""

    bits: int
    codebook: str

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """Codec name: bits and codebook."""
        return f"exl3.{self.bits}.{self.codebook}"

    @property
    def form(self) -> type[TrellisCodes]:
        """Trellis codes, per tile."""
        return TrellisCodes

    @property
    def granule(self) -> tuple[int, int]:
        """Whole Hadamard blocks along both axes."""
        return BLOCK, BLOCK

    @property
    def row_sliced(self) -> bool:
        """False: the rotation mixes outputs."""
        return False

    def trellis(self, shape: Shape) -> Trellis:
        """Return the Trellis v3 codec that holds a weight of this shape with the same codes."""
        del shape
        return Trellis(self.bits).configure(codebook=self.codebook, window_bits=16, tile_order="exl3")

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [N, K].

        Raises CodecError for a non-matrix, or if N or K is not a multiple of 128.
        """
        if len(shape) != 2 or 0 in shape or shape[0] % BLOCK or shape[1] % BLOCK:
            raise CodecError(
                f"{self.name} needs a matrix whose sides are multiples of {BLOCK}", found=f"shape {list(shape)}"
            )
        n, k = shape
        half = np.dtype(np.float16)
        parts = {
            "trellis": ArraySpec((k // 16, n // 16, 16 * self.bits), np.dtype(np.int16)),
            "suh": ArraySpec((k,), half),
            "svh": ArraySpec((n,), half),
        }
        return parts | ({self.codebook: ArraySpec((1,), np.dtype(np.int32))} if self.codebook in MULTIPLIERS else {})

    # ------------------------------------------------------------ layout

    def pack(self, codes: TrellisCodes) -> dict[str, NDArray[Any]]:
        """Pack codes to parts; scales are folded into svh, and both vectors are rounded to half precision.

        Raises CodecError if the codes belong to another codec, have several groups of scales or scales that differ
        within a rotation block, or overflow half precision.
        """
        of_form(self, codes)
        shape = (len(codes.sv), len(codes.su))
        self.specs(shape)
        if codes.code != self.trellis(shape).code(shape) or len(codes.scales) != 1:
            raise CodecError(f"codes do not belong to {self.name}", expected=self.trellis(shape).name, found=codes.code)
        blocks = codes.scales[0].reshape(-1, BLOCK)
        if (blocks != blocks[:, :1]).any():  # svh applies after the rotation along N, scales before it
            raise CodecError(
                f"{self.name} has no per-output scale inside its rotation", hint="dequantize it, or keep Trellis v3"
            )
        stream = ops.pack_bits(codes.codes, self.bits)
        parts: dict[str, NDArray[Any]] = {
            "trellis": _reversed_words(stream).view("<i2"),
            "suh": _half("suh", codes.su),
            "svh": _half("svh", codes.sv * codes.scales[0]),
        }
        if self.codebook in MULTIPLIERS:
            parts[self.codebook] = np.array([MULTIPLIERS[self.codebook]], np.uint32).view(np.int32)
        return parts

    def unpack(self, parts: Parts, shape: Shape) -> TrellisCodes:
        """Unpack parts to codes. Raises CodecError if a part does not fit or holds a wrong multiplier."""
        arrays = {key: exact_part(parts, key, spec) for key, spec in self.specs(shape).items()}
        if self.codebook in MULTIPLIERS:
            multiplier = int(arrays[self.codebook].view(np.uint32)[0])
            if multiplier != MULTIPLIERS[self.codebook]:
                expected = MULTIPLIERS[self.codebook]
                raise CodecError(f"wrong multiplier for codebook {self.codebook}", expected=expected, found=multiplier)
        stream = np.ascontiguousarray(arrays["trellis"].astype("<i2", copy=False)).view(np.uint8)
        return TrellisCodes(
            self.trellis(shape).code(shape),
            ops.unpack_bits(_reversed_words(stream), self.bits),
            np.ones((1, shape[0]), np.float32),
            arrays["suh"].astype(np.float32),
            arrays["svh"].astype(np.float32),
        )

    # ------------------------------------------------------------ math

    def quantize(self, w: ArrayLike, *, importance: ArrayLike | None = None) -> TrellisCodes:
        """Quantize floats [N, K]: the path of least squared error.

        Raises CodecError for a non-matrix or NaN or infinity.

        The scale of an output lies outside the rotation along N (in svh), so each row is divided by its root mean
        square first; the rest has one scale per block.
        """
        target = finite(self.name, real(self.name, w))
        self.specs(target.shape)
        size = np.asarray(np.sqrt(np.square(target, dtype=np.float64).mean(1)), np.float32)  # [N]
        size[~(size > 0)] = 1
        codes = self.trellis(target.shape).quantize(target / size[:, None], importance=importance)
        blocks = codes.scales.reshape(-1, BLOCK).mean(1, dtype=np.float64)
        scales = np.repeat(blocks, BLOCK)[None].astype(np.float32)
        return replace(codes, scales=scales, sv=codes.sv * size)

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Parts to float32 [N, K]; all rows are decoded even if only `rows` are returned."""
        codec = self.trellis(shape)
        return codec.dequantize(codec.pack(self.unpack(parts, shape)), shape, rows=rows, out=out)


def _reversed_words(stream: U8) -> U8:
    """Reverse the order of the 32-bit words in bytes [..., 4 n]; its own inverse."""
    words = stream.reshape(*stream.shape[:-1], -1, 4)
    return np.ascontiguousarray(words[..., ::-1, :]).reshape(stream.shape)


def _half(key: str, values: F32) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if not np.isfinite(half).all():
        raise CodecError(f"{key} does not fit half precision", found=float(np.abs(values).max()))
    return half


def exl3_named(name: str) -> EXL3:
    """Return the codec called `name`, e.g. "exl3.3.mul1". Raises UnknownNameError."""
    if name not in NAMES:
        raise UnknownNameError("codec", name, NAMES)
    _, bits, codebook = name.split(".")
    return EXL3(int(bits), codebook)
