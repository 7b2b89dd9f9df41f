"""Trellis codes: bit streams, windows, codebooks, and the encoder, each with its numpy reference.

A tile is 256 values. Its codes of k bits form one circular stream of 256 k bits, least significant bit first:

    bit      0    k    2k   3k                     256 k
             | c0 | c1 | c2 | c3 | ...  | c255 |  (then c0 again)
    state j  [-- window of L bits that starts at bit k j --)        value j = codebook(state j)

With L = k the states are the codes. With L > k adjacent states share L - k bits: a tail-biting trellis of 2 ** L
states.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from polyquant.ops import native
from polyquant.types import F32, U8

__all__ = [
    "CODEBOOKS",
    "GRID_STEP",
    "SEAM",
    "TILE",
    "TILE_ORDERS",
    "codebook",
    "decode",
    "encode",
    "encode_reference",
    "fractions",
    "integer_levels",
    "pack_bits",
    "states",
    "unpack_bits",
]  # fmt: skip

TILE = 256
GRID_STEP = np.float32(1.24371088)
CODEBOOKS = ("grid", "mul1", "mcg", "3inst", "lut")
SEAM = 128
"""Steps on either side of a tile's seam that are considered when choosing the state there."""
RANGE = 6.0
"""Standard deviations at the end of the encoder's 16 bits: at most a value beyond 2.5 is further than that from a
level, where differences saturate."""

_U16 = NDArray[np.uint16]


# ---------------------------------------------------------------- codes <-> bytes


def pack_bits(codes: U8, bits: int) -> U8:
    """Pack codes [..., n] below 2 ** bits -> uint8 [..., ceil(n * bits / 8)], least significant bit first,
    zero-padded."""
    lib = native.lib()
    if lib is not None and codes.shape[-1] % 8 == 0 and codes.size:
        out = np.empty((*codes.shape[:-1], codes.shape[-1] * bits // 8), np.uint8)
        lib.trellis_pack(np.ascontiguousarray(codes).reshape(-1), bits, out.reshape(-1))
        return out
    wide = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(wide.reshape(*codes.shape[:-1], codes.shape[-1] * bits), axis=-1, bitorder="little")


def unpack_bits(packed: U8, bits: int, count: int = TILE) -> U8:
    """Unpack uint8 [..., at least ceil(count * bits / 8)] -> codes [..., count]."""
    lib = native.lib()
    if lib is not None and count % 8 == 0 and packed.shape[-1] == count * bits // 8 and packed.size:
        out = np.empty((*packed.shape[:-1], count), np.uint8)
        lib.trellis_unpack(np.ascontiguousarray(packed).reshape(-1), bits, out.reshape(-1))
        return out
    wide = np.unpackbits(packed, axis=-1, count=count * bits, bitorder="little").reshape(
        *packed.shape[:-1], count, bits
    )
    return np.asarray((wide << np.arange(bits, dtype=np.uint8)).sum(-1), np.uint8)


def states(codes: U8, bits: int, window_bits: int) -> _U16:
    """Return the windows [..., 256] of codes [..., 256]: state j holds the codes j, j + 1, ... from its low end."""
    out = np.zeros(codes.shape, np.uint32)
    for i in range(-(-window_bits // bits)):
        out |= np.roll(codes, -i, -1).astype(np.uint32) << np.uint32(i * bits)
    return np.asarray(out & np.uint32((1 << window_bits) - 1), np.uint16)


# ---------------------------------------------------------------- codebooks


MUL1_STEP, MUL1_MIDDLE = 0.00676727294921875, 10.3828125  # 0x1eee and 0xc931 in half precision
HALVES_STEP = 2.0**-13  # mcg, 3inst: the last bit of the smallest of their numbers


def _byte_sums(state: NDArray[np.uint32]) -> NDArray[np.uint64]:
    return np.asarray((state * np.uint32(0x83DCD12D)).view(np.uint8).reshape(-1, 4).sum(-1), np.uint64)


def _mul1(state: NDArray[np.uint32]) -> F32:
    """Return the values as a fused multiply-add in half precision computes them, as on the GPUs of the original
    code."""
    total = np.float32(1024) + _byte_sums(state).astype(np.float32)
    return np.asarray(total * np.float32(MUL1_STEP) - np.float32(MUL1_MIDDLE), np.float32)


def _halves(bits: NDArray[np.uint32]) -> F32:
    pair = ((bits & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)).view(np.float16).reshape(-1, 2)
    return np.asarray(pair[:, 0] + pair[:, 1], np.float32)


@cache
def codebook(name: str, window_bits: int) -> F32:
    """Return the values of a codebook, float32 [2 ** window_bits], read-only. "lut" has no built-in values. Raises
    KeyError.

    grid: (i - (2 ** L - 1) / 2) * 1.24371088, L = bits (Metal Marlin). mul1, mcg, 3inst: those of EXL3, which hash 16
    bits; a shorter window is a value below 2 ** L. Except for the grid, values are half precision with a variance of
    about 1.
    """
    state = np.arange(1 << window_bits, dtype=np.uint32)
    if name == "grid":
        out = (state.astype(np.float32) - np.float32(((1 << window_bits) - 1) / 2)) * GRID_STEP
    elif name == "mul1":
        out = _mul1(state).astype(np.float16).astype(np.float32)
    elif name == "mcg":
        out = _halves(state * np.uint32(0xCBAC1FED))
    elif name == "3inst":
        out = _halves(state * np.uint32(89226354) + np.uint32(64248484))
    else:
        raise KeyError(name)
    out.flags.writeable = False
    return out


def _tensor_core_order() -> NDArray[np.intp]:
    """Return EXL3's tile order: the layout of the 32 threads of a tensor-core fragment, reversed in our reading
    direction."""
    thread, i = np.divmod(np.arange(TILE), 8)
    row = thread % 4 * 2 + i % 2 + i // 2 % 2 * 8
    column = thread // 4 + i // 4 * 8
    return np.asarray((16 * row + column)[::-1], np.intp)


TILE_ORDERS: dict[str, NDArray[np.intp]] = {"row_major": np.arange(TILE), "exl3": _tensor_core_order()}
"""Stream position -> index in the tile, 16 * input + output."""


def decode(codes: U8, bits: int, window_bits: int, table: F32) -> F32:
    """Decode codes [..., 256] -> values float32 [..., 256] in stream order."""
    return table[states(codes, bits, window_bits)]


@cache
def integer_levels(name: str, window_bits: int) -> tuple[NDArray[np.int16], float, float]:
    """Return (levels int16 [2 ** window_bits], step, zero) for kernels: values of a codebook are about level * step +
    zero.

    mul1: sums of four bytes, grid: its index: exact except for half-precision rounding. mcg and 3inst: multiples of
    2^-13, exact.
    """
    state = np.arange(1 << window_bits, dtype=np.uint32)
    if name == "grid":
        return state.astype(np.int16), float(GRID_STEP), float(-GRID_STEP * ((1 << window_bits) - 1) / 2)
    if name == "mul1":
        return _byte_sums(state).astype(np.int16), MUL1_STEP, 1024 * MUL1_STEP - MUL1_MIDDLE
    return np.rint(codebook(name, window_bits) * np.float32(1 / HALVES_STEP)).astype(np.int16), HALVES_STEP, 0.0


def fractions(table: F32) -> tuple[NDArray[np.int16], float, float]:
    """Compute `integer_levels` of any table, as 16-bit fractions of the largest value."""
    levels, factor = _levels(table, 4)
    return levels, float(1 / factor), 0.0


# ---------------------------------------------------------------- encoder


def _levels(table: F32, end: float) -> tuple[NDArray[np.int16], np.float32]:
    """Return the codebook as int16, and the factor: `end`, or the largest value, is the end of the range."""
    factor = np.float32(32767) / max(np.float32(end), np.abs(table).max())
    return np.rint(table * factor).astype(np.int16), factor


def _doublings(bits: int) -> int:
    """Return how often a difference is doubled before squaring, so that the small errors of many bits keep their
    precision."""
    return max(0, bits - 4)


def _square(x: NDArray[np.int32], levels: NDArray[np.int32], doublings: int) -> NDArray[np.int32]:
    """Return round(d ** 2 / 2 ** 15) of saturated differences x - level: [..., S], at most 32768."""
    d = (x - levels) << doublings  # saturating once equals saturating after each doubling
    np.maximum(d, -32768, out=d)
    np.minimum(d, 32767, out=d)
    d *= d
    d += 0x4000
    d >>= 15
    return d


def encode_reference(tiles: F32, bits: int, window_bits: int, table: F32) -> U8:
    """Encode values [T, 256] as codes uint8 [T, 256]: the tail-biting path of least squared error (Viterbi), in 16-bit
    arithmetic.

    A first pass over a full round, starting half a tile before the seam from all states, selects the state at the seam;
    a second pass goes from that state back to itself. Ties go to the smallest code. Metrics saturate at 65535; the
    smallest is subtracted at each step.
    """
    levels, factor = _levels(table, RANGE)
    x = np.clip(np.rint(tiles * factor), -32767, 32767).astype(np.int32)
    batch = max(1, (1 << 19) >> window_bits)  # tiles per batch, to share numpy's overhead per step
    out = np.empty(tiles.shape, np.uint8)
    for t in range(0, len(x), batch):
        out[t : t + batch] = _encode_some(x[t : t + batch], bits, window_bits, levels.astype(np.int32))
    return out


def _encode_some(x: NDArray[np.int32], bits: int, window_bits: int, levels: NDArray[np.int32]) -> U8:
    """Encode x [T, 256], in units of the levels -> codes [T, 256]."""
    groups, each, steps = 1 << (window_bits - bits), np.arange(len(x))[:, None], np.arange(1 << bits)

    def sums(metric: NDArray[np.int32], value: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the metrics of all states: [T, groups, 2 ** bits], with the predecessors of a group adjacent."""
        e = _square(value[:, None], levels, _doublings(bits)).reshape(len(x), 1 << bits, groups)
        e += metric[:, None]
        np.minimum(e, 65535, out=e)
        return np.asarray(e.reshape(len(x), groups, 1 << bits), np.int32)

    def predecessors(metric: NDArray[np.int32], value: NDArray[np.int32], group: NDArray[np.intp]) -> NDArray[np.int32]:
        """Return `sums` of the predecessors of one group per tile: [T, 2 ** bits]."""
        states = group[:, None] << bits | steps
        e = _square(value[:, None], levels[states], _doublings(bits)) + metric[each, states & (groups - 1)]
        return np.asarray(np.minimum(e, 65535), np.int32)

    def walk(metric: NDArray[np.int32], values: NDArray[np.int32]) -> list[NDArray[np.int32]]:
        history = [metric]
        for value in values.T:
            last = history[-1]
            history.append(np.asarray(sums(last, value).min(-1) - last.min(-1, keepdims=True), np.int32))
        return history

    def back(
        history: list[NDArray[np.int32]], values: NDArray[np.int32], group: NDArray[np.intp]
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        path = np.empty((values.shape[1], len(x)), np.intp)
        for j in range(values.shape[1] - 1, -1, -1):
            path[j] = group << bits | predecessors(history[j], values[:, j], group).argmin(-1)
            group = path[j] & (groups - 1)
        return group, path

    around = np.concatenate([x[:, -SEAM:], x[:, :SEAM]], 1)
    history = walk(np.zeros((len(x), groups), np.int32), around)
    seam, _ = back(history[SEAM:], around[:, SEAM:], history[-1].argmin(-1))
    start = np.full((len(x), groups), 65535, np.int32)
    start[np.arange(len(x)), seam] = 0
    _, path = back(walk(start, x), x, seam)
    return np.asarray(path.T & ((1 << bits) - 1), np.uint8)


def encode(tiles: F32, bits: int, window_bits: int, table: F32) -> U8:
    """Compute `encode_reference`, natively if available, with equal codes."""
    lib = native.lib()
    tiles = np.ascontiguousarray(tiles, np.float32)
    if lib is None:
        return encode_reference(tiles, bits, window_bits, table)
    levels, factor = _levels(table, RANGE)
    out = np.empty(tiles.shape, np.uint8)
    lib.trellis_encode(tiles, bits, window_bits, levels, float(factor), _doublings(bits), out)
    return out
