"""compressed-tensors checkpoints (llm-compressor) with integer weights, in two layouts.

    int-quantized    weight         i8  [N, K]                 one code per byte, of 8 or 4 bits
    pack-quantized   weight_packed  i32 [N, ceil(K b / 32)]    row n: q + 2^(b - 1) as a b-bit stream (b from 2 to 8),
                                                               lowest bits of a word first
    both             weight_scale   [N, G], [N, 1] or [1]      per group, row or tensor
                     weight_zero_point                         if asymmetric: i8 in the shape of the scales,
                                                               or packed along rows, i32 [ceil(N b / 32), G]
                     weight_g_idx   i32 [K]                    group of each column; only with activation order ("act")
                     input_scale [1], input_zero_point i8 [1]  of statically quantized inputs ("static", "szp")

    w = (q - z) * s

weight_shape i64 [2], stored with packed codes, gives N and K: the last word of a row may be padded.
".dynamic" means that inputs are quantized per token at run time; the bytes are the same.
Names: compressed.i8   compressed.p4.g128   .zp (i8 zero points)   .zpp (packed zero points)   .tensor   .act
       .f16 .f32 (dtype of the scales; default bf16)   .dynamic   .static (input_scale)   .szp (and input_zero_point)
Source: github.com/vllm-project/compressed-tensors (facts).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.affine_codec import (
    AffineCodec,
    group_count,
    grouped_columns,
    stored_codes,
    stored_table,
    unpacked_bits,
)
from polyquant.codecs.arguments import exact_part
from polyquant.codecs.keeping import FLOAT_TYPES, Integers
from polyquant.errors import CodecError, UnknownNameError, UnsupportedError
from polyquant.ops import code_streams, halves, int8
from polyquant.registry import Search
from polyquant.types import F32, I8, U8, Activation, Affine, ArraySpec, Parts, Shape

__all__ = ["NAMES", "CompressedTensors", "compressed_tensors_named"]

_INT8, _INT32 = np.dtype(np.int8), np.dtype(np.int32)
_GRID = Search("polyquant.quantizers.affine:input_grid")
NAMES: tuple[str, ...] = (
    "compressed.i8", "compressed.i8.dynamic", "compressed.p4.g128", "compressed.p4.g128.zpp", "compressed.p8.g128",
)  # fmt: skip
"""Common names of the family, suggested by errors."""


@dataclass(frozen=True, slots=True)
class CompressedTensors(AffineCodec):
    """Integer weights of compressed-tensors.

    bits: 2 to 8. words: codes are packed into 32-bit words. group: columns per scale, 0 for the whole row. zeros: "",
    "zp" (i8) or "zpp" (packed). tensor: one scale per tensor. ordered: a group index per column. dtype: of the scales.
    dynamic: inputs are quantized per token. static: "", "static" or "szp": the parts have a scale of the inputs, and a
    zero point.
    """

    bits: int
    words: bool
    group: int = 0
    zeros: str = ""
    tensor: bool = False
    ordered: bool = False
    dtype: str = "bf16"
    dynamic: bool = False
    static: str = ""

    @property
    def name(self) -> str:
        """Codec name: layout, bits, and the options that are not the default."""
        flags = {
            f"g{self.group}": self.group, self.zeros: self.zeros, "tensor": self.tensor, "act": self.ordered,
            self.dtype: self.dtype != "bf16", "dynamic": self.dynamic, self.static: self.static,
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
        if self.static:
            parts["input_scale"] = ArraySpec((1,), FLOAT_TYPES[self.dtype])
        if self.static == "szp":
            parts["input_zero_point"] = ArraySpec((1,), _INT8)
        return parts | ({"weight_g_idx": ArraySpec((k,), _INT32)} if self.ordered else {})

    @property
    def writable(self) -> bool:
        """False with a group index, which only the program that chose it can give."""
        return not self.ordered

    @property
    def integers(self) -> Integers:
        """Codes of `bits` bits with a scale per group, row or tensor."""
        zero: Any = "integer" if self.zeros else "none"
        dtype: Any = self.dtype
        return Integers(self.bits, self.group, dtype, zero, self.tensor, self.ordered, fixed=bool(self.static))

    @property
    def row_sliced(self) -> bool:
        """True if every part has one entry per row."""
        return not (self.zeros == "zpp" or self.tensor or self.ordered)

    def tables(self, parts: Parts, shape: Shape) -> tuple[F32, F32, None]:
        """Scales and zero points, [N, G], or [N, K] with a group index."""
        scale, offset, _, index = self.group_tables(parts, shape)
        if index is not None:
            scale, offset = (grouped_columns(self.name, table, index) for table in (scale, offset))
        return scale, offset, None

    def group_tables(self, parts: Parts, shape: Shape) -> tuple[F32, F32, None, NDArray[Any] | None]:
        """The same per group [N, G], and the group index."""
        specs, n = self.specs(shape), shape[0]
        scale = _table(exact_part(parts, "weight_scale", specs["weight_scale"]), n)
        if not self.zeros:
            offset = np.zeros_like(scale)
        else:
            stored = exact_part(parts, "weight_zero_point", specs["weight_zero_point"])
            packed = self.zeros == "zpp"
            offset = np.ascontiguousarray(self._signed(stored.T, n).T, np.float32) if packed else _table(stored, n)
        return scale, offset, None, exact_part(parts, "weight_g_idx", specs["weight_g_idx"]) if self.ordered else None

    def codes_of(self, parts: Parts, shape: Shape, rows: slice) -> I8:
        """Signed codes of rows [a, b)."""
        part, spec = next(iter(self.specs(shape).items()))
        stored = exact_part(parts, part, spec)[rows]
        return self._signed(stored, shape[1]) if self.words else np.asarray(stored)

    def input_grid(self, parts: Parts, codes: Affine) -> Activation | None:
        """The scale and zero point of the inputs, with products for symmetric rows; None without them.

        Raises CodecError if a part does not fit, or a sum does not fit int32.
        """
        if not self.static or self.zeros or self.group:
            return None
        kinds = {"input_scale": FLOAT_TYPES[self.dtype], "input_zero_point": np.dtype(np.int8)}
        scale, offset = (
            np.asarray(exact_part(parts, key, ArraySpec((1,), kind)), np.float32)
            if key == "input_scale" or self.static == "szp"
            else np.zeros(1, np.float32)
            for key, kind in kinds.items()
        )
        return _activation(codes, scale, offset)

    @property
    def scales_inputs(self) -> bool:
        """True with static inputs."""
        return bool(self.static)

    def with_inputs(self, codes: Affine, low: float, high: float) -> Affine:
        """The codes with the grid of the inputs; as compressed_tensors.quantization.utils.calculate_qparams."""
        asymmetric, largest = self.static == "szp", max(-low, high, 0.0)
        scale, offset = _GRID((low, high) if asymmetric else (-largest, largest), FLOAT_TYPES[self.dtype])
        offset = offset if asymmetric else np.zeros_like(offset)
        return replace(codes, activation=_activation(codes, scale, offset))

    def stream(self, parts: Parts, shape: Shape) -> U8 | None:
        """The words as they are stored; None for bytes, and for zero points outside the range of codes."""
        if not self.words:
            return None
        specs, half = self.specs(shape), 2 ** (self.bits - 1)
        if self.zeros == "zp":
            stored = exact_part(parts, "weight_zero_point", specs["weight_zero_point"])
            if stored.size and not -half <= int(stored.min()) <= int(stored.max()) < 256 - half:
                return None
        words = exact_part(parts, "weight_packed", specs["weight_packed"])
        return np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8)

    def pack_rows(self, codes: Affine, start: int, out: dict[str, Any], shape: Shape) -> None:
        """Write rows of codes. Raises CodecError if the codes or their scales cannot be held, UnsupportedError with
        static inputs for codes without a grid of the inputs.
        """
        if self.static:
            out |= self._stored_grid(codes.activation)
        scales = out["weight_scale"]
        got = stored_codes(self.name, codes, self.integers, 1 if self.tensor else scales.shape[1])
        rows = slice(start, start + len(codes.codes))
        if self.words:
            code_streams.pack_into(got.raw, out["weight_packed"][rows].view(np.uint8), self.bits, got.shift)
        else:
            shift = np.uint8((got.shift - 2 ** (self.bits - 1)) % 256)
            out["weight"][rows] = ((got.raw + shift) if shift else got.raw).view(np.int8)
        table = stored_table(self.name, "scales", got.scale, scales.dtype)
        zero = got.zero - np.float32(2 ** (self.bits - 1)) if self.zeros else got.zero
        if self.tensor:
            if (table != table[:1]).any() or (start and scales[0] != table[0, 0]):
                raise CodecError(f"{self.name} has one scale per tensor", found="several", hint="requantize")
            table, zero, rows = table[0], zero[0], slice(0, 1)
        scales[rows] = table
        if self.zeros == "zp":
            out["weight_zero_point"][rows] = zero.astype(np.int8)
        elif self.zeros:
            words = out["weight_zero_point"]
            first = start * self.bits // 32
            stream = code_streams.pack(got.zero.T.astype(np.uint8), self.bits, _pitch(codes, self))
            words[first : first + stream.shape[1] // 4] = stream.view("<i4").T
        if self.ordered:
            out["weight_g_idx"][:] = got.index

    def _stored_grid(self, grid: Activation | None) -> dict[str, NDArray[Any]]:
        if grid is None:
            raise UnsupportedError(
                f"{self.name} needs a scale of the inputs", hint="choose a codec without .static or .szp"
            )
        low, high = (-128, 127) if self.static == "szp" else (0, 0)
        if (grid.offset != np.clip(np.rint(grid.offset), low, high)).any():
            raise CodecError(
                f"{self.name} cannot hold the zero point of the inputs", expected=f"an integer from {low} to {high}",
                found=f"{grid.offset[0]:g}", hint="choose a codec without .static or .szp",
            )  # fmt: skip
        scale = stored_table(self.name, "input scales", grid.scale, FLOAT_TYPES[self.dtype])
        return {"input_scale": scale} | (
            {"input_zero_point": grid.offset.astype(np.int8)} if self.static == "szp" else {}
        )

    def _signed(self, words: Any, count: int) -> I8:
        """int32 [rows, words] -> int8 [rows, count]; modulo 256, which is two's complement."""
        return unpacked_bits(words, self.bits, count, 2 ** (self.bits - 1)).view(np.int8)


def _activation(codes: Affine, scale: F32, offset: F32) -> Activation:
    """The grid of the inputs with its products. Raises CodecError if a sum does not fit int32."""
    with np.errstate(all="ignore"):
        deq = codes.scale[:, 0] * scale
    total = int8.quant_bias(None, deq, offset, codes.codes.sum(1, dtype=np.int64))
    if np.abs(total).max(initial=0) > np.iinfo(np.int32).max:
        raise CodecError("a sum of codes times the zero point does not fit int32", found=f"{np.abs(total).max():g}")
    return Activation(scale, offset, deq, total.astype(np.int32))


def _pitch(codes: Affine, codec: CompressedTensors) -> int:
    """Bytes of one group's zero points of these rows."""
    return code_streams.pitch_of(len(codes.codes), codec.bits)


def _table(values: Any, n: int) -> F32:
    """[N, G] or [1] -> float32 [N, G]."""
    array = halves.widen(values)
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
        "static": next((w for w in words if w in ("static", "szp")), ""),
        "dtype": next((w for w in words if w in FLOAT_TYPES), "bf16"),
        "group": next((int(w[1:]) for w in words if w[:1] == "g" and w[1:].isdecimal() and len(w) < 8), 0),
    }
    if layout in ("i8", "i4") or (layout[:1] == "p" and layout[1:] in map(str, range(2, 9))):
        codec = CompressedTensors(int(layout[1]), layout[0] == "p", **flags)
        if codec.name == name:
            return codec
    raise UnknownNameError("codec", name, NAMES)
