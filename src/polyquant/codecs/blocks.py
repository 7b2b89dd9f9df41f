"""BlockCodec, the class of all ggml types: a row of K weights is K / block consecutive blocks of type_size bytes.

The only part is `blocks`, uint8 [rows, K / block * type_size]. Each type supplies two numpy references that work on
whole blocks: one decodes, the other encodes (or names a search in `quantizers`). Native kernels are looked up by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.capabilities import Field
from polyquant.codecs.arguments import column_weights, finite, of_form, output, packed_rows, real, stored_bytes
from polyquant.errors import CodecError, UnsupportedError
from polyquant.ops import native
from polyquant.types import F32, U8, ArraySpec, Blocks, Parts, Shape, as_matrix

__all__ = ["BlockCodec", "Decode", "Encode", "RowSearch", "check_columns"]

Decode = Callable[[U8], F32]
"""uint8 [n, type_size] -> float32 [n, block]"""
Encode = Callable[[F32, F32 | None], U8]
"""float32 [n, block], importance [n, block] or None -> uint8 [n, type_size]"""
RowSearch = Callable[[F32, F32], U8]
"""Rows float32 [rows, K], importance [K] -> uint8 [n, type_size]: for searches that need a whole row"""

_CHUNK = 1 << 22  # weights per step of a numpy reference; bounds its temporaries


def check_columns(name: str, shape: Shape, block: int) -> tuple[int, int]:
    """Return (rows, K). Raises CodecError if K is not a multiple of the block."""
    rows, k = as_matrix(shape)
    if k % block:
        raise CodecError(
            f"{name} needs rows of a multiple of {block} weights",
            expected=f"K % {block} == 0",
            found=f"shape {list(shape)}",
        )
    return rows, k


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BlockCodec:
    """A ggml type. type_id: its number in GGUF files of llama.cpp.

    encode: the reference rounding, or a search (registry.Search names one in `quantizers`); None for read-only types.
    search: a different search for rows with an importance vector.
    """

    name: str
    type_id: int
    block: int
    type_size: int
    decode: Decode
    encode: Encode | None = None
    fields: tuple[Field, ...] = ()
    search: RowSearch | None = None

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<codec {self.name}>"

    @property
    def form(self) -> type[Blocks]:
        """Blocks: codes stay in their blocks."""
        return Blocks

    @property
    def granule(self) -> tuple[int, int]:
        """Any number of rows, whole blocks along K."""
        return 1, self.block

    @property
    def row_sliced(self) -> bool:
        """True: rows are independent."""
        return True

    @property
    def writable(self) -> bool:
        """False for types that are only read."""
        return self.encode is not None

    @property
    def bpw(self) -> float:
        """Bits per weight."""
        return 8 * self.type_size / self.block

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """{"blocks": u8 [rows, bytes_per_row]}."""
        rows, k = check_columns(self.name, shape, self.block)
        return {"blocks": ArraySpec((rows, k // self.block * self.type_size), np.dtype(np.uint8))}

    def quantize(self, w: F32, *, importance: F32 | None = None) -> Blocks:
        """Quantize floats [..., K] to blocks; importance [K].

        Raises UnsupportedError for read-only types, CodecError for bad arguments.
        """
        w = real(self.name, w)
        rows, k = check_columns(self.name, w.shape, self.block)
        if self.encode is None:
            raise UnsupportedError(f"{self.name} is read-only", hint="choose another codec, e.g. q4_k")
        importance = column_weights(importance, k)
        flat = finite(self.name, w).reshape(rows, k)
        out = np.empty((rows, k // self.block * self.type_size), np.uint8)
        if flat.size and not native.quantize_blocks(self.name, flat, out, importance):
            with np.errstate(all="ignore"):  # a reference never warns
                self._encode_rows(self.encode, flat, importance, out)
        return Blocks(self.name, out)

    def quantize_stored(
        self,
        source: str,
        stored: NDArray[Any],
        shape: Shape,
        *,
        importance: F32 | None = None,
        measure: bool = True,
    ) -> tuple[dict[str, U8], tuple[float, ...]] | None:
        """Rows [rows, K] of the codec `source` to blocks, in cache, and their error sums (zeros without `measure`).

        None without native kernels for both codecs, for types that are only read, and for rows with NaN or infinity.
        """
        rows, k = check_columns(self.name, shape, self.block)
        if self.encode is None:
            return None
        out = np.empty((rows, k // self.block * self.type_size), np.uint8)
        data = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
        sums = native.requantize_blocks(source, self.name, data, out, column_weights(importance, k), measure=measure)
        return None if sums is None else ({"blocks": out}, sums)

    def _encode_rows(self, encode: Encode, flat: F32, importance: F32 | None, out: U8) -> None:
        """Run the numpy reference on rows [rows, K], a few rows at a time."""
        step = max(1, _CHUNK // max(1, flat.shape[1]))
        for a in range(0, len(flat), step):
            part = flat[a : a + step]
            if importance is not None and self.search is not None:
                coded = self.search(part, importance)
            else:
                weights = None if importance is None else np.broadcast_to(importance, part.shape)
                coded = encode(
                    part.reshape(-1, self.block), None if weights is None else weights.reshape(-1, self.block)
                )
            out[a : a + step] = coded.reshape(len(part), -1)

    def pack(self, codes: Blocks) -> dict[str, NDArray[np.uint8]]:
        """Return the blocks as the part. Raises CodecError for blocks of a different type."""
        of_form(self, codes)
        if codes.codec != self.name:
            raise CodecError("cannot pack codes of a different block type", expected=self.name, found=codes.codec)
        return {"blocks": codes.blocks}

    def unpack(self, parts: Parts, shape: Shape) -> Blocks:
        """Return the blocks as codes. Raises CodecError if their size does not match the shape."""
        spec = self.specs(shape)["blocks"]
        blocks = stored_bytes(self.name, parts, "blocks", spec)
        return Blocks(self.name, blocks.reshape(spec.shape))

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Dequantize blocks to float32, bit-exact with ggml's C code."""
        blocks = self.unpack(parts, shape).blocks
        target = shape
        if rows is not None:
            blocks = blocks[rows]
            target = (len(blocks), as_matrix(shape)[1])
        blocks = np.ascontiguousarray(blocks)
        out = output(out, target)
        if not native.dequantize_blocks(self.name, blocks, out):
            flat, filled = blocks.reshape(-1, self.type_size), out.reshape(-1, self.block)
            step = max(1, _CHUNK // self.block)
            with np.errstate(all="ignore"):
                for a in range(0, len(flat), step):
                    filled[a : a + step] = self.decode(flat[a : a + step])
        return out

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """Return a matmul handle (ops/matmul.py), or None without a native kernel.

        Raises CodecError if the size does not match the shape.
        """
        return packed_rows(self.name, parts, shape, self.specs(shape)["blocks"])
