"""CRC-32 of the bytes that are written, as in zlib. Native counterpart: native/base/checksum.cpp."""

from __future__ import annotations

import zlib

import numpy as np

from polyquant.ops import native

__all__ = ["crc32"]


def crc32(data: bytes | memoryview, crc: int = 0) -> int:
    """Checksum of C-contiguous bytes, appended to those with the checksum `crc`."""
    if (lib := native.lib()) is None:
        return zlib.crc32(data, crc)
    out: int = lib.crc32(np.frombuffer(data, np.uint8), crc)
    return out
