"""NVFP4 in Hugging Face and MLX folders: 4-bit floats (E2M1) with an E4M3 scale per 16 columns.

    weight          u8 [N, K / 2]        byte j of a row: low nibble column 2 j, high nibble column 2 j + 1
    weight_scale    e4m3 [N, K / 16]
    weight_scale_2  f32 [1]              scale of the tensor; not in hf_nvfp4.plain
    input_scale     f32 [1]              scale of the inputs ("static")

    hf_nvfp4         w = e2m1 * (scale * scale_2)    ModelOpt
    hf_nvfp4.div     w = e2m1 * (scale / scale_2)    compressed-tensors: weight_packed, weight_global_scale,
                                                     input_global_scale
    hf_nvfp4.plain   w = e2m1 * scale                MLX

4.5 bits per weight. The parts have these names in all files' weights; formats/huggingface knows the names in files.
GGUF's nvfp4 has the same scales and codes: byte j of a group holds its columns j and j + 8 (codecs/ggml_fp4.py).
Source: github.com/vllm-project/compressed-tensors, ModelOpt's export, mlx (facts).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.float_codec import (
    FloatCodec,
    codes_form,
    paired_codes,
    scaled_inputs,
    stored_scalar,
    stored_scales,
)
from polyquant.codecs.keeping import SmallFloats
from polyquant.errors import CodecError, UnknownNameError
from polyquant.ops import grouped, small_floats
from polyquant.types import U8, ArraySpec, Parts, ScaledFloats, Shape, as_matrix

__all__ = ["NAMES", "HFNvfp4", "hf_nvfp4_named"]

GROUP = 16
_E4M3, _F32, _U8 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.float32), np.dtype(np.uint8)
NAMES: tuple[str, ...] = ("hf_nvfp4", "hf_nvfp4.div", "hf_nvfp4.plain")
"""Common names of the family, suggested by errors."""
_WORDS: dict[str, Literal["", "multiplies", "divides"]] = {"": "multiplies", "div": "divides", "plain": ""}


@dataclass(frozen=True, slots=True)
class HFNvfp4(FloatCodec):
    """NVFP4. tensor: how the scale of the tensor applies, "" without one. static: with a scale of the inputs."""

    tensor: Literal["", "multiplies", "divides"] = "multiplies"
    static: bool = False

    @property
    def name(self) -> str:
        """Codec name: how the scale of the tensor applies, and whether there is one of the inputs."""
        word = next(w for w, tensor in _WORDS.items() if tensor == self.tensor)
        return ".".join(["hf_nvfp4", *filter(None, (word, "static" * self.static))])

    @property
    def granule(self) -> tuple[int, int]:
        """Groups of 16 columns."""
        return 1, GROUP

    @property
    def floats(self) -> SmallFloats:
        """4-bit floats with a scale per 16 columns."""
        return SmallFloats("e2m1", "e4m3", (1, GROUP), self.tensor)

    @property
    def lines(self) -> dict[str, int]:
        """Codes and scales by rows."""
        scalars = (["weight_scale_2"] if self.tensor else []) + (["input_scale"] if self.static else [])
        return {"weight": 1, "weight_scale": 1, **dict.fromkeys(scalars, 0)}

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [..., K]. Raises CodecError if K is not a multiple of 16."""
        n, k = self._rows(shape, GROUP)
        parts = {"weight": ArraySpec((n, k // 2), _U8), "weight_scale": ArraySpec((n, k // GROUP), _E4M3)}
        return parts | {key: ArraySpec((1,), _F32) for key, line in self.lines.items() if line == 0}

    def tables(self, parts: Parts, shape: Shape) -> ScaledFloats:
        """The scales of groups, of the tensor and of the inputs."""
        scale = np.ascontiguousarray(self._part(parts, shape, "weight_scale")).view(np.uint8)
        tensor = self._part(parts, shape, "weight_scale_2") if self.tensor else None
        inputs = self._part(parts, shape, "input_scale") if self.static else None
        codes = np.empty((0, shape[-1]), np.uint8)
        return ScaledFloats("e2m1", codes, "e4m3", scale, (1, GROUP), 0, tensor, self.tensor == "divides", inputs)

    def codes_of(self, parts: Parts, shape: Shape, rows: slice) -> U8:
        """The nibbles of each row."""
        return small_floats.nibbles(self._part(parts, shape, "weight")[rows])

    @property
    def scales_inputs(self) -> bool:
        """True with static inputs."""
        return self.static

    def with_inputs(self, codes: ScaledFloats, low: float, high: float) -> ScaledFloats:
        """The codes with the scale of the inputs: their groups have scales up to 448 for values up to 6."""
        return scaled_inputs(codes, low, high, 6.0 * 448.0)

    def unpack_paired(self, parts: Parts, shape: Shape) -> ScaledFloats:
        """The bytes as they are."""
        return replace(self.tables(parts, shape), codes=self._part(parts, shape, "weight"), paired=True)

    def pack(self, codes: ScaledFloats) -> dict[str, NDArray[Any]]:
        """Pack codes to parts. Raises CodecError for scales that the codec cannot hold."""
        given, shape = codes_form(self, codes), codes.shape
        specs = self.specs(shape)
        scale = stored_scales(self.name, given, self.floats, specs["weight_scale"].shape)
        parts: dict[str, NDArray[Any]] = {"weight": paired_codes(given), "weight_scale": scale.view(_E4M3)}
        dividing = self.tensor == "divides"
        if self.tensor:
            parts["weight_scale_2"] = stored_scalar(given.tensor, given.divides, dividing=dividing)
        if self.static:
            if given.inputs is None:
                raise CodecError(f"{self.name} needs the scale of the inputs", hint="choose a codec without .static")
            parts["input_scale"] = stored_scalar(given.inputs, given.divides, dividing=dividing)
        return parts

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """Return a matmul handle (ops/matmul.py) on the stored bytes; None without a native kernel.

        Raises CodecError if a part does not fit.
        """
        blocks, scale = (self._part(parts, shape, key) for key in ("weight", "weight_scale"))
        factor = 1.0
        if self.tensor:
            whole = self._part(parts, shape, "weight_scale_2")[0]
            with np.errstate(all="ignore"):
                factor = float(np.float32(1) / whole if self.tensor == "divides" else whole)
        return grouped.handle(grouped.Grouped(blocks, "e2m1", as_matrix(shape), scale, GROUP, factor=factor))


@cache
def hf_nvfp4_named(name: str) -> HFNvfp4:
    """Return the codec called `name`, e.g. "hf_nvfp4.div.static". Raises UnknownNameError."""
    words = name.split(".")[1:]
    kind = next((w for w in words if w in _WORDS), "")
    codec = HFNvfp4(_WORDS[kind], "static" in words)
    if codec.name != name:
        raise UnknownNameError("codec", name, NAMES)
    return codec
