"""Packing of indices as in the format's specification: a header byte (the bits), then indices, lowest bits first.

    byte   0     1 ...
         | k | i0 i1 i2 ... k bits each, no gaps, zero-padded at the end |

Shards contain the same bytes without the header, as 3-D arrays (codecs/trellis.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyquant.errors import CodecError
from polyquant.ops.trellis import pack_bits, unpack_bits
from polyquant.types import U8

__all__ = ["BITS", "pack_indices", "unpack_indices"]

BITS = range(2, 9)


def pack_indices(indices: ArrayLike, bits: int) -> U8:
    """Pack indices 0 ... 2 ** bits - 1 of any integer dtype and shape, in C order: uint8 [1 + ceil(count * bits / 8)].

    Raises CodecError for bits outside 2 to 8 and for indices that do not fit.
    """
    if bits not in BITS:
        raise CodecError("unsupported number of bits", expected="2 to 8", found=bits)
    flat = np.asarray(indices).reshape(-1)
    if flat.dtype.kind not in "iu":
        raise CodecError("indices must be integers", found=flat.dtype)
    if flat.size and not (flat.min() >= 0 and flat.max() < 1 << bits):
        raise CodecError(
            f"indices do not fit {bits} bits", expected=f"0 to {(1 << bits) - 1}", found=[flat.min(), flat.max()]
        )
    return np.concatenate([np.array([bits], np.uint8), pack_bits(flat.astype(np.uint8), bits)])


def unpack_indices(packed: ArrayLike, count: int) -> tuple[NDArray[np.int16], int]:
    """Unpack uint8 [>= 1 + ceil(count * bits / 8)] to (indices int16 [count], bits).

    Bytes after the last index are padding.

    Raises CodecError for a header byte outside 2 to 8 and for too few bytes.
    """
    data = np.asarray(packed)
    if data.dtype != np.uint8 or data.ndim != 1 or not data.size or count < 0:
        raise CodecError(
            "packed indices must be uint8 [n] with a header byte", found=f"{data.dtype} {list(data.shape)}"
        )
    bits = int(data[0])
    if bits not in BITS:
        raise CodecError("invalid number of bits in the header byte", expected="2 to 8", found=bits)
    needed = 1 + -(-count * bits // 8)
    if data.size < needed:
        raise CodecError("packed indices are too short", expected=f"{needed:,} bytes", found=f"{data.size:,} bytes")
    return unpack_bits(data[1:needed], bits, count).astype(np.int16), bits
