"""compressed-tensors checkpoints (llm-compressor) with integer weights, in two layouts.

    int-quantized    weight         i8  [N, K]                 one code per byte
    pack-quantized   weight_packed  i32 [N, ceil(K b / 32)]    row n: q + 2^(b - 1) as a b-bit stream (b = 4 or 8),
                                                               lowest bits of a word first
    both             weight_scale   [N, G], [N, 1] or [1]      per group, row or tensor
                     weight_zero_point                         if asymmetric: i8 in the shape of the scales,
                                                               or packed along rows, i32 [ceil(N b / 32), G]
                     weight_g_idx   i32 [K]                    group of each column; only with activation order ("act")

    w = (q - z) * s

weight_shape i64 [2], stored with packed codes, gives N and K: the last word of a row may be padded.
".dynamic" means that inputs are quantized per token at run time; the bytes are the same.
Names: compressed.i8   compressed.p4.g128   .zp (i8 zero points)   .zpp (packed zero points)   .tensor   .act
       .f16 .f32 (dtype of the scales; default bf16)   .dynamic
Source: github.com/vllm-project/compressed-tensors (facts).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from polyquant.codecs.affine_reader import FLOAT_TYPES, AffineReader, group_count, grouped_columns, unpacked_bits
from polyquant.codecs.arguments import exact_part
from polyquant.errors import UnknownNameError
from polyquant.ops import int8
from polyquant.types import F32, I8, Affine, ArraySpec, Parts, Shape

__all__ = ["NAMES", "CompressedTensors", "compressed_tensors_named"]

_INT8, _INT32 = np.dtype(np.int8), np.dtype(np.int32)
NAMES: tuple[str, ...] = ("compressed.i8", "compressed.i8.dynamic", "compressed.p4.g128", "compressed.p8.g128")
"""Common names of the family, suggested by errors."""


@dataclass(frozen=True, slots=True)
class CompressedTensors(AffineReader):
    """Integer weights of compressed-tensors.

    bits: 4 or 8. words: codes are packed into 32-bit words. group: columns per scale, 0 for the whole row. zeros: "",
    "zp" (i8) or "zpp" (packed). tensor: one scale per tensor. ordered: a group index per column. dtype: of the scales.
    dynamic: inputs are quantized per token.
    """

    bits: int
    words: bool
    group: int = 0
    zeros: str = ""
    tensor: bool = False
    ordered: bool = False
    dtype: str = "bf16"
    dynamic: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """Codec name: layout, bits, and the options that are not the default."""
        flags = {
            f"g{self.group}": self.group, self.zeros: self.zeros, "tensor": self.tensor, "act": self.ordered,
            self.dtype: self.dtype != "bf16", "dynamic": self.dynamic,
        }  # fmt: skip
        return ".".join(
            [
                "compressed",
                f"{'p' if self.words else 'i'}{self.bits}",
                *(word for word, given in flags.items() if given),
            ]
        )

    @property
    def inputs(self) -> int8.Inputs:
        """Quantized per token if config.json specifies it."""
        return "token" if self.dynamic else "floats"

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [N, K]. Raises CodecError if groups do not divide it."""
        groups = group_count(self.name, shape, self.group)
        n, k = shape
        table = (1,) if self.tensor else (n, groups)
        parts = (
            {"weight_packed": ArraySpec((n, -(-k * self.bits // 32)), _INT32)}
            if self.words
            else {"weight": ArraySpec((n, k), _INT8)}
        )
        parts["weight_scale"] = ArraySpec(table, FLOAT_TYPES[self.dtype])
        if self.zeros == "zp":
            parts["weight_zero_point"] = ArraySpec(table, _INT8)
        elif self.zeros:
            parts["weight_zero_point"] = ArraySpec((-(-n * self.bits // 32), groups), _INT32)
        return parts | ({"weight_g_idx": ArraySpec((k,), _INT32)} if self.ordered else {})

    def offsets(self, parts: Parts, shape: Shape) -> F32:
        """Zero points, [N, G]."""
        specs, n = self.specs(shape), shape[0]
        if not self.zeros:
            return np.zeros((n, 1 if self.tensor else specs["weight_scale"].shape[1]), np.float32)
        stored = exact_part(parts, "weight_zero_point", specs["weight_zero_point"])
        if self.zeros == "zp":
            return _table(stored, n)
        return np.ascontiguousarray(self._signed(stored.T, n).T, np.float32)

    def unpack(self, parts: Parts, shape: Shape) -> Affine:
        """Unpack parts to codes; with weight_g_idx, a scale and an offset per column.

        Raises CodecError if a part does not fit.
        """
        arrays: dict[str, Any] = {key: exact_part(parts, key, spec) for key, spec in self.specs(shape).items()}
        n, k = shape
        codes = self._signed(arrays["weight_packed"], k) if self.words else np.asarray(arrays["weight"])
        scale = _table(arrays["weight_scale"], n)
        offset = self.offsets(parts, shape)
        if self.ordered:
            scale, offset = (grouped_columns(self.name, table, arrays["weight_g_idx"]) for table in (scale, offset))
        return Affine(self.bits, codes, scale, offset)

    def _signed(self, words: Any, count: int) -> I8:
        """int32 [rows, words] -> int8 [rows, count]."""
        stored = unpacked_bits(words, self.bits)[:, :count]
        return (stored - np.uint8(2 ** (self.bits - 1))).view(np.int8)  # modulo 256: two's complement


def _table(values: Any, n: int) -> F32:
    """[N, G] or [1] -> float32 [N, G]."""
    array = np.asarray(values, np.float32)
    return np.ascontiguousarray(np.broadcast_to(array, (n, 1)) if array.ndim == 1 else array)


@cache
def compressed_tensors_named(name: str) -> CompressedTensors:
    """Return the codec called `name`, e.g. "compressed.p4.g128". Raises UnknownNameError."""
    _, layout, *words = [*name.split("."), ""]
    flags: dict[str, Any] = {
        "zeros": next((w for w in words if w in ("zp", "zpp")), ""),
        "tensor": "tensor" in words,
        "ordered": "act" in words,
        "dynamic": "dynamic" in words,
        "dtype": next((w for w in words if w in FLOAT_TYPES), "bf16"),
        "group": next((int(w[1:]) for w in words if w[:1] == "g" and w[1:].isdecimal() and len(w) < 8), 0),
    }
    if layout in ("i8", "p4", "p8"):
        codec = CompressedTensors(int(layout[1]), layout[0] == "p", **flags)
        if codec.name == name:
            return codec
    raise UnknownNameError("codec", name, NAMES)
