"""ggml's nvfp4 with the scale of the tensor, which GGUF files of llama.cpp store as a separate tensor.

    X.weight        nvfp4 [N, K]    blocks of 64: 4 scale bytes, 32 bytes of codes (codecs/ggml_fp4.py)
    X.scale         f32 [1]         w = nvfp4 value * scale
    X.input_scale   f32 [1]         scale of the inputs as in ModelOpt's folders ("static")

llama.cpp omits a scale of 1, multiplies the product by X.scale, and loads X.input_scale without using it.
Source: llama.cpp, conversion/base.py: _repack_nvfp4, src/llama-model.cpp: load_tensors (facts).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.blocks import check_columns
from polyquant.codecs.float_codec import FloatCodec, codes_form, paired_codes, stored_scalar, stored_scales
from polyquant.codecs.ggml_fp4 import NVFP4
from polyquant.codecs.hf_nvfp4 import hf_nvfp4_named
from polyquant.codecs.keeping import SmallFloats
from polyquant.errors import CodecError, UnknownNameError
from polyquant.ops import small_floats
from polyquant.types import F32, U8, ArraySpec, Parts, ScaledFloats, Shape, as_matrix

__all__ = ["NAMES", "NVFP4_SCALED", "NVFP4_SCALED_STATIC", "ScaledNvfp4", "ggml_nvfp4_named"]

NAMES: tuple[str, ...] = ("nvfp4.scaled",)
"""Common names of the family, suggested by errors."""

_GROUP, _TOGETHER = 16, 4


@dataclass(frozen=True, slots=True)
class ScaledNvfp4(FloatCodec):
    """The codec; see the module docstring. static: with a scale of the inputs."""

    static: bool = False

    @property
    def name(self) -> str:
        """The name."""
        return "nvfp4.scaled" + (".static" if self.static else "")

    @property
    def granule(self) -> tuple[int, int]:
        """Blocks of 64 columns."""
        return 1, NVFP4.block

    @property
    def floats(self) -> SmallFloats:
        """4-bit floats with a scale per 16 columns and one for the tensor."""
        return SmallFloats("e2m1", "e4m3", (1, _GROUP), "multiplies", finite=True)

    @property
    def lines(self) -> dict[str, int]:
        """Blocks by rows."""
        return {"blocks": 1, "scale": 0, **({"input_scale": 0} if self.static else {})}

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """{"blocks": u8 [rows, K / 64 * 36], "scale": f32 [1]}, and "input_scale" f32 [1].

        Raises CodecError if K is not a multiple of 64.
        """
        check_columns(self.name, shape, NVFP4.block)
        one = ArraySpec((1,), np.dtype(np.float32))
        return NVFP4.specs(shape) | {part: one for part, line in self.lines.items() if line == 0}

    def tables(self, parts: Parts, shape: Shape) -> ScaledFloats:
        """The scales of groups, of the tensor and of the inputs."""
        blocks = self._part(parts, shape, "blocks")
        cells = blocks.reshape(len(blocks), -1, NVFP4.type_size)[:, :, :_TOGETHER]
        scale = np.ascontiguousarray(cells).reshape(len(blocks), -1)
        tensor = self._part(parts, shape, "scale")
        inputs = self._part(parts, shape, "input_scale") if self.static else None
        codes = np.empty((0, shape[-1]), np.uint8)
        return ScaledFloats("e2m1", codes, "e4m3", scale, (1, _GROUP), 0, tensor, False, inputs)

    def codes_of(self, parts: Parts, shape: Shape, rows: slice) -> U8:
        """The nibbles of each row."""
        stream, _ = small_floats.split_blocks(self._part(parts, shape, "blocks")[rows], _GROUP, _TOGETHER)
        return small_floats.nibbles(stream)

    def unpack_paired(self, parts: Parts, shape: Shape) -> ScaledFloats:
        """The bytes in order of columns."""
        stream, _ = small_floats.split_blocks(self._part(parts, shape, "blocks"), _GROUP, _TOGETHER)
        return replace(self.tables(parts, shape), codes=stream, paired=True)

    def pack(self, codes: ScaledFloats) -> dict[str, NDArray[Any]]:
        """Pack codes to parts. Raises CodecError for scales that ggml reads as other values."""
        given, (n, k) = codes_form(self, codes), codes.shape
        scale = stored_scales(self.name, given, self.floats, (n, k // _GROUP))
        if (scale >= 0x7F).any():
            raise CodecError(f"{self.name} has no negative or NaN scales", hint="requantize")
        blocks = small_floats.join_blocks(paired_codes(given), scale, _GROUP, _TOGETHER)
        tensor = stored_scalar(given.tensor, given.divides, dividing=False)
        if not self.static:
            return {"blocks": blocks, "scale": tensor}
        if given.inputs is None:
            raise CodecError(f"{self.name} needs the scale of the inputs", hint="choose nvfp4.scaled")
        inputs = stored_scalar(given.inputs, given.divides, dividing=False)
        return {"blocks": blocks, "scale": tensor, "input_scale": inputs}

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Parts to float32: the values of ggml's blocks times the scale of the tensor, rounded once more."""
        decoded = NVFP4.dequantize({"blocks": self._part(parts, shape, "blocks")}, shape, rows=rows, out=out)
        with np.errstate(all="ignore"):
            decoded *= self._part(parts, shape, "scale")[0]
        return decoded

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """Return a matmul handle (ops/matmul.py) on a copy in the order of columns; None without a native kernel.

        Raises CodecError if a part does not fit.
        """
        ordered = hf_nvfp4_named("hf_nvfp4")
        return ordered.packed(ordered.pack(self.unpack_paired(parts, as_matrix(shape))), as_matrix(shape))


NVFP4_SCALED = ScaledNvfp4()
NVFP4_SCALED_STATIC = ScaledNvfp4(static=True)


def ggml_nvfp4_named(name: str) -> ScaledNvfp4:
    """Return the codec called `name`: "nvfp4.scaled.static". Raises UnknownNameError."""
    if name != NVFP4_SCALED_STATIC.name:
        raise UnknownNameError("codec", name, NAMES)
    return NVFP4_SCALED_STATIC
