"""I2_S, bitnet.cpp's ternary weights: four per byte, one float32 scale per tensor. 2 bits per weight plus 32 bytes.

    [payload u8 x n/4][scale f32][28 zero bytes]                     w = (symbol - 1) * scale,   n = rows * K
    (byte 0 at the left; four 2-bit symbols per byte as drawn in ternary.py, over the flattened matrix)

    i2_s.x86       blocks of 128 weights in 32 bytes    every published file
    i2_s.arm       blocks of  64 weights in 16 bytes    written by ARM builds
    i2_s.x4        byte r * K + c: column c of rows 4r .. 4r + 3    written by x86 builds without ACT_PARALLEL
    trinity.i2_s   rows of ceil(K / 4) bytes, low bits first, other symbol order, no scale and no tail

Nothing in the bytes distinguishes the first three: a wrong guess decodes to valid symbols. Trinity's order shows in the
symbol counts (`likely_zero_symbol`). The scale is max|w| of a weight that must already be ternary. If n is not a
multiple of the block, bitnet.cpp writes -1 into the remainder; this codec raises an error. Source:
src/ggml-bitnet-mad.cpp (quantize_i2_s) and docs of microsoft/BitNet 16da220; Trinity's GGUF documentation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.capabilities import Cut
from polyquant.codecs.arguments import of_form, output, part, stored_bytes
from polyquant.codecs.ternary import Lanes, count_symbols, likely_zero_symbol, one_scale, ternarize
from polyquant.errors import CodecError
from polyquant.ops import matmul
from polyquant.types import F32, U8, ArraySpec, Parts, Shape, Ternary, as_matrix

__all__ = [
    "I2S",
    "I2_S_ARM",
    "I2_S_X4",
    "I2_S_X86",
    "TRINITY_I2_S",
    "likely_zero_symbol",
    "symbol_histogram",
]

_TAIL = 32


def _padded(k: int) -> int:
    """Return K rounded up to whole bytes, as Trinity pads its rows."""
    return -(-k // 4) * 4


@dataclass(frozen=True, slots=True, eq=False)
class I2S:
    """An I2_S layout.

    width: bytes per block, 0 for K (a block is then four rows). lossy: ternarize any weight by its sign.
    """

    name: str
    width: int
    granule: tuple[int, int]
    trinity: bool = False
    lossy: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def form(self) -> type[Ternary]:
        """Ternary codes with one scale."""
        return Ternary

    @property
    def row_sliced(self) -> bool:
        """False: one scale at the end."""
        return False

    def configure(self, *, lossy: bool) -> I2S:
        """Return the codec with other options. lossy=True: quantize accepts non-ternary weights, as bitnet.cpp does."""
        return replace(self, lossy=lossy)

    def lanes(self, shape: Shape) -> Lanes | None:
        """Layout of the payload; None where Trinity pads its rows."""
        k = as_matrix(shape)[1]
        if self.trinity:
            return Lanes(1, high_first=False, zero_first=True) if k % 4 == 0 else None
        return Lanes(self.width or max(1, k))

    def payload_bytes(self, shape: Shape) -> int:
        """Size of the payload in bytes. Raises CodecError if the shape does not fill whole blocks."""
        rows, k = as_matrix(shape)
        if self.trinity:
            return rows * _padded(k) // 4
        block = 4 * (self.width or max(1, k))
        if rows * k % block:
            unit = f"a multiple of {block} weights" if self.width else "a multiple of 4 rows"
            raise CodecError(
                f"{self.name} needs {unit}",
                found=f"shape {list(shape)}",
                hint="choose a different type for this tensor, e.g. f16 or tq2_0",
            )
        return rows * k // 4

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """{"blocks": u8 [payload + 32]}, for Trinity u8 [payload]. Raises CodecError."""
        size = self.payload_bytes(shape) + (0 if self.trinity else _TAIL)
        return {"blocks": ArraySpec((size,), np.dtype(np.uint8))}

    def quantize(self, w: F32, *, importance: F32 | None = None) -> Ternary:
        """Quantize ternary floats [..., K]; ignores importance.

        Raises CodecError if w is not ternary (unless lossy).
        """
        codes = ternarize(self.name, w, self.lossy)
        if self.trinity and not self.lossy and codes.scale[0] not in (0, 1):
            raise CodecError(
                f"{self.name} cannot store a scale",
                expected="weights -1, 0, +1",
                found=f"scale {codes.scale[0]:.6g}",
                hint="choose i2_s.x86, or drop the scale in Python: polyquant.codec(name, lossy=True)",
            )
        return codes

    def pack(self, codes: Ternary) -> dict[str, NDArray[np.uint8]]:
        """Pack codes to bytes; Trinity drops the scale. Raises CodecError if there are several scales."""
        of_form(self, codes)
        rows, k = codes.codes.shape
        lanes = self.lanes((rows, k))
        scale = np.float32(1) if self.trinity else one_scale(self.name, codes)
        parts, payload = self.frame((rows, k), scale)
        if lanes is None:
            padded = np.zeros((rows, _padded(k)), np.int8)
            padded[:, :k] = codes.codes
            Lanes(1, False, True).pack(padded, payload)
        else:
            lanes.pack(codes.codes, payload)
        return parts

    def frame(self, shape: Shape, scale: np.float32) -> tuple[dict[str, NDArray[np.uint8]], U8]:
        """Return the parts with the scale filled in, and a view of the payload to fill. Raises CodecError."""
        size = self.payload_bytes(shape)
        blocks = np.empty(self.specs(shape)["blocks"].shape, np.uint8)
        if not self.trinity:
            blocks[size:] = 0
            blocks[size : size + 4] = np.array([scale], "<f4").view(np.uint8)
        return {"blocks": blocks}, blocks[:size]

    def payload(self, parts: Parts, shape: Shape) -> U8:
        """Return the symbols, uint8 [payload_bytes]. Raises CodecError if the size does not match the shape."""
        spec = self.specs(shape)["blocks"]
        blocks = stored_bytes(self.name, parts, "blocks", spec)
        return np.ascontiguousarray(blocks).reshape(-1)[: self.payload_bytes(shape)]

    def scale(self, parts: Parts, shape: Shape) -> F32:
        """Return the scale stored after the payload, float32 [1]; 1 for Trinity."""
        if self.trinity:
            return np.ones(1, np.float32)
        at = self.payload_bytes(shape)
        return part(parts, "blocks").reshape(-1)[at : at + 4].copy().view("<f4").astype(np.float32)

    def unpack(self, parts: Parts, shape: Shape) -> Ternary:
        """Unpack bytes to codes [rows, K]. Raises CodecError if the size does not match the shape."""
        rows, k = as_matrix(shape)
        payload, lanes = self.payload(parts, shape), self.lanes(shape)
        if lanes is None:
            codes = np.ascontiguousarray(Lanes(1, False, True).unpack(payload).reshape(rows, _padded(k))[:, :k])
        else:
            codes = lanes.unpack(payload).reshape(rows, k)
        return Ternary(codes, self.scale(parts, shape))

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Return codes * scale. With `rows`, only the blocks that contain them are decoded."""
        payload, lanes = self.payload(parts, shape), self.lanes(shape)
        scale = float(self.scale(parts, shape)[0])
        count, k = as_matrix(shape)
        target = shape
        first, last = 0, count
        if rows is not None:
            first, last, step = rows.indices(count)
            if step != 1:
                raise CodecError("rows must be a slice with step 1", found=rows)
            last = max(first, last)
            target = (last - first, k)
        out = output(out, target)
        if lanes is None:
            stride = _padded(k)
            padded = np.empty((last - first, stride), np.float32)
            Lanes(1, False, True).dequantize(
                payload[first * stride // 4 : last * stride // 4], scale, padded.reshape(-1)
            )
            out.reshape(last - first, k)[:] = padded[:, :k]
            return out
        block = 4 * lanes.width
        start, stop = first * k // block, -(-last * k // block)  # blocks that overlap the rows
        if (start * block, stop * block) == (first * k, last * k):
            lanes.dequantize(payload[start * lanes.width : stop * lanes.width], scale, out.reshape(-1))
            return out
        around = np.empty((stop - start) * block, np.float32)
        lanes.dequantize(payload[start * lanes.width : stop * lanes.width], scale, around)
        out.reshape(-1)[:] = around[first * k - start * block :][: out.size]
        return out

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """Return a matmul handle (ops/matmul.py), or None where blocks cross row boundaries."""
        rows, k = as_matrix(shape)
        block = 32 if self.trinity or not self.width else 4 * self.width
        if k % block:
            return None
        payload, scale = self.payload(parts, shape), float(self.scale(parts, shape)[0])
        return matmul.packed(self.name, payload, rows, k, scale=scale, lane_step=0 if self.width else 1)

    def cut(self, shape: Shape, index: int) -> tuple[I2S, dict[str, Cut]]:
        """Cut matrix `index` out of a stack: its blocks, then the tail with the scale.

        Raises CodecError if a block spans two matrices.
        """
        rows, k = shape[-2:]
        block = 1 if self.trinity else 4 * (self.width or max(1, k))
        if rows * k % block:
            unit = f"{block} weights" if self.width else "4 rows"
            raise CodecError(
                f"this {self.name} stack cannot be split: a block of {unit} spans two matrices",
                found=f"matrices {[rows, k]}",
            )
        size, end = self.payload_bytes((rows, k)), self.payload_bytes(shape)
        own = slice(index * size, (index + 1) * size)
        return self, {"blocks": Cut((own,) if self.trinity else (own, slice(end, end + _TAIL)))}

    @property
    def zero_symbol(self) -> int:
        """The symbol for zero: 0 in Trinity's order, else 1."""
        return 0 if self.trinity else 1

    def symbol_histogram(self, parts: Parts, shape: Shape) -> NDArray[np.uint64]:
        """Counts of the symbols 0..3 in the payload without Trinity's padding, uint64 [4]."""
        payload = self.payload(parts, shape)
        counts = count_symbols(payload)
        k = as_matrix(shape)[1]
        if self.trinity and k % 4:
            ends = payload[k // 4 :: _padded(k) // 4]  # the last byte of each row
            for lane in range(k % 4, 4):
                counts -= np.bincount(ends >> 2 * lane & 3, minlength=4).astype(np.uint64)
        return counts

    def count_undefined(self, parts: Parts, shape: Shape) -> int:
        """Number of symbols 3, which no quantizer writes."""
        return int(self.symbol_histogram(parts, shape)[3])


I2_S_X86 = I2S("i2_s.x86", 32, (1, 128))
I2_S_ARM = I2S("i2_s.arm", 16, (1, 64))
I2_S_X4 = I2S("i2_s.x4", 0, (4, 1))
TRINITY_I2_S = I2S("trinity.i2_s", 1, (1, 1), trinity=True)


def symbol_histogram(parts: Parts, shape: Shape) -> NDArray[np.uint64]:
    """Return the counts of the symbols 0..3, uint64 [4], for any layout (only Trinity's size differs).

    Raises CodecError.
    """
    bare = part(parts, "blocks").nbytes == TRINITY_I2_S.payload_bytes(shape)
    codec = TRINITY_I2_S if bare else replace(I2_S_X86, width=1)
    return codec.symbol_histogram(parts, shape)
