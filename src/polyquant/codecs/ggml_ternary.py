"""ggml's ternary types: blocks of 256 weights, w = code * d with codes -1, 0, +1 and an fp16 d at the end of the block.

    TQ1_0  54 bytes  1.6875 bpw   [qs 48][qh 4][d f16]
           qs[m], m < 32:   weights m, m + 32, .. m + 128       five base-3 digits per byte, code + 1, high first
           qs[32 + m]:      weights 160 + m, 160 + m + 16, ..
           qh[m], m < 4:    weights 240 + m, .. + 4, .. + 8, .. + 12, and a fifth digit 0
           byte = ceil(number * 256 / 243): multiplying by 3 modulo 256 moves the next digit to the top
    TQ2_0  66 bytes  2.0625 bpw   [qs 64][d f16]
           qs[32 h + m]:    weights 128 h + m, + 32, + 64, + 96     two bits each (code + 1), lowest first

quantize gives d = amax of the block and round(w / d), half away from zero; pack rounds d to fp16 and writes d = 0 where
all codes are zero, as ggml does. Bits 11 of TQ2_0 are never written; ggml decodes them as +2 * d and so does
dequantize, while pack rejects the code +2. Source: ggml-quants.c of llama.cpp 0c1e570. Disagreement: Trinity's "TQ1_0"
and "TQ2_0" are different layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.capabilities import Field
from polyquant.codecs.arguments import finite, of_form, packed_rows, real
from polyquant.codecs.blocks import BlockCodec, check_columns
from polyquant.errors import CodecError
from polyquant.ops import native
from polyquant.ops.rounding import clamp, from_half, half_away, inverse, to_half
from polyquant.types import F32, I8, U8, ArraySpec, Parts, Shape, Ternary, as_matrix

__all__ = ["TQ1_0", "TQ2_0", "TernaryBlockCodec"]

_BLOCK = 256
_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)
_PIECES = ((0, 32, 5), (32, 16, 5), (48, 4, 4))  # (first byte, bytes, digits a byte)
_SHIFTS = np.array([0, 2, 4, 6], np.uint8)


def take_tq1_0(b: U8) -> I8:
    """[n, 52 or more] -> codes [n, 256]"""
    digits = []
    for first, width, count in _PIECES:
        rest = b[:, first : first + width, None] * _POWERS[:count]  # modulo 256
        digits.append((rest.astype(np.uint16) * 3 >> 8).transpose(0, 2, 1).reshape(len(b), -1))
    return np.concatenate(digits, axis=1).astype(np.int8) - np.int8(1)


def put_tq1_0(codes: I8) -> U8:
    """codes [n, 256] -> [n, 52]"""
    out, start = [], 0
    for _, width, count in _PIECES:
        digits = (codes[:, start : start + width * count] + np.int8(1)).reshape(-1, count, width).astype(np.uint16)
        number = (digits * 3 ** np.arange(4, 4 - count, -1, dtype=np.uint16)[:, None]).sum(axis=1, dtype=np.uint16)
        out.append(((number.astype(np.uint32) * 256 + 242) // 243).astype(np.uint8))
        start += width * count
    return np.concatenate(out, axis=1)


def take_tq2_0(b: U8) -> I8:
    """[n, 64 or more] -> codes [n, 256]"""
    pairs = b[:, :64].reshape(-1, 2, 1, 32) >> _SHIFTS[:, None] & 3  # [n, 2, 4, 32]
    return pairs.reshape(-1, _BLOCK).astype(np.int8) - np.int8(1)


def put_tq2_0(codes: I8) -> U8:
    """codes [n, 256] -> [n, 64]"""
    pairs = (codes + np.int8(1)).view(np.uint8).reshape(-1, 2, 4, 32) << _SHIFTS[:, None]
    packed: U8 = np.bitwise_or.reduce(pairs, axis=2).reshape(-1, 64)
    return packed


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TernaryBlockCodec:
    """A ggml type of form Ternary.

    take and put convert bytes to codes and back; base decodes the same bytes as blocks.
    """

    base: BlockCodec
    take: Callable[[U8], I8]
    put: Callable[[I8], U8]

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<codec {self.name}>"

    @property
    def name(self) -> str:
        """Registry name."""
        return self.base.name

    @property
    def type_id(self) -> int:
        """Type number in GGUF files."""
        return self.base.type_id

    @property
    def block(self) -> int:
        """Weights in a block."""
        return self.base.block

    @property
    def type_size(self) -> int:
        """Bytes of a block."""
        return self.base.type_size

    @property
    def fields(self) -> tuple[Field, ...]:
        """Multi-byte fields of a block."""
        return self.base.fields

    @property
    def form(self) -> type[Ternary]:
        """Ternary: transcodes with every other ternary codec."""
        return Ternary

    @property
    def granule(self) -> tuple[int, int]:
        """Any number of rows, whole blocks along K."""
        return self.base.granule

    @property
    def row_sliced(self) -> bool:
        """True: rows are independent."""
        return True

    @property
    def bpw(self) -> float:
        """Bits per weight."""
        return self.base.bpw

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """{"blocks": u8 [rows, bytes_per_row]}. Raises CodecError if K is not a multiple of 256."""
        return self.base.specs(shape)

    def quantize(self, w: F32, *, importance: F32 | None = None) -> Ternary:
        """Quantize floats [..., K] to codes [rows, K] and float32 scales [rows, K / 256]. Ignores importance."""
        w = real(self.name, w)
        rows, k = check_columns(self.name, w.shape, _BLOCK)
        flat = finite(self.name, w).reshape(rows, k)
        codes, scale = np.empty((rows, k), np.int8), np.empty((rows, k // _BLOCK), np.float32)
        if not native.ternarize(flat, codes, scale):
            step = max(1, (1 << 22) // max(1, k))
            for a in range(0, rows if k else 0, step):
                x = flat[a : a + step].reshape(-1, _BLOCK)
                d = np.abs(x).max(axis=1, keepdims=True)
                with np.errstate(all="ignore"):
                    codes[a : a + step] = half_away(clamp(x * inverse(d), -1, 1)).astype(np.int8).reshape(-1, k)
                scale[a : a + step] = d.reshape(-1, k // _BLOCK)
        return Ternary(codes, scale)

    def pack(self, codes: Ternary) -> dict[str, NDArray[Any]]:
        """Pack codes to blocks. scale: [1], [rows, 1] or [rows, G], G dividing K / 256.

        Raises CodecError for other scales or codes.
        """
        of_form(self, codes)
        rows, k = codes.codes.shape
        check_columns(self.name, (rows, k), _BLOCK)
        if k == 0:
            return {"blocks": np.empty((rows, 0), np.uint8)}
        blocked = np.ascontiguousarray(codes.codes, np.int8).reshape(-1, _BLOCK)  # [n, 256]
        if blocked.size and (blocked.min() < -1 or blocked.max() > 1):
            raise CodecError(f"{self.name} packs codes -1, 0, +1", found=f"{blocked.min()} to {blocked.max()}")
        scale = self._block_scale(codes.scale, rows, k // _BLOCK).reshape(-1, 1)  # [n, 1]
        scale = np.where(blocked.any(axis=1, keepdims=True), scale, np.float32(0))
        out = np.empty((len(blocked), self.type_size), np.uint8)
        if not native.pack_ternary(self.name, blocked, scale, out):
            out[:, :-2], out[:, -2:] = self.put(blocked), to_half(scale)
        return {"blocks": out.reshape(rows, k // _BLOCK * self.type_size)}

    def _block_scale(self, scale: F32, rows: int, blocks: int) -> F32:
        """Broadcast a valid scale to float32 [rows, blocks]."""
        scale = np.asarray(scale, np.float32)
        if scale.shape == (1,):
            return np.broadcast_to(scale, (rows, blocks))
        groups = scale.shape[1] if scale.ndim == 2 and scale.shape[0] == rows else 0
        if blocks == 0 or groups == 0 or blocks % groups:
            raise CodecError(
                f"{self.name} has one scale per 256 columns",
                expected=f"[1] or [{rows}, G], G dividing {blocks}",
                found=scale.shape,
            )
        return np.repeat(scale, blocks // groups, axis=1)

    def unpack(self, parts: Parts, shape: Shape) -> Ternary:
        """Blocks -> codes [rows, K], scale [rows, K / 256]. TQ2_0's undefined bits 11 give code +2."""
        rows, k = as_matrix(shape)
        blocks = np.ascontiguousarray(self.base.unpack(parts, shape).blocks).reshape(-1, self.type_size)
        codes, scale = np.empty((rows, k), np.int8), np.empty((rows, k // _BLOCK), np.float32)
        if not native.unpack_ternary(self.name, blocks, codes, scale):
            codes[...] = self.take(blocks).reshape(rows, k)
            scale[...] = from_half(blocks[:, -2:]).reshape(scale.shape)
        return Ternary(codes, scale)

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Dequantize blocks to float32, bit-exact with ggml's C code."""
        return self.base.dequantize(parts, shape, rows=rows, out=out)

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """Return a matmul handle (ops/matmul.py). Raises CodecError if the size does not match the shape."""
        return packed_rows(self.name, parts, shape, self.specs(shape)["blocks"])


def _codec(
    name: str, type_id: int, type_size: int, take: Callable[[U8], I8], put: Callable[[I8], U8]
) -> TernaryBlockCodec:
    def decode(b: U8) -> F32:
        return take(b).astype(np.float32) * from_half(b[:, -2:])

    base = BlockCodec(name, type_id, _BLOCK, type_size, decode, fields=((type_size - 2, 2, 1),))
    return TernaryBlockCodec(base, take, put)


TQ1_0 = _codec("tq1_0", 34, 54, take_tq1_0, put_tq1_0)
TQ2_0 = _codec("tq2_0", 35, 66, take_tq2_0, put_tq2_0)
