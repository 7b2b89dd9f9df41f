"""Weights of msModelSlim (Ascend): int8 and int4 codes with scales, and for static types the grid of the inputs.

Every part lies in the file under the name of its linear layer: `layer.weight`, `layer.weight_scale`, ... Per type of the description:

    W8A16          weight i8 [N, K]   weight_scale, weight_offset [N, 1] or [N, G]                     w = (q - offset) * scale
    W8A8_DYNAMIC   the same; inputs are rounded per token when it runs: s = max|x| / 127
    W8A8, W8A8S    weight   input_scale, input_offset [1]   deq_scale [N]   quant_bias i32 [N]          w = q * deq_scale / input_scale
                   (older files carry weight_scale and weight_offset too)
    W8A8_MIX       those of W8A8 and of W8A8_DYNAMIC: one for prefill, one for decoding
    W4A16          4 bits: a code per byte, or two: even column (or row) in the low nibble, odd one in the high nibble
    W4A8_DYNAMIC   as W4A16 and scale_bias [N, 1] or [N, 16] = 8 * sums of w over so many column blocks; or with two scales a group,
                   weight_scale [N, 1] * weight_scale_second [N, G]

A name says everything that the bytes depend on, in this order; what is left out has the default of the current tool (v1):

    w8a16  w8a16.g128  w8a16.asym  w8a8  w8a8s  w8a8.dynamic  w8a8.mix  w4a16  w4a8.dynamic
    .g128       a scale for each 128 columns             .second     weight_scale_second too
    .asym       quantize with offsets                     .tensor     one scale for the matrix, [1]
    .f16 .bf16  dtype of the scales (float32)             .flat       scales [N], not [N, 1]
    .xf16 .xbf16 .xf32  dtype of the input's grid, where it is another one
    .i64        deq_scale as int64: the bits of the float32, for models that are not bfloat16
    .scales     static types with weight_scale and weight_offset; W8A8_MIX always has them
    .pack_k .pack_n     two 4-bit codes a byte, along the columns or the rows
    .sums1 .sums16      columns of scale_bias

Source: the tool itself, msmodelslim 26.1.0 (Mulan PSL v2; facts), and the vectors in tests/vectors/msmodelslim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyquant.codecs.affine_reader import FLOAT_TYPES, decoded_rows
from polyquant.codecs.arguments import exact_part, non_finite, output, part, real
from polyquant.errors import CodecError, UnknownNameError
from polyquant.ops import affine, int8
from polyquant.types import F32, I8, Activation, Affine, ArraySpec, Parts, Shape, as_matrix

__all__ = ["NAMES", "TYPES", "MsModelSlim", "msmodelslim_named"]

TYPES = {
    "w8a16": "W8A16", "w8a8": "W8A8", "w8a8s": "W8A8S", "w8a8.dynamic": "W8A8_DYNAMIC", "w8a8.mix": "W8A8_MIX",
    "w4a16": "W4A16", "w4a8.dynamic": "W4A8_DYNAMIC",
}  # fmt: skip
"""First words of a codec's name -> the word of the description file."""
NAMES: tuple[str, ...] = (*TYPES, "w8a16.g128", "w8a16.asym", "w8a8.i64", "w4a16.g128", "w4a8.dynamic.g256")
"""Usual members of the family, for errors that say which names are near."""
_INT8, _INT32, _INT64 = np.dtype(np.int8), np.dtype(np.int32), np.dtype(np.int64)
_HINT = "calibrate: --calibration FILE"


@dataclass(frozen=True, slots=True)
class MsModelSlim:
    """kind: a key of TYPES. group: columns of a scale, 0 for all of a row. The rest as the module says; "" and False are the defaults."""

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
        """The type and what of its layout is not the default."""
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
        """The same with other fields. Raises TypeError for a field that it does not have, CodecError for values that no file has."""
        return _checked(replace(self, **options))

    @property
    def form(self) -> type[Affine]:
        """Whole numbers with scales."""
        return Affine

    @property
    def word(self) -> str:
        """What the description file calls the type."""
        return TYPES[self.kind]

    @property
    def bits(self) -> int:
        """Of a weight's code."""
        return 4 if self.kind.startswith("w4") else 8

    @property
    def static(self) -> bool:
        """True if the inputs have a fixed grid, so that the parts hold deq_scale and quant_bias, the layer's bias in it."""
        return self.kind in ("w8a8", "w8a8s", "w8a8.mix")

    @property
    def granule(self) -> tuple[int, int]:
        """Whole groups and whole bytes."""
        return (2 if self.packing == "n" else 1), math.lcm(
            self.group or 1, 2 if self.packing == "k" else 1, self.sums or 1
        )

    @property
    def row_sliced(self) -> bool:
        """True if every part has a row for each row of the weight."""
        return not (self.static or self.tensor or self.packing == "n")

    @property
    def decodes_rows(self) -> bool:
        """True where codes lie one a byte: all parts but the codes are small."""
        return not self.packing

    # ------------------------------------------------------------ layout

    def groups(self, shape: Shape) -> int:
        """Scales of a row."""
        return as_matrix(shape)[1] // self.group if self.group else 1

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Sizes of the parts of a weight [N, K]. Raises CodecError for another number of dimensions, and where groups or bytes do not divide it."""
        if len(shape) != 2:
            raise CodecError(f"{self.name} takes matrices", expected="[N, K]", found=list(shape))
        n, k = shape
        lines, columns = self.granule
        if n % lines or k % columns:
            raise CodecError(
                f"{self.name} does not divide this weight",
                expected=f"multiples of {lines} x {columns}",
                found=list(shape),
            )
        if self.tensor and n == 0:
            raise CodecError(f"{self.name} has one scale for the matrix, which needs a row", found=list(shape))
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
        """Codes to parts. Scales are rounded to their dtype; a deq_scale that is given stays as it is.

        Raises CodecError for codes of another width or grouping, offsets that the type has no place for, and static types without a grid of the inputs.
        """
        n, k = codes.codes.shape
        specs = self.specs((n, k))
        scale, offset = self._scales(codes, (n, k))
        out: dict[str, NDArray[Any]] = {"weight": self._packed_codes(codes.codes)}
        if not self.static or self.scales:
            if (
                self.second
            ):  # the file's second scales are whole numbers of 1 / 15 to 127 of the first; ours say all in the second
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
        """Scale and offset with as many groups as this codec has; for `tensor` one of each."""
        if codes.bits != self.bits:
            raise CodecError(f"{self.name} has codes of {self.bits} bits", found=f"{codes.bits} bits")
        have, want = codes.scale.shape[1], self.groups(shape)
        scale, offset = codes.scale, codes.offset
        if want % have:
            raise CodecError(
                f"{self.name} has {want} scales a row", found=f"{have}", hint=f"columns of a group: {shape[1] // have}"
            )
        if self.static and offset.any():
            raise CodecError(f"{self.name} has symmetric weights only", found=f"offsets up to {np.abs(offset).max():g}")
        if self.tensor:
            if (scale != scale[0, 0]).any() or (offset != offset[0, 0]).any():
                raise CodecError(f"{self.name} has one scale for the matrix", found="rows with different scales")
            return scale[:1, :1], offset[:1, :1]
        return np.repeat(scale, want // have, 1), np.repeat(offset, want // have, 1)

    def _packed_codes(self, codes: I8) -> I8:
        if not self.packing:
            return codes
        low, high = (codes[:, ::2], codes[:, 1::2]) if self.packing == "k" else (codes[::2], codes[1::2])
        return (low & 15) | (high << 4)

    def _activation_parts(self, codes: Affine) -> dict[str, NDArray[Any]]:
        found = codes.activation
        if found is None:
            raise CodecError(f"{self.name} needs the range of the layer's inputs", hint=_HINT)
        deq = np.ascontiguousarray(found.deq_scale, np.float32)
        if self.tensor:
            deq = deq[:1]
        return {
            "input_scale": found.scale,
            "input_offset": found.offset,
            "quant_bias": found.quant_bias,
            "deq_scale": deq.view(np.uint32).astype(np.int64) if self.wide else deq,
        }

    def unpack(self, parts: Parts, shape: Shape) -> Affine:
        """Parts to codes. Raises CodecError if a part does not fit."""
        n, k = as_matrix(shape)
        found = {key: exact_part(parts, key, spec) for key, spec in self.specs((n, k)).items()}
        activation = self._activation(found) if self.static else None
        offset = np.zeros((n, 1), np.float32)
        if "weight_scale" in found:
            scale = _rows(found["weight_scale"], n)
            offset = _rows(found["weight_offset"], n)
            if self.second:
                scale = scale * found["weight_scale_second"]
                offset = offset + found["weight_offset_second"].astype(np.float32)
        else:
            assert activation is not None
            with np.errstate(all="ignore"):
                scale = _rows(activation.deq_scale / activation.scale, n)
        return Affine(self.bits, self.codes(found["weight"]), scale, offset, activation)

    def offsets(self, parts: Parts, shape: Shape) -> F32:
        """Offsets of rows and of groups as they are stored, float32 [any]; zeros for static types without them."""
        keys = [key for key in self.specs(shape) if key.startswith("weight_offset")]
        stored = [np.asarray(part(parts, key), np.float32).ravel() for key in keys]
        return np.concatenate([*stored, np.zeros(1, np.float32)])

    def codes(self, weight: I8) -> I8:
        """The part `weight` as int8 [N, K], one code a number."""
        if not self.packing:
            return np.asarray(weight)
        low, high = (weight << 4).astype(np.int8) >> 4, weight >> 4
        axis = 2 if self.packing == "k" else 1
        rows, columns = weight.shape
        shape = (rows, 2 * columns) if self.packing == "k" else (2 * rows, columns)
        return np.ascontiguousarray(np.stack([low, high], axis)).reshape(shape)

    def _activation(self, parts: Parts) -> Activation:
        deq = np.asarray(parts["deq_scale"])
        if self.wide:
            if ((deq < 0) | (deq > 0xFFFFFFFF)).any():
                raise CodecError(
                    "deq_scale is no float32 in an int64",
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

    # ------------------------------------------------------------ what a linear layer computes

    @property
    def inputs(self) -> int8.Inputs:
        """How the inputs of such a layer are rounded when it runs."""
        if self.kind == "w8a8.mix":
            return "mixed"
        return "fixed" if self.static else "token" if self.kind.endswith(".dynamic") else "floats"

    def holds_bias(self, tokens: int, rounding: str) -> bool:
        """True if the product of so many tokens has the layer's bias in it already."""
        return rounding != "none" and int8.inputs_of(self.inputs, tokens) == "fixed"

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """A handle for multiplication (ops/matmul.py) on the codes where they lie; codes of 4 bits that are packed are widened. Raises CodecError."""
        return int8.handle(self.unpack(parts, shape), self.inputs)

    def multiply(self, parts: Parts, shape: Shape, x: F32, rounding: str) -> F32:
        """The reference of `packed`: x [T, K] -> [T, N]; rounding "none" leaves the inputs as they are. Raises CodecError."""
        return int8.multiply(x, self.unpack(parts, shape), "floats" if rounding == "none" else self.inputs)

    # ------------------------------------------------------------ math

    def quantize(self, w: ArrayLike, *, importance: ArrayLike | None = None) -> Affine:
        """Floats [N, K] to codes on the tightest grid that cuts nothing off; importance changes nothing. Raises CodecError for NaN and infinity.

        Of static types only the weights: pack needs the grid of the inputs too (quantizers/static.py). W8A8S: a grid for the inliers, see there.
        """
        del importance
        floats = np.ascontiguousarray(real(self.name, w), np.float32)
        floats = floats.reshape(as_matrix(floats.shape))
        groups = self.groups(floats.shape)
        self.specs(floats.shape)
        symmetric = not self.asymmetric
        if self.tensor:
            one = affine.min_max_grid(floats.reshape(1, -1), 1, self.bits, symmetric=symmetric)
            scale, offset = (np.repeat(x, len(floats), 0) for x in one)
        else:
            scale, offset = affine.min_max_grid(floats, groups, self.bits, symmetric=symmetric)
        if not (np.isfinite(scale).all() and np.isfinite(offset).all()):
            raise non_finite(self.name, floats)
        if self.dtype != "f32":  # codes of the scale that is stored
            with np.errstate(over="ignore"):
                scale = scale.astype(FLOAT_TYPES[self.dtype]).astype(np.float32)
            if not np.isfinite(scale).all():
                raise CodecError("scales do not fit half precision", hint="store them as float32: --dialect v1")
            scale[scale == 0] = 1
        return Affine(self.bits, affine.encode(floats, scale, offset, self.bits, symmetric=symmetric), scale, offset)

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Parts to float32 [N, K]; of `rows` the parts are whole."""
        found = self.unpack(parts, shape)
        return decoded_rows(found, rows, output(out, shape if rows is None else found.codes[rows].shape))


def _rows(values: NDArray[Any], n: int) -> F32:
    """[N, G], [N] or [1] -> float32 [N, G]."""
    found = np.asarray(values, np.float32)
    if found.ndim == 1:
        found = np.broadcast_to(found, (n,))[:, None] if found.shape[0] == 1 else found[:, None]
    return np.ascontiguousarray(found)


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
    """The codec of a name, e.g. "w8a16.g128.f16". Raises UnknownNameError."""
    kind = next((k for k in sorted(TYPES, key=len, reverse=True) if name == k or name.startswith(f"{k}.")), None)
    start = None if kind is None else MsModelSlim(kind, scales=kind == "w8a8.mix")
    found = _parsed(start, name.removeprefix(start.kind).split(".")[1:]) if start is not None else None
    if found is None or found.name != name:
        raise UnknownNameError("codec", name, NAMES)
    try:
        return _checked(found)
    except CodecError:
        raise UnknownNameError("codec", name, NAMES) from None


def _parsed(codec: MsModelSlim, words: list[str]) -> MsModelSlim | None:
    """The codec with the options of its name; None for a word that says nothing."""
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
    """Raises CodecError for a combination that no file has."""
    four, grouped = codec.bits == 4, bool(codec.group)
    wrong = (
        (codec.static and (grouped or codec.asymmetric), "static types have one symmetric grid a row"),
        (
            not codec.static and (codec.wide or codec.grid or codec.scales),
            "only static types have a grid of the inputs",
        ),
        (codec.packing != "" and not four, "only codes of 4 bits are packed"),
        (bool(codec.sums) and codec.kind != "w4a8.dynamic", "only W4A8_DYNAMIC has scale_bias"),
        (
            codec.second and not (codec.kind == "w4a8.dynamic" and grouped),
            "only W4A8_DYNAMIC per group has second scales",
        ),
        (codec.flat and (grouped or codec.tensor), "scales of groups are a matrix"),
        (codec.tensor and grouped, "a matrix with one scale has no groups"),
        (codec.grid == codec.dtype, "the inputs' grid has the dtype of the scales already"),
        (codec.kind == "w8a8.mix" and not codec.scales, "W8A8_MIX has scales of its weights"),
    )
    for bad, why in wrong:
        if bad:
            raise CodecError(why, found=codec.name)
    return codec


assert {f.name for f in fields(MsModelSlim)} >= set(_FLAGS.values())
