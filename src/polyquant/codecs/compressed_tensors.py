"""compressed-tensors checkpoints (llm-compressor) with integer weights, in their two layouts.

    int-quantized    weight         i8  [N, K]                 codes as they are
    pack-quantized   weight_packed  i32 [N, ceil(K b / 32)]    row n: the stream of q + 2^(b - 1), b = 4 or 8 bits, from the lowest bits of a word up
    both             weight_scale   [N, G], [N, 1] or [1]      one for a group, a row, the matrix
                     weight_zero_point                         where asymmetric: i8 of the scale's shape, or packed along the rows, i32 [ceil(N b / 32), G]
                     weight_g_idx   i32 [K]                    group of each column; only where columns were quantized in another order ("act")

    w = (q - z) * s                 weight_shape i64 [2] beside packed codes says N and K: the last word of a row may be padded

".dynamic" says that inputs are rounded per token when it runs; the bytes are the same.
Names: compressed.i8   compressed.p4.g128   .zp (i8 zeros) .zpp (packed zeros)   .tensor   .act   .f16 .f32 (dtype of the scales; default bf16)   .dynamic
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
"""Usual members of the family, for errors that say which names are near."""


@dataclass(frozen=True, slots=True)
class CompressedTensors(AffineReader):
    """bits: 4 or 8. words: codes packed into words of 32 bits. group: columns of a scale, 0 for all. zeros: "", "zp" (i8) or "zpp" (packed). tensor: one scale.
    ordered: columns name their group. dtype: of the scales. dynamic: inputs are rounded too."""

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
        """Layout and bits, and what is not the default."""
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
        """Rounded per token where config.json says so."""
        return "token" if self.dynamic else "floats"

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Sizes of the parts of a weight [N, K]. Raises CodecError where groups do not divide it."""
        groups = group_count(self.name, shape, self.group)
        n, k = shape
        table = (1,) if self.tensor else (n, groups)
        found = (
            {"weight_packed": ArraySpec((n, -(-k * self.bits // 32)), _INT32)}
            if self.words
            else {"weight": ArraySpec((n, k), _INT8)}
        )
        found["weight_scale"] = ArraySpec(table, FLOAT_TYPES[self.dtype])
        if self.zeros == "zp":
            found["weight_zero_point"] = ArraySpec(table, _INT8)
        elif self.zeros:
            found["weight_zero_point"] = ArraySpec((-(-n * self.bits // 32), groups), _INT32)
        return found | ({"weight_g_idx": ArraySpec((k,), _INT32)} if self.ordered else {})

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
        """Parts to codes; with weight_g_idx a scale and an offset for each column. Raises CodecError if a part does not fit."""
        found: dict[str, Any] = {key: exact_part(parts, key, spec) for key, spec in self.specs(shape).items()}
        n, k = shape
        codes = self._signed(found["weight_packed"], k) if self.words else np.asarray(found["weight"])
        scale = _table(found["weight_scale"], n)
        offset = self.offsets(parts, shape)
        if self.ordered:
            scale, offset = (grouped_columns(self.name, table, found["weight_g_idx"]) for table in (scale, offset))
        return Affine(self.bits, codes, scale, offset)

    def _signed(self, words: Any, count: int) -> I8:
        """int32 [rows, words] -> int8 [rows, count]."""
        stored = unpacked_bits(words, self.bits)[:, :count]
        return (stored - np.uint8(2 ** (self.bits - 1))).view(
            np.int8
        )  # modulo 256: the two's complement of what it means


def _table(values: Any, n: int) -> F32:
    """[N, G] or [1] -> float32 [N, G]."""
    found = np.asarray(values, np.float32)
    return np.ascontiguousarray(np.broadcast_to(found, (n, 1)) if found.ndim == 1 else found)


@cache
def compressed_tensors_named(name: str) -> CompressedTensors:
    """The codec of a name, e.g. "compressed.p4.g128". Raises UnknownNameError."""
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
