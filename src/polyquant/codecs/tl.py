"""TL1 and TL2, bitnet.cpp's ternary weights in the order in which its lookup-table kernels read them.

    TL1   [bytes u8 x n/4] [zeros to 32][scale f32][28 zero bytes]                                           2 bpw
          byte: weights k .. k+3 of a row, nibbles 3a + b + 4, first pair in the high nibble
    TL2   [index u8 x M*K3/6][sign u8 x M*K3/24][two u8 x M*K2/4] [zeros to 32][scale f32][28 zero bytes]    1.67 bpw up
          index byte: weights k .. k+5 of a row, nibbles |9a + 3b + c|, first triple in the high nibble
          sign: 1 where 9a + 3b + c < 0; a little-endian u16 holds 8 triples of rows r (bits 15, 13, .. 1) and
                r + 16 (bits 14, 12, .. 0) of 32 rows
          two: the last K2 = K % BK columns in TL1's nibbles;  K3 = K - K2;  w = code * scale throughout

Bytes follow nested tiles (BM, BK, bm): blocks of BM rows; within them BK columns (32 in `two`); then bm rows; then
256/bm columns (TL1), 6 (index), 24 (sign) or 4 (two). The innermost unit is 16 rows by four columns in TL1, and in TL2
32 rows whose middle two groups of eight are swapped. TL2's payload always has the size of 256 columns stored as pairs;
its end is unused.

**The tile is not in the file.** `TILES` holds the tiles that bitnet.cpp's setup generates for known models, by shape;
any other shape needs `tile=`. Its `preset_kernels` for Llama3-8B TL1 and one shape of large TL2 differ, but the same
run overwrites them with the generated ones. Undefined nibbles (TL1 9 to 15, TL2 14 and 15) decode to zeros. Source:
utils/convert-hf-to-gguf-bitnet.py, setup_env.py and docs/codegen.md of microsoft/BitNet 16da220.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from polyquant.capabilities import Cut, Tile
from polyquant.codecs.arguments import of_form, output, stored_bytes
from polyquant.codecs.ternary import check_codes, count_bytes, one_scale, scaled, ternarize
from polyquant.errors import CodecError
from polyquant.ops import native
from polyquant.types import F32, I8, U8, ArraySpec, Parts, Shape, Ternary, as_matrix

__all__ = ["TILES", "TL", "TL1", "TL2", "Tile"]

TILES: dict[tuple[int, int], tuple[Tile, Tile]] = {
    # bitnet_b1_58-large
    (1536, 4096): ((256, 128, 32), (256, 96, 32)),
    (1536, 1536): ((128, 64, 64), (128, 192, 32)),
    (4096, 1536): ((256, 128, 32), (256, 96, 32)),
    # bitnet_b1_58-3B
    (3200, 8640): ((160, 64, 32), (160, 96, 32)),
    (3200, 3200): ((320, 128, 64), (320, 96, 32)),
    (8640, 3200): ((320, 64, 32), (320, 96, 32)),
    # Llama3-8B-1.58-100B-tokens
    (14336, 4096): ((256, 128, 32), (256, 96, 32)),
    (4096, 14336): ((128, 64, 64), (128, 96, 32)),
    (1024, 4096): ((256, 128, 32), (256, 96, 32)),
    (4096, 4096): ((128, 64, 64), (128, 96, 32)),
}
"""(rows, K) -> tile of TL1, tile of TL2."""

_TAIL = 32
"""Bytes after the payload: the scale, then zeros."""
_SWAP = np.r_[0:8, 16:24, 8:16, 24:32]  # rows of a block of 32 in the order of TL2's bytes
_NIBBLES = np.stack([np.arange(256) >> 4, np.arange(256) & 15], axis=1)  # [256, 2]


def _pairs() -> I8:
    """Return the four weights of each byte of pairs, int8 [256, 4]."""
    q = np.where(_NIBBLES < 9, _NIBBLES, 4)
    return np.stack([q // 3 - 1, q % 3 - 1], axis=2).reshape(256, 4).astype(np.int8)


def _triples() -> I8:
    """Return the six weights of each index byte before signs, int8 [256, 6]."""
    q = np.where(_NIBBLES < 14, _NIBBLES, 0)
    c = (q + 1) % 3 - 1
    b = ((q - c) // 3 + 1) % 3 - 1
    a = ((q - c) // 3 - b) // 3
    return np.stack([a, b, c], axis=2).reshape(256, 6).astype(np.int8)


_PAIRS, _TRIPLES = _pairs(), _triples()


def _pair_bytes(codes: I8) -> U8:
    """int8 [rows, K] -> uint8 [rows, K / 4]"""
    q = codes[:, 0::2] * np.int8(3) + codes[:, 1::2] + np.int8(4)  # [rows, K / 2]
    return (q[:, 0::2] << 4 | q[:, 1::2]).astype(np.uint8)


def _tl1_order(rows: int, columns: int, tile: Tile) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the split of bytes [rows, columns] into axes, and the order of these axes in the file."""
    outer, bk, bm = tile[0], tile[1] // 4, tile[2]
    by = 64 // bm
    return (rows // outer, outer // bm, bm // 16, 16, columns // bk, bk // by, by), (0, 4, 1, 5, 2, 6, 3)


def _tl2_order(rows: int, columns: int, outer: int, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Like _tl1_order, for one section of TL2; step: bytes per row in one BK."""
    return (rows // outer, outer // 32, 32, columns // step, step), (0, 3, 1, 4, 2)


def _to_file(array: NDArray[np.uint8], order: tuple[tuple[int, ...], tuple[int, ...]]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array.reshape(order[0]).transpose(order[1]))


def _from_file(flat: U8, order: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, int]) -> U8:
    split, axes = order
    return flat.reshape([split[a] for a in axes]).transpose(np.argsort(axes)).reshape(shape)


def _unswap(flat: U8) -> U8:
    """Swap the middle groups of eight in every 32 bytes; its own inverse."""
    return flat.reshape(-1, 32)[:, _SWAP].reshape(-1)


def _sign_order(rows: int, three: int, tile: Tile) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Like _tl1_order, for sign bits [rows, K3 / 3]; the last 16 form one u16, highest bit first."""
    outer, bk, _ = tile
    return (rows // outer, outer // 32, 2, 16, three // bk, bk // 24, 8), (0, 4, 1, 5, 3, 6, 2)


def _pack_tl2(codes: I8, three: int, tile: Tile) -> U8:
    """Pack int8 [rows, K] into the three sections (numpy reference)."""
    rows, k = codes.shape
    outer, bk, _ = tile
    q = codes[:, :three].reshape(rows, three // 3, 3) @ np.array([9, 3, 1], np.int8)  # [rows, K3 / 3]
    size = np.abs(q).astype(np.uint8)
    halves = (size[:, 0::2] << 4 | size[:, 1::2]).astype(np.uint8)
    index = _to_file(halves, _tl2_order(rows, three // 6, outer, bk // 6))
    signs = np.packbits(_to_file((q < 0).view(np.uint8), _sign_order(rows, three, tile)).reshape(-1, 16), axis=1)
    two = _to_file(_pair_bytes(codes[:, three:]), _tl2_order(rows, (k - three) // 4, outer, 8))
    return np.concatenate([_unswap(index), signs[:, ::-1].reshape(-1), _unswap(two)])


def _unpack_tl2(payload: U8, rows: int, k: int, three: int, tile: Tile) -> I8:
    """Unpack the three sections to int8 [rows, K] (numpy reference)."""
    outer, bk, _ = tile
    ends = rows * three // 6, rows * three // 24 * 5
    index = _from_file(_unswap(payload[: ends[0]]), _tl2_order(rows, three // 6, outer, bk // 6), (rows, three // 6))
    bits = np.unpackbits(payload[ends[0] : ends[1]].reshape(-1, 2)[:, ::-1].reshape(-1))
    negative = _from_file(bits, _sign_order(rows, three, tile), (rows, three // 3))
    two = _from_file(
        _unswap(payload[ends[1] :]), _tl2_order(rows, (k - three) // 4, outer, 8), (rows, (k - three) // 4)
    )
    codes = np.empty((rows, k), np.int8)
    signs = (1 - 2 * negative.astype(np.int8))[:, :, None]  # [rows, K3 / 3, 1]
    codes[:, :three] = (_TRIPLES[index].reshape(rows, three // 3, 3) * signs).reshape(rows, three)
    codes[:, three:] = _PAIRS[two].reshape(rows, k - three)
    return codes


@dataclass(frozen=True, slots=True, eq=False)
class TL:
    """TL1 (pairs) or TL2 (triples and signs).

    tile: None for the known models. lossy: ternarize any weight by its sign.
    """

    name: str
    tile: Tile | None = None
    lossy: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def form(self) -> type[Ternary]:
        """Ternary codes with one scale."""
        return Ternary

    @property
    def granule(self) -> tuple[int, int]:
        """The tile, or a divisor of every tile."""
        if self.tile is None:
            return 32, 4 if self.name == "tl1" else 32
        return self.tile[0], self.tile[1] if self.name == "tl1" else 32

    @property
    def row_sliced(self) -> bool:
        """False: one scale at the end."""
        return False

    def configure(self, *, tile: Tile | None = None, lossy: bool = False, **sizes: int) -> TL:
        """Return the codec with other options.

        tile=(BM, BK, bm), or BM=, BK=, bm= as in kernel_config.ini: the kernel configuration the file was written for.
        lossy: as for I2_S. Raises CodecError for an invalid tile, TypeError for other options.
        """
        if sizes:
            if tile is not None or set(sizes) != {"BM", "BK", "bm"}:
                raise TypeError(f"pass tile=(BM, BK, bm), or all of BM=, BK=, bm=; got {sorted(sizes)}")
            tile = (sizes["BM"], sizes["BK"], sizes["bm"])
        if tile is not None and (len(tile) != 3 or min(tile) < 1):
            raise CodecError("tile must be (BM, BK, bm), three positive integers", found=tile)
        return replace(self, tile=None if tile is None else (int(tile[0]), int(tile[1]), int(tile[2])), lossy=lossy)

    def with_tile(self, tile: Tile) -> TL:
        """Return the codec with another tile. Raises CodecError for an invalid tile."""
        return self.configure(tile=tile, lossy=self.lossy)

    def payload_bytes(self, shape: Shape) -> int:
        """Bytes before the padding, computed from the shape as bitnet.cpp does.

        Raises CodecError for an unsupported shape.
        """
        rows, k = as_matrix(shape)
        step, least = (4, 4) if self.name == "tl1" else (32, 256)
        if rows % 32 or k % step or k < least:
            raise CodecError(
                f"{self.name} needs rows % 32 == 0, K % {step} == 0 and K >= {least}", found=f"shape {list(shape)}"
            )
        return rows * k // 4 if self.name == "tl1" else (k - 256) * rows // 3 * 5 // 8 + 64 * rows

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """{"blocks": u8 [payload, padding to 32, 32]}; does not need the tile. Raises CodecError."""
        return {"blocks": ArraySpec((-(-self.payload_bytes(shape) // 32) * 32 + 32,), np.dtype(np.uint8))}

    def fit(self, shape: Shape) -> tuple[Tile, int, int]:
        """Return (tile, columns K3 stored as triples, bytes of all sections).

        Raises CodecError without a tile that divides the shape.
        """
        room = self.payload_bytes(shape)
        rows, k = as_matrix(shape)
        second = self.name == "tl2"
        tile = self.tile or TILES.get((rows, k), (None, None))[second]
        if tile is None:
            raise CodecError(
                f"{self.name} of shape [{rows}, {k}] is not from a known model, and its tile is not in the file",
                hint="pass tile=(BM, BK, bm) or --tile BM,BK,bm, from the kernel_config.ini it was written for",
            )
        outer, bk, bm = tile
        three = k - k % bk if second else 0
        good = bm in ((32,) if second else (32, 64)) and rows % outer == 0 and outer % bm == 0
        good = good and (
            three > 0 and bk % 24 == 0 and (k - three) % 32 == 0 if second else k % bk == bk % (256 // bm) == 0
        )
        size = rows * (three // 24 * 5 + (k - three) // 4)
        if not good or size > room:
            rule = "K % BK % 32 == 0, BK % 24 == 0, bm 32" if second else "K % BK == 0, bm 32 or 64"
            raise CodecError(
                f"tile does not fit {self.name} of shape [{rows}, {k}]",
                expected=f"rows % BM == 0, BM % bm == 0, {rule}",
                found=f"BM, BK, bm = {tile}",
            )
        return tile, three, size

    def quantize(self, w: F32, *, importance: F32 | None = None) -> Ternary:
        """Quantize ternary floats [rows, K]; ignores importance.

        Raises CodecError if w is not ternary (unless lossy).
        """
        return ternarize(self.name, w, self.lossy)

    def pack(self, codes: Ternary) -> dict[str, NDArray[np.uint8]]:
        """Pack codes to bytes. Raises CodecError without a tile, or if there are several scales."""
        of_form(self, codes)
        rows, k = codes.codes.shape
        tile, three, size = self.fit((rows, k))
        check_codes(codes.codes)
        blocks = np.zeros(self.specs((rows, k))["blocks"].shape, np.uint8)
        blocks[-32:-28] = np.array([one_scale(self.name, codes)], "<f4").view(np.uint8)
        lib, matrix = native.lib(), np.ascontiguousarray(codes.codes, np.int8)
        if lib is not None:
            lib.pack_tl(matrix.reshape(-1), blocks[:size], rows, k, three, *tile)
        elif three:
            blocks[:size] = _pack_tl2(matrix, three, tile)
        else:
            blocks[:size] = _to_file(_pair_bytes(matrix), _tl1_order(rows, k // 4, tile)).reshape(-1)
        return {"blocks": blocks}

    def payload(self, parts: Parts, shape: Shape) -> U8:
        """Return all bytes of the part, flat. Raises CodecError if the size does not match the shape."""
        spec = self.specs(shape)["blocks"]
        blocks = stored_bytes(self.name, parts, "blocks", spec)
        return np.ascontiguousarray(blocks).reshape(-1)

    def scale(self, parts: Parts, shape: Shape) -> F32:
        """Return the scale, float32 [1]."""
        return self.payload(parts, shape)[-32:-28].copy().view("<f4").astype(np.float32)

    def unpack(self, parts: Parts, shape: Shape) -> Ternary:
        """Unpack bytes to codes [rows, K].

        Raises CodecError without a tile, or if the size does not match the shape.
        """
        rows, k = as_matrix(shape)
        tile, three, size = self.fit(shape)
        payload = self.payload(parts, shape)[:size]
        lib = native.lib()
        if lib is not None:
            codes = np.empty((rows, k), np.int8)
            lib.unpack_tl(payload, codes.reshape(-1), rows, k, three, *tile)
        elif three:
            codes = _unpack_tl2(payload, rows, k, three, tile)
        else:
            codes = _PAIRS[_from_file(payload, _tl1_order(rows, k // 4, tile), (rows, k // 4))].reshape(rows, k)
        return Ternary(codes, self.scale(parts, shape))

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Return codes * scale; `rows` saves memory, not time."""
        codes = self.unpack(parts, shape)
        target = shape if rows is None else codes.codes[rows].shape
        out = output(out, target)
        chosen = codes.codes if rows is None else codes.codes[rows]
        scaled(chosen, codes.scale, out.reshape(chosen.shape))
        return out

    def cut(self, shape: Shape, index: int) -> tuple[TL, dict[str, Cut]]:
        """Cut matrix `index` out of a stack: its tiles of each section, zero padding, and the tail with the scale.

        Raises CodecError if a tile spans two matrices, or as `fit` does.
        """
        tile, three, _ = self.fit(shape)
        rows, k = shape[-2:]
        if rows % tile[0]:
            raise CodecError(
                f"this {self.name} stack cannot be split: a tile of {tile[0]} rows spans two matrices",
                found=f"matrices {[rows, k]}",
            )
        codec = self.with_tile(tile)
        _, _, size = codec.fit((rows, k))
        total, length = self.specs(shape)["blocks"].shape[0], codec.specs((rows, k))["blocks"].shape[0]
        pieces: list[slice | int] = []
        at, matrices = 0, as_matrix(shape)[0] // rows
        for each in (rows * three // 6, rows * three // 24, rows * (k - three) // 4):  # index, sign, pairs
            pieces.append(slice(at + index * each, at + (index + 1) * each))
            at += matrices * each
        return codec, {"blocks": Cut((*pieces, length - _TAIL - size, slice(total - _TAIL, total)))}

    def count_undefined(self, parts: Parts, shape: Shape) -> int:
        """Number of nibbles that no quantizer writes. Raises CodecError as `unpack` does."""
        _, three, size = self.fit(shape)
        payload = self.payload(parts, shape)[:size]
        index, pairs = as_matrix(shape)[0] * three // 6, as_matrix(shape)[0] * three // 24 * 5
        return int(
            count_bytes(payload[:index]) @ (_NIBBLES > 13).sum(axis=1)
            + count_bytes(payload[pairs:]) @ (_NIBBLES > 8).sum(axis=1)
        )


TL1 = TL("tl1")
TL2 = TL("tl2")
