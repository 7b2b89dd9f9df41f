"""ggml's nvfp4 with the scale of the tensor, which GGUF files of llama.cpp store as a separate tensor.

    X.weight        nvfp4 [N, K]    blocks of 64: 4 scale bytes, 32 bytes of codes (codecs/ggml_fp4.py)
    X.scale         f32 [1]         w = nvfp4 value * scale
    X.input_scale   f32 [1]         scale of the inputs as in ModelOpt's folders ("static")

In a stack [E, N, K] of experts both scales are f32 [E], one for each expert: nvfp4.scaled.r768 for experts of 768 rows.

llama.cpp omits scales that are all 1, multiplies the product by X.scale, and loads X.input_scale without using it.
Source: llama.cpp, conversion/base.py: _repack_nvfp4, _flush_nvfp4_experts, src/llama-model.cpp: load_tensors (facts).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyquant.capabilities import Cut
from polyquant.codecs.arguments import real
from polyquant.codecs.blocks import check_columns
from polyquant.codecs.float_codec import (
    FloatCodec,
    codes_form,
    paired_codes,
    single_scalar,
    stored_scalar,
    stored_scales,
)
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
_F32 = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class ScaledNvfp4(FloatCodec):
    """The codec; see the module docstring. static: with a scale of the inputs. rows: of a matrix of a stack with scales
    for each; 0 for one scale.
    """

    static: bool = False
    rows: int = 0

    @property
    def name(self) -> str:
        """The name."""
        return "nvfp4.scaled" + (".static" if self.static else "") + (f".r{self.rows}" if self.rows else "")

    @property
    def granule(self) -> tuple[int, int]:
        """Blocks of 64 columns, and whole matrices."""
        return self.rows or 1, NVFP4.block

    @property
    def floats(self) -> SmallFloats:
        """4-bit floats with a scale per 16 columns and one for the tensor, or for each matrix."""
        return SmallFloats("e2m1", "e4m3", (1, _GROUP), "multiplies", finite=True, rows=self.rows)

    @property
    def lines(self) -> dict[str, int]:
        """Blocks by rows."""
        return {"blocks": 1, "scale": self.rows, **({"input_scale": self.rows} if self.static else {})}

    @property
    def needs_peak(self) -> bool:
        """True for one scale: matrices with their own are quantized one by one."""
        return not self.rows

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """{"blocks": u8 [rows, K / 64 * 36], "scale": f32 [1]}, and "input_scale" f32 [1]; [E] in a stack.

        Raises CodecError if K is not a multiple of 64.
        """
        check_columns(self.name, shape, NVFP4.block)
        scalars = ArraySpec((-(-as_matrix(shape)[0] // self.rows) if self.rows else 1,), _F32)
        return NVFP4.specs(shape) | {part: scalars for part in self.lines if part != "blocks"}

    def cut(self, shape: Shape, index: int) -> tuple[ScaledNvfp4, dict[str, Cut]]:
        """Cut matrix `index` out of a stack: its rows and its scales. Raises CodecError for a single scale."""
        n = shape[-2]
        if self.rows != n:
            raise CodecError(f"a stack in {self.name} cannot be split", expected=f"a scale per {n} rows")
        parts = dict.fromkeys(self.lines, Cut((slice(index, index + 1),)))
        return replace(self, rows=0), parts | {"blocks": Cut((slice(index * n, (index + 1) * n),))}

    def tables(self, parts: Parts, shape: Shape) -> ScaledFloats:
        """The scales of groups, of the tensor and of the inputs."""
        blocks = self._part(parts, shape, "blocks")
        cells = blocks.reshape(len(blocks), -1, NVFP4.type_size)[:, :, :_TOGETHER]
        scale = np.ascontiguousarray(cells).reshape(len(blocks), -1)
        tensor = self._scalars(parts, shape, "scale")
        inputs = self._scalars(parts, shape, "input_scale") if self.static else None
        codes = np.empty((0, shape[-1]), np.uint8)
        return ScaledFloats("e2m1", codes, "e4m3", scale, (1, _GROUP), 0, tensor, False, inputs)

    def _scalars(self, parts: Parts, shape: Shape, key: str) -> F32:
        """One scale [1], or that of each row [rows, 1]."""
        stored: F32 = self._part(parts, shape, key)
        return np.repeat(stored, self.rows)[: as_matrix(shape)[0], None] if self.rows else stored

    def codes_of(self, parts: Parts, shape: Shape, rows: slice) -> U8:
        """The nibbles of each row."""
        stream, _ = small_floats.split_blocks(self._part(parts, shape, "blocks")[rows], _GROUP, _TOGETHER)
        return small_floats.nibbles(stream)

    def unpack_paired(self, parts: Parts, shape: Shape) -> ScaledFloats:
        """The bytes in order of columns."""
        stream, _ = small_floats.split_blocks(self._part(parts, shape, "blocks"), _GROUP, _TOGETHER)
        return replace(self.tables(parts, shape), codes=stream, paired=True)

    def quantize(self, w: ArrayLike, *, importance: ArrayLike | None = None, peak: float | None = None) -> ScaledFloats:
        """Quantize floats [..., K]; rows with their own scales matrix by matrix. Raises CodecError."""
        if not self.rows:
            return FloatCodec.quantize(self, w, importance=importance, peak=peak)
        floats = real(self.name, w)
        self.specs(floats.shape)
        matrix, one = floats.reshape(as_matrix(floats.shape)), replace(self, rows=0)
        made = [FloatCodec.quantize(one, matrix[a : a + self.rows], importance=importance)
                for a in range(0, max(1, len(matrix)), self.rows)]  # fmt: skip
        scales = [np.repeat(x.tensor, len(x.codes))[:, None] for x in made if x.tensor is not None]
        codes, scale = np.concatenate([x.codes for x in made]), np.concatenate([x.scale for x in made])
        return replace(made[0], codes=codes, scale=scale, tensor=np.concatenate(scales))

    def pack(self, codes: ScaledFloats) -> dict[str, NDArray[Any]]:
        """Pack codes to parts. Raises CodecError for scales that ggml reads as other values."""
        given, (n, k) = codes_form(self, codes), codes.shape
        scale = stored_scales(self.name, given, self.floats, (n, k // _GROUP))
        if (scale >= 0x7F).any():
            raise CodecError(f"{self.name} has no negative or NaN scales", hint="requantize")
        blocks = small_floats.join_blocks(paired_codes(given), scale, _GROUP, _TOGETHER)
        parts: dict[str, NDArray[Any]] = {"blocks": blocks, "scale": self._stored(given, given.tensor)}
        if not self.static:
            return parts
        if given.inputs is None:
            raise CodecError(f"{self.name} needs the scale of the inputs", hint="choose nvfp4.scaled")
        return parts | {"input_scale": self._stored(given, given.inputs)}

    def _stored(self, codes: ScaledFloats, value: F32 | None) -> F32:
        """A scale as stored, [1], or one for each matrix. Raises CodecError if the rows of a matrix have several."""
        if not self.rows:
            return stored_scalar(value, codes.divides, dividing=False)
        n = codes.shape[0]
        count = -(-n // self.rows)
        if value is None or value.ndim == 1:
            return np.repeat(stored_scalar(value, codes.divides, dividing=False), count)
        each = [single_scalar(value[a : a + self.rows]) for a in range(0, n, self.rows)]
        stored = [stored_scalar(x, codes.divides, dividing=False) for x in each]
        return np.concatenate([np.empty(0, np.float32), *stored])

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Parts to float32: the values of ggml's blocks times the scale of the tensor, rounded once more."""
        decoded = NVFP4.dequantize({"blocks": self._part(parts, shape, "blocks")}, shape, rows=rows, out=out)
        scale = self._scalars(parts, shape, "scale")
        scale = scale[slice(None) if rows is None else rows] if scale.ndim == 2 else scale
        with np.errstate(all="ignore"):
            decoded.reshape(as_matrix(decoded.shape))[...] *= scale
        return decoded

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """Return a matmul handle (ops/matmul.py) on a copy in the order of columns; None without a native kernel, and
        for several scales.

        Raises CodecError if a part does not fit.
        """
        if len(self._part(parts, shape, "scale")) != 1:
            return None
        ordered = hf_nvfp4_named("hf_nvfp4")
        return ordered.packed(ordered.pack(self.unpack_paired(parts, as_matrix(shape))), as_matrix(shape))


NVFP4_SCALED = ScaledNvfp4()
NVFP4_SCALED_STATIC = ScaledNvfp4(static=True)


@cache
def ggml_nvfp4_named(name: str) -> ScaledNvfp4:
    """Return the codec called `name`: "nvfp4.scaled.static", "nvfp4.scaled.r768". Raises UnknownNameError."""
    words = name.split(".")[2:]
    digits = words[-1][1:] if words and words[-1][:1] == "r" else ""
    rows = int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 10 else 0
    codec = ScaledNvfp4("static" in words, rows)
    if codec.name != name:
        raise UnknownNameError("codec", name, NAMES)
    return codec
