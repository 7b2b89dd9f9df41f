"""Plain dtypes without blocks or scales: K consecutive values per row.

    f32 f64 f16          IEEE 754                       GGUF types 0, 28, 1
    bf16                 upper half of a float32         GGUF type 30
    i8 i16 i32 i64       two's complement                GGUF types 24, 25, 26, 27
    u8 u16 u32 u64 bool f8_e4m3 f8_e5m2                  safetensors only: type_id None
    (f8_e4m3 is the variant with NaN but no infinity, largest 448; bool is one byte, 0 or 1)

The only part is `blocks`, uint8 [rows, K * itemsize], little-endian, as for every ggml type. Form Floats: each of these
converts to any other by value, rounding half to even (to f16 and bf16 from float32). Integer types accept only values
that they represent exactly. Rounding to f16 gives infinity above 65519; to bf16 a NaN stays NaN and becomes quiet, as
in ggml (ggml-impl.h of llama.cpp 0c1e570).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.arguments import of_form, output, packed_rows, real, stored_bytes
from polyquant.errors import CodecError
from polyquant.ops import native
from polyquant.types import ArraySpec, Floats, Parts, Shape, as_matrix

__all__ = [
    "BF16", "BOOL", "F8_E4M3", "F8_E5M2", "F16", "F32", "F64", "I8", "I16", "I32", "I64",
    "U8", "U16", "U32", "U64", "PlainCodec",
]  # fmt: skip

Float32: TypeAlias = NDArray[np.float32]  # types.F32 elsewhere; here F32 is a codec
_KERNELS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}  # dtype -> kernel
_EXTENDED = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # dtypes of ml_dtypes, imported on first use
assert sys.byteorder == "little", "polyquant runs on little-endian machines only"


@cache
def _extended(name: str) -> np.dtype[Any]:
    """Return a dtype that numpy lacks."""
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def bf16_bits(w: Float32) -> NDArray[np.uint16]:
    """float32 -> bfloat16 bits, rounding half to even; NaN becomes quiet."""
    bits = w.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, bits >> 16 | 0x40, rounded).astype(np.uint16)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PlainCodec:
    """Values of one dtype. type_id: the type number in GGUF files, None if GGUF has none."""

    name: str
    type_id: int | None
    type_size: int
    kind: str

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<codec {self.name}>"

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy (or ml_dtypes) dtype."""
        return _extended(self.kind) if self.kind in _EXTENDED else np.dtype(self.kind)

    @property
    def is_integer(self) -> bool:
        """True for integers and booleans."""
        return self.dtype.kind in "iub"

    @property
    def block(self) -> int:
        """Weights per block: 1."""
        return 1

    @property
    def fields(self) -> tuple[tuple[int, int, int], ...]:
        """Multi-byte fields of a block, for big-endian files: each value."""
        return ((0, self.type_size, 1),) if self.type_size > 1 else ()

    @property
    def form(self) -> type[Floats]:
        """Floats: unquantized values."""
        return Floats

    @property
    def granule(self) -> tuple[int, int]:
        """Any shape."""
        return 1, 1

    @property
    def row_sliced(self) -> bool:
        """True: rows are independent."""
        return True

    @property
    def bpw(self) -> float:
        """Bits per weight."""
        return 8 * self.type_size

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """{"blocks": u8 [rows, K * itemsize]}."""
        rows, k = as_matrix(shape)
        return {"blocks": ArraySpec((rows, k * self.type_size), np.dtype(np.uint8))}

    def quantize(self, w: Float32, *, importance: Float32 | None = None) -> Floats:
        """Return the values unchanged, [rows, K]; `pack` rounds them. Ignores importance."""
        w = real(self.name, w)
        return Floats(np.ascontiguousarray(w).reshape(as_matrix(w.shape)))

    def pack(self, codes: Floats) -> dict[str, NDArray[Any]]:
        """Pack values [rows, K] of any dtype. Raises CodecError if an integer type cannot represent a value exactly."""
        of_form(self, codes)
        values = np.ascontiguousarray(codes.values)
        rows, k = values.shape
        if values.dtype == self.dtype:
            return {"blocks": values.reshape(-1).view(np.uint8).reshape(rows, k * self.type_size)}
        out = np.empty(rows * k, self.dtype)
        if self.name == "f32":
            _widen(values, out)
        elif self.name in ("f16", "bf16"):
            self._round(_widen(values), out)
        else:
            self._cast(_widen(values) if values.dtype.name in _EXTENDED else values, out)
        return {"blocks": out.view(np.uint8).reshape(rows, k * self.type_size)}

    def _round(self, w: Float32, out: NDArray[Any]) -> None:
        """float32 -> f16 or bf16."""
        if native.quantize_blocks(self.name, w, out.view(np.uint8).reshape(len(w), 2 * w.shape[1]), None):
            return
        if self.name == "bf16":
            out.view(np.uint16)[...] = bf16_bits(w).reshape(-1)
        else:
            with np.errstate(all="ignore"):
                out[...] = w.reshape(-1)

    def _cast(self, values: NDArray[Any], out: NDArray[Any]) -> None:
        """Convert with numpy."""
        with np.errstate(all="ignore"):
            out[...] = values.reshape(-1)
        if self.is_integer and not np.array_equal(out, values.reshape(-1)):
            raise CodecError(
                f"{self.name} cannot hold these {values.dtype} values exactly", hint="choose a float codec, e.g. f32"
            )

    def unpack(self, parts: Parts, shape: Shape) -> Floats:
        """Return a view of the values, [rows, K]. Raises CodecError if the size does not match the shape."""
        spec = self.specs(shape)["blocks"]
        blocks = stored_bytes(self.name, parts, "blocks", spec)
        flat = np.ascontiguousarray(blocks).reshape(-1)
        values = flat != 0 if self.name == "bool" else flat.view(self.dtype)  # any nonzero byte is true
        return Floats(values.reshape(as_matrix(shape)))

    def dequantize(
        self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: Float32 | None = None
    ) -> Float32:
        """Convert to float32: exact for f32, f16, bf16, f8 and integers up to 2^24, otherwise rounded half to even."""
        values = self.unpack(parts, shape).values
        target = shape
        if rows is not None:
            values = values[rows]
            target = values.shape
        out = output(out, target)
        _widen(values, out.reshape(-1))
        return out

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """Return a matmul handle (ops/matmul.py) for f32, f16 and bf16, else None.

        Raises CodecError if the size does not match the shape.
        """
        return packed_rows(self.name, parts, shape, self.specs(shape)["blocks"])


def _widen(values: NDArray[Any], out: Float32 | None = None) -> Float32:
    """Any dtype -> float32 of the same shape, or into flat `out`."""
    if out is None:
        if values.dtype == np.float32:
            return values
        return _widen(values, np.empty(values.size, np.float32)).reshape(values.shape)
    source = np.ascontiguousarray(values).reshape(-1)
    name = _KERNELS.get(source.dtype.name)
    if name and native.dequantize_blocks(name, source.view(np.uint8), out):
        return out
    with np.errstate(all="ignore"):
        if name == "bf16":
            out.view(np.uint32)[...] = source.view(np.uint16).astype(np.uint32) << np.uint32(16)
        else:
            out[...] = source
    return out


F32 = PlainCodec("f32", 0, 4, "float32")
F16 = PlainCodec("f16", 1, 2, "float16")
BF16 = PlainCodec("bf16", 30, 2, "bfloat16")
F64 = PlainCodec("f64", 28, 8, "float64")
I8 = PlainCodec("i8", 24, 1, "int8")
I16 = PlainCodec("i16", 25, 2, "int16")
I32 = PlainCodec("i32", 26, 4, "int32")
I64 = PlainCodec("i64", 27, 8, "int64")
U8 = PlainCodec("u8", None, 1, "uint8")
U16 = PlainCodec("u16", None, 2, "uint16")
U32 = PlainCodec("u32", None, 4, "uint32")
U64 = PlainCodec("u64", None, 8, "uint64")
BOOL = PlainCodec("bool", None, 1, "bool")
F8_E4M3 = PlainCodec("f8_e4m3", None, 1, "float8_e4m3fn")
F8_E5M2 = PlainCodec("f8_e5m2", None, 1, "float8_e5m2")
