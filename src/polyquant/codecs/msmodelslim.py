"""msModelSlim weights (Ascend): int8 and int4 codes with scales, plus the input quantization of static types.

In the file each part is named after its linear layer: `layer.weight`, `layer.weight_scale`, ... Parts by quantization
type:

    W8A16          weight i8 [N, K]   weight_scale, weight_offset [N, 1] or [N, G]      w = (q - offset) * scale
    W8A8_DYNAMIC   the same; inputs are quantized per token at run time: s = max|x| / 127
    W8A8, W8A8S    weight   input_scale, input_offset [1]   deq_scale [N]   quant_bias i32 [N]
                                                                                        w = q * deq_scale / input_scale
                   (older files also contain weight_scale and weight_offset)
    W8A8_MIX       the parts of W8A8 and of W8A8_DYNAMIC: one for prefill, one for decoding
    W4A16          4 bits: one code per byte, or two: even column (or row) in the low nibble, odd one in the high nibble
    W4A8_DYNAMIC   as W4A16, plus scale_bias [N, 1] or [N, 16] = 8 * sums of w over 1 or 16 column blocks; or with two
                   scales per group, weight_scale [N, 1] * weight_scale_second [N, G]

A codec name includes every option that affects the bytes, in this order; the defaults are those of the current tool
(v1):

    w8a16  w8a16.g128  w8a16.asym  w8a8  w8a8s  w8a8.dynamic  w8a8.mix  w4a16  w4a8.dynamic
    .g128       one scale per 128 columns                 .second     with weight_scale_second
    .asym       quantize with offsets                     .tensor     one scale per tensor, [1]
    .f16 .bf16  dtype of the scales (float32)             .flat       scales [N], not [N, 1]
    .xf16 .xbf16 .xf32  dtype of the input scale and offset, if different
    .i64        deq_scale as int64 holding float32 bits, for models that are not bfloat16
    .scales     static types with weight_scale and weight_offset; W8A8_MIX always has them
    .pack_k .pack_n     two 4-bit codes per byte, along the columns or the rows
    .sums1 .sums16      columns of scale_bias

Source: the tool itself, msmodelslim 26.1.0 (Mulan PSL v2; facts), and the vectors in tests/vectors/msmodelslim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyquant.codecs.affine_codec import decoded_rows
from polyquant.codecs.arguments import exact_part, matrix_of, non_finite, of_form, output, real
from polyquant.codecs.keeping import FLOAT_TYPES, Integers
from polyquant.errors import CodecError, UnknownNameError
from polyquant.ops import affine, int8
from polyquant.types import F32, I8, Activation, Affine, ArraySpec, Parts, Shape, as_matrix

__all__ = ["NAMES", "TYPES", "MsModelSlim", "msmodelslim_named"]

TYPES = {
    "w8a16": "W8A16", "w8a8": "W8A8", "w8a8s": "W8A8S", "w8a8.dynamic": "W8A8_DYNAMIC", "w8a8.mix": "W8A8_MIX",
    "w4a16": "W4A16", "w4a8.dynamic": "W4A8_DYNAMIC",
}  # fmt: skip
"""Codec kind -> quantization type in the description file."""
NAMES: tuple[str, ...] = (*TYPES, "w8a16.g128", "w8a16.asym", "w8a8.i64", "w4a16.g128", "w4a8.dynamic.g256")
"""Common names of the family, suggested by errors."""
_INT8, _INT32, _INT64 = np.dtype(np.int8), np.dtype(np.int32), np.dtype(np.int64)
_HINT = "calibrate: --calibration FILE"


@dataclass(frozen=True, slots=True)
class MsModelSlim:
    """An msModelSlim layout. kind: a key of TYPES. group: columns per scale, 0 for the whole row.

    For the other options see the module docstring; the defaults are "" and False.
    """

    kind: str
    group: int = 0
    second: bool = False
    asymmetric: bool = False
    tensor: bool = False
    dtype: str = "f32"
    flat: bool = False
    grid: str = ""
    wide: bool = False
    scales: bool = False
    packing: str = ""
    sums: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """Codec name: the kind, and the options that are not the default."""
        words = [
            self.kind,
            f"g{self.group}" if self.group else "",
            "second" if self.second else "",
            "asym" if self.asymmetric else "",
            "tensor" if self.tensor else "",
            "" if self.dtype == "f32" else self.dtype,
            "flat" if self.flat else "",
            f"x{self.grid}" if self.grid else "",
            "i64" if self.wide else "",
            "scales" if self.scales and self.kind != "w8a8.mix" else "",
            f"pack_{self.packing}" if self.packing else "",
            f"sums{self.sums}" if self.sums else "",
        ]
        return ".".join(w for w in words if w)

    def configure(self, **options: Any) -> MsModelSlim:
        """Return the codec with other fields.

        Raises TypeError for unknown fields, CodecError for invalid combinations.
        """
        return _checked(replace(self, **options))

    @property
    def form(self) -> type[Affine]:
        """Affine integer codes."""
        return Affine

    @property
    def word(self) -> str:
        """Quantization type in the description file."""
        return TYPES[self.kind]

    @property
    def bits(self) -> int:
        """Bits per weight code."""
        return 4 if self.kind.startswith("w4") else 8

    @property
    def static(self) -> bool:
        """True if inputs have fixed quantization parameters.

        The parts then include deq_scale and quant_bias, which contains the layer's bias.
        """
        return self.kind in ("w8a8", "w8a8s", "w8a8.mix")

    @property
    def granule(self) -> tuple[int, int]:
        """Whole groups and whole bytes."""
        return (2 if self.packing == "n" else 1), math.lcm(
            self.group or 1, 2 if self.packing == "k" else 1, self.sums or 1
        )

    @property
    def row_sliced(self) -> bool:
        """True if every part has one row per row of the weight."""
        return not (self.static or self.tensor or self.packing == "n")

    @property
    def tile(self) -> tuple[int, int]:
        """Parts can be cut at whole bytes of rows; columns stay together."""
        return 2, 0

    @property
    def decodes_rows(self) -> bool:
        """True if codes take one byte each: all other parts are small."""
        return not self.packing

    # ------------------------------------------------------------ layout

    def groups(self, shape: Shape) -> int:
        """Number of scales per row."""
        return as_matrix(shape)[1] // self.group if self.group else 1

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [N, K].

        Raises CodecError for a non-matrix, or if groups or bytes do not divide it.
        """
        n, k = matrix_of(self.name, shape)
        lines, columns = self.granule
        if n % lines or k % columns:
            raise CodecError(
                f"groups or bytes of {self.name} do not divide this weight",
                expected=f"multiples of {lines} x {columns}",
                found=list(shape),
            )
        if self.tensor and n == 0:
            raise CodecError(f"{self.name} has one scale per tensor and needs at least one row", found=list(shape))
        scale, grid = FLOAT_TYPES[self.dtype], FLOAT_TYPES[self.grid or self.dtype]
        codes = {"": (n, k), "k": (n, k // 2), "n": (n // 2, k)}[self.packing]
        out = {"weight": ArraySpec(codes, _INT8)}
        if not self.static or self.scales:
            rows: Shape = (1,) if self.tensor else (n,) if self.flat else (n, 1 if self.second else self.groups(shape))
            out |= {"weight_scale": ArraySpec(rows, scale), "weight_offset": ArraySpec(rows, scale)}
        if self.second:
            rows = (n, self.groups(shape))
            out |= {"weight_scale_second": ArraySpec(rows, scale), "weight_offset_second": ArraySpec(rows, _INT64)}
        if self.static:
            out |= {
                "input_scale": ArraySpec((1,), grid),
                "input_offset": ArraySpec((1,), grid),
                "quant_bias": ArraySpec((n,), _INT32),
                "deq_scale": ArraySpec((1 if self.tensor else n,), _INT64 if self.wide else np.dtype(np.float32)),
            }
        if self.sums:
            out["scale_bias"] = ArraySpec((n, self.sums), np.dtype(np.float32))
        return out

    def pack(self, codes: Affine) -> dict[str, NDArray[Any]]:
        """Pack codes to parts. Scales are rounded to their dtype; a given deq_scale is kept.

        Raises CodecError for codes with different bits or groups, for offsets that the type cannot store, and for
        static types without input quantization parameters.
        """
        of_form(self, codes)
        n, k = codes.codes.shape
        specs = self.specs((n, k))
        scale, offset = self._scales(codes, (n, k))
        out: dict[str, NDArray[Any]] = {"weight": self._packed_codes(codes.codes)}
        if not self.static or self.scales:
            if self.second:  # the tool splits a scale into two factors; here the first is 1
                out |= {"weight_scale": np.ones((n, 1), np.float32), "weight_offset": np.zeros((n, 1), np.float32)}
                out |= {"weight_scale_second": scale, "weight_offset_second": offset}
            else:
                out |= {"weight_scale": scale, "weight_offset": offset}
        if self.static:
            out |= self._activation_parts(codes)
        if self.sums:
            w = affine.decode(codes.codes, codes.scale, codes.offset, np.empty((n, k), np.float32))
            out["scale_bias"] = np.float32(8) * w.reshape(n, self.sums, k // self.sums).sum(2)
        with np.errstate(over="ignore"):
            return {key: np.ascontiguousarray(a, specs[key].dtype).reshape(specs[key].shape) for key, a in out.items()}

    def _scales(self, codes: Affine, shape: tuple[int, int]) -> tuple[F32, F32]:
        """Return scale and offset expanded to this codec's groups; one of each for `tensor`."""
        if codes.bits != self.bits:
            raise CodecError(f"{self.name} has {self.bits}-bit codes", found=f"{codes.bits} bits")
        given, want = codes.scale.shape[1], self.groups(shape)
        scale, offset = codes.scale, codes.offset
        if want % given:
            raise CodecError(
                f"{self.name} has {want} scales per row",
                found=f"{given}",
                hint=f"columns per group: {shape[1] // given}",
            )
        if self.static and offset.any():
            raise CodecError(f"{self.name} has symmetric weights only", found=f"offsets up to {np.abs(offset).max():g}")
        if self.tensor:
            if (scale != scale[0, 0]).any() or (offset != offset[0, 0]).any():
                raise CodecError(f"{self.name} has one scale per tensor", found="rows with different scales")
            return scale[:1, :1], offset[:1, :1]
        return np.repeat(scale, want // given, 1), np.repeat(offset, want // given, 1)

    def _packed_codes(self, codes: I8) -> I8:
        if not self.packing:
            return codes
        low, high = (codes[:, ::2], codes[:, 1::2]) if self.packing == "k" else (codes[::2], codes[1::2])
        return (low & 15) | (high << 4)

    def _activation_parts(self, codes: Affine) -> dict[str, NDArray[Any]]:
        activation = codes.activation
        if activation is None:
            raise CodecError(f"{self.name} needs the input range of the layer", hint=_HINT)
        deq = np.ascontiguousarray(activation.deq_scale, np.float32)
        if self.tensor:
            deq = deq[:1]
        return {
            "input_scale": activation.scale,
            "input_offset": activation.offset,
            "quant_bias": activation.quant_bias,
            "deq_scale": deq.view(np.uint32).astype(np.int64) if self.wide else deq,
        }

    @property
    def integers(self) -> Integers:
        """Codes with a zero point, except for static types, which are symmetric."""
        zero: Literal["none", "integer"] = "none" if self.static else "integer"
        dtype: Any = self.dtype
        return Integers(self.bits, self.group, dtype, zero, self.tensor, fixed=self.static)

    def unpack(self, parts: Parts, shape: Shape) -> Affine:
        """Unpack parts to codes. Raises CodecError if a part does not fit."""
        matrix = as_matrix(shape)
        scale, offset, _ = self.tables(parts, matrix)
        codes = self.codes(exact_part(parts, "weight", self.specs(matrix)["weight"]))
        return Affine(self.bits, codes, scale, offset, self._activation(parts, matrix))

    def tables(self, parts: Parts, shape: Shape) -> tuple[F32, F32, None]:
        """Scales and zero points of a weight [N, K], float32 [N, G], without its codes. Raises CodecError if a part
        does not fit.
        """
        n, _ = shape
        small = {key: exact_part(parts, key, spec) for key, spec in self.specs(shape).items() if key != "weight"}
        offset = np.zeros((n, 1), np.float32)
        if "weight_scale" in small:
            scale = _rows(small["weight_scale"], n)
            offset = _rows(small["weight_offset"], n)
            if self.second:
                scale = scale * small["weight_scale_second"]
                offset = offset + small["weight_offset_second"].astype(np.float32)
        else:
            activation = self._activation(parts, shape)
            assert activation is not None
            with np.errstate(all="ignore"):
                scale = _rows(activation.deq_scale / activation.scale, n)
        return scale, offset, None

    def codes(self, weight: I8) -> I8:
        """Return the part `weight` as codes, int8 [N, K]."""
        if not self.packing:
            return np.asarray(weight)
        low, high = (weight << 4).astype(np.int8) >> 4, weight >> 4
        axis = 2 if self.packing == "k" else 1
        rows, columns = weight.shape
        shape = (rows, 2 * columns) if self.packing == "k" else (2 * rows, columns)
        return np.ascontiguousarray(np.stack([low, high], axis)).reshape(shape)

    def _activation(self, parts: Parts, shape: Shape) -> Activation | None:
        """The input quantization of static types; None for others."""
        if not self.static:
            return None
        keys = ("input_scale", "input_offset", "quant_bias", "deq_scale")
        parts = {key: exact_part(parts, key, spec) for key, spec in self.specs(shape).items() if key in keys}
        deq = np.asarray(parts["deq_scale"])
        if self.wide:
            if ((deq < 0) | (deq > 0xFFFFFFFF)).any():
                raise CodecError(
                    "deq_scale is not a float32 stored as int64",
                    expected="0 to 2**32 - 1",
                    found=f"{deq.min()} to {deq.max()}",
                )
            deq = deq.astype(np.uint32).view(np.float32)
        return Activation(
            np.asarray(parts["input_scale"], np.float32),
            np.asarray(parts["input_offset"], np.float32),
            np.asarray(deq, np.float32),
            np.asarray(parts["quant_bias"]),
        )

    # ------------------------------------------------------------ multiplication

    @property
    def inputs(self) -> int8.Inputs:
        """Quantization of the layer's inputs at run time."""
        if self.kind == "w8a8.mix":
            return "mixed"
        return "fixed" if self.static else "token" if self.kind.endswith(".dynamic") else "floats"

    def holds_bias(self, tokens: int, rounding: str) -> bool:
        """Return True if the product of `tokens` tokens already includes the layer's bias."""
        return rounding != "none" and int8.inputs_of(self.inputs, tokens) == "fixed"

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """Return a matmul handle (ops/matmul.py) on the stored codes; packed 4-bit codes are widened.

        Raises CodecError.
        """
        return int8.handle(self.unpack(parts, shape), self.inputs)

    def multiply(self, parts: Parts, shape: Shape, x: F32, rounding: str) -> F32:
        """Reference of `packed`: x [T, K] -> [T, N]; rounding "none" leaves inputs unquantized. Raises CodecError."""
        return int8.multiply(x, self.unpack(parts, shape), "floats" if rounding == "none" else self.inputs)

    # ------------------------------------------------------------ math

    def quantize(self, w: ArrayLike, *, importance: ArrayLike | None = None) -> Affine:
        """Quantize floats [N, K] with min-max scales, without clipping; ignores importance.

        Raises CodecError for NaN and infinity.

        For static types this covers only the weights: pack also needs the input quantization (quantizers/static.py,
        which also chooses the scales of W8A8S).
        """
        del importance
        floats = np.ascontiguousarray(real(self.name, w), np.float32)
        floats = floats.reshape(as_matrix(floats.shape))
        groups = self.groups(floats.shape)
        self.specs(floats.shape)
        if groups == 0:
            raise CodecError(f"{self.name} needs at least one column", found=f"shape {list(floats.shape)}")
        symmetric = not self.asymmetric
        if self.tensor:
            one = affine.min_max_grid(floats.reshape(1, -1), 1, self.bits, symmetric=symmetric)
            scale, offset = (np.repeat(x, len(floats), 0) for x in one)
        else:
            scale, offset = affine.min_max_grid(floats, groups, self.bits, symmetric=symmetric)
        if not (np.isfinite(scale).all() and np.isfinite(offset).all()):
            raise non_finite(self.name, floats)
        if self.dtype != "f32":  # encode with the scale as stored
            with np.errstate(over="ignore"):
                scale = scale.astype(FLOAT_TYPES[self.dtype]).astype(np.float32)
            if not np.isfinite(scale).all():
                raise CodecError("scales do not fit half precision", hint="store them as float32: --dialect v1")
            scale[scale == 0] = 1
        return Affine(self.bits, affine.encode(floats, scale, offset, self.bits, symmetric=symmetric), scale, offset)

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Parts to float32 [N, K], or only `rows` of it; the parts are always complete."""
        weight = self.unpack(parts, shape)
        return decoded_rows(weight, rows, output(out, shape if rows is None else weight.codes[rows].shape))


def _rows(values: NDArray[Any], n: int) -> F32:
    """[N, G], [N] or [1] -> float32 [N, G]."""
    array = np.asarray(values, np.float32)
    if array.ndim == 1:
        array = np.broadcast_to(array, (n,))[:, None] if array.shape[0] == 1 else array[:, None]
    return np.ascontiguousarray(array)


# ------------------------------------------------------------ names

_FLAGS = {
    "second": "second",
    "asym": "asymmetric",
    "tensor": "tensor",
    "flat": "flat",
    "i64": "wide",
    "scales": "scales",
}


@cache
def msmodelslim_named(name: str) -> MsModelSlim:
    """Return the codec called `name`, e.g. "w8a16.g128.f16". Raises UnknownNameError."""
    kind = next((k for k in sorted(TYPES, key=len, reverse=True) if name == k or name.startswith(f"{k}.")), None)
    start = None if kind is None else MsModelSlim(kind, scales=kind == "w8a8.mix")
    codec = _parsed(start, name.removeprefix(start.kind).split(".")[1:]) if start is not None else None
    if codec is None or codec.name != name:
        raise UnknownNameError("codec", name, NAMES)
    try:
        return _checked(codec)
    except CodecError:
        raise UnknownNameError("codec", name, NAMES) from None


def _parsed(codec: MsModelSlim, words: list[str]) -> MsModelSlim | None:
    """Return the codec with the options `words` of a name; None for an unknown word."""
    for word in words:
        if word in _FLAGS:
            flag: dict[str, Any] = {_FLAGS[word]: True}
            codec = replace(codec, **flag)
        elif word in FLOAT_TYPES:
            codec = replace(codec, dtype=word)
        elif word[:1] == "x" and word[1:] in FLOAT_TYPES:
            codec = replace(codec, grid=word[1:])
        elif word in ("pack_k", "pack_n"):
            codec = replace(codec, packing=word[-1])
        elif word[:1] == "g" and word[1:].isdecimal() and len(word) < 8:
            codec = replace(codec, group=int(word[1:]))
        elif word in ("sums1", "sums16"):
            codec = replace(codec, sums=int(word[4:]))
        else:
            return None
    return codec


def _checked(codec: MsModelSlim) -> MsModelSlim:
    """Return `codec`. Raises CodecError for an invalid combination of options."""
    four, grouped = codec.bits == 4, bool(codec.group)
    wrong = (
        (codec.static and (grouped or codec.asymmetric), "static types have one symmetric scale per row"),
        (
            not codec.static and (codec.wide or codec.grid or codec.scales),
            "only static types have input quantization parameters",
        ),
        (codec.packing != "" and not four, "only 4-bit codes can be packed"),
        (bool(codec.sums) and codec.kind != "w4a8.dynamic", "only W4A8_DYNAMIC has scale_bias"),
        (
            codec.second and not (codec.kind == "w4a8.dynamic" and grouped),
            "only W4A8_DYNAMIC per group has second scales",
        ),
        (codec.flat and (grouped or codec.tensor), "group scales are a matrix"),
        (codec.tensor and grouped, "a tensor with one scale has no groups"),
        (codec.grid == codec.dtype, "the input scale already has the dtype of the weight scales"),
        (codec.kind == "w8a8.mix" and not codec.scales, "W8A8_MIX always has weight scales"),
    )
    for bad, why in wrong:
        if bad:
            raise CodecError(why, found=codec.name)
    return codec


assert {f.name for f in fields(MsModelSlim)} >= set(_FLAGS.values())
