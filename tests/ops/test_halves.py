"""Tables of scales in 16-bit floats, and checksums: native kernels against numpy and zlib."""

from __future__ import annotations

import zlib

import ml_dtypes
import numpy as np
import pytest

from polyquant.ops import checksum, halves, native

DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
EDGES = (0.0, -0.0, 1.0, 65504.0, 65519.9, 65520.0, 3e38, 1e-8, 2.98e-8, 5.9e-8, 1e-41, 1e-45, np.inf, np.nan)


def number_lists() -> list[np.ndarray]:
    """Ordinary numbers, each edge alone, and a table of two dimensions."""
    generator = np.random.default_rng(3)
    lists = [np.asarray([sign * e], np.float32) for e in EDGES for sign in (1, -1)]
    return [*lists, np.empty(0, np.float32), generator.standard_normal((37, 5)).astype(np.float32)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_narrow_is_numpys_rounding(dtype: np.dtype) -> None:
    """The same bits, and the same verdict on numbers that do not fit."""
    for values in number_lists():
        stored, fits = halves.narrow(values, dtype)
        with native.engine("numpy"):
            expected, same = halves.narrow(values, dtype)
        numbers = ~np.isnan(values)
        assert np.array_equal(stored.view(np.uint16)[numbers], expected.view(np.uint16)[numbers])
        assert fits == same, values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_widen_is_exact_for_every_number(dtype: np.dtype) -> None:
    """All 65,536 of them, also transposed; NaN stays NaN."""
    stored = np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(256, 256).T
    found, expected = halves.widen(stored), stored.astype(np.float32)
    numbers = ~np.isnan(expected)
    assert found.flags.c_contiguous
    assert np.array_equal(np.isnan(found), ~numbers)
    assert np.array_equal(found[numbers].view(np.uint32), expected[numbers].view(np.uint32))


def test_other_dtypes_are_widened_too() -> None:
    """Integers are converted; float32 is not copied."""
    floats = np.ones((2, 3), np.float32)
    assert np.shares_memory(halves.widen(floats), floats)
    assert halves.widen(np.asarray([[-7]], np.int8)).tolist() == [[-7.0]]


@pytest.mark.parametrize("size", [0, 1, 15, 16, 63, 64, 65, 127, 128, 129, 191, 192, 1000, 100_001])
def test_crc32_is_zlibs(size: int) -> None:
    """For every start, at any address, and continued in the middle."""
    data = np.random.default_rng(size).integers(0, 256, size + 3, np.uint8).tobytes()
    for start in (0, 1, 3):
        view = memoryview(data)[start : start + size]
        for crc in (0, 0x12345678, 0xFFFFFFFF):
            assert checksum.crc32(view, crc) == zlib.crc32(view, crc)
        half = size // 2
        assert checksum.crc32(view[half:], checksum.crc32(view[:half])) == zlib.crc32(view)
