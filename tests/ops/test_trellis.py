"""Streams, windows and codebooks against golden vectors; the encoder against its reference and distortion targets."""

from __future__ import annotations

import numpy as np
import pytest
from tests.golden import arrays

from polyquant.ops import native
from polyquant.ops import trellis as ops

pytestmark = pytest.mark.filterwarnings("error")


def windows_of(z: dict[str, np.ndarray]) -> list[tuple[int, int, str]]:
    """(bits, window, key) of each array of states."""
    return [(int(k[1 : k.index("_")]), int(k.split("_")[1][1:]), k) for k in z if k.endswith("_states")]


@pytest.mark.parametrize("engine", ["native", "numpy"])
def test_streams_and_windows(engine: str) -> None:
    z = arrays("trellis/window_vectors.npz")
    found = windows_of(z)
    assert len(found) > 30
    with native.engine(engine):
        for bits, window, key in found:
            packed = z[f"k{bits}_packed"]
            codes = ops.unpack_bits(packed, bits)
            np.testing.assert_array_equal(ops.pack_bits(codes, bits), packed)
            np.testing.assert_array_equal(ops.states(codes, bits, window), z[key])
            sums = z[key.replace("states", "mul1_int")]
            levels, step, zero = ops.integer_levels("mul1", window)
            np.testing.assert_array_equal(levels[z[key]] - 510, sums)
            # the values are the levels, up to half precision
            assert np.abs(levels * step + zero - ops.codebook("mul1", window)).max() < 1e-3


@pytest.mark.parametrize("name", ["mul1", "mcg", "3inst"])
def test_codebooks_are_close_to_normal(name: str) -> None:
    for window in (12, 14, 16):
        book = ops.codebook(name, window)
        assert abs(book.mean()) < 0.03
        assert 0.99 < book.std() < 1.25
        assert np.array_equal(book, book.astype(np.float16))


@pytest.mark.parametrize("name", ["mcg", "3inst"])
def test_levels_of_hashed_halves_are_exact(name: str) -> None:
    levels, step, zero = ops.integer_levels(name, 16)
    np.testing.assert_array_equal(levels * np.float64(step) + zero, ops.codebook(name, 16))


CASES = [
    (1, 6),
    (2, 8),
    (2, 9),
    (2, 12),
    (3, 9),
    (3, 10),
    (3, 11),
    (3, 12),
    (4, 8),
    (4, 10),
    (4, 12),
    (4, 13),
    (5, 9),
    (6, 10),
    (7, 11),
    (8, 12),
    (8, 8),
    (3, 3),
]


@pytest.mark.skipif(native.lib() is None, reason="no native kernels here")
@pytest.mark.parametrize(("bits", "window"), CASES)
def test_encoder_equals_its_reference(bits: int, window: int, kernels: str) -> None:
    tiles = np.random.default_rng(bits * 16 + window).standard_normal((3, 256)).astype(np.float32)
    tiles[1] *= 3  # beyond the codebook, where distances saturate
    tiles[2] = 0
    book = ops.codebook("grid", bits) / 2 ** (bits - 1) if window == bits else ops.codebook("mul1", window)
    np.testing.assert_array_equal(
        ops.encode(tiles, bits, window, book), ops.encode_reference(tiles, bits, window, book)
    )


@pytest.mark.skipif(native.lib() is None, reason="no native kernels here")
@pytest.mark.parametrize(("bits", "window"), [(2, 15), (3, 15), (4, 15)])
def test_partially_kept_rows(bits: int, window: int, kernels: str) -> None:
    tiles = np.random.default_rng(window).standard_normal((1, 256)).astype(np.float32)
    book = ops.codebook("mul1", window)
    np.testing.assert_array_equal(
        ops.encode(tiles, bits, window, book), ops.encode_reference(tiles, bits, window, book)
    )


def test_grid_is_rounding() -> None:
    x = np.linspace(-5, 5, 512, dtype=np.float32).reshape(2, 256)
    book = ops.codebook("grid", 3)
    np.testing.assert_array_equal(ops.encode(x, 3, 3, book), np.abs(x[..., None] - book).argmin(-1))


@pytest.mark.parametrize(("bits", "window"), [(2, 8), (3, 9)])
def test_path_is_optimal(bits: int, window: int) -> None:
    """Against an exhaustive search over every state at the seam, in float64: no more than 16-bit metrics cost."""
    tile = np.random.default_rng(3).standard_normal(256).astype(np.float32)
    book = ops.codebook("mul1", window).astype(np.float64)
    groups, states = 1 << (window - bits), np.arange(1 << window)
    costs = np.where(np.eye(groups, dtype=bool), 0, np.inf)  # [start, group]
    for value in tile:
        step = costs[:, states & (groups - 1)] + (value - book) ** 2
        costs = step.reshape(groups, groups, 1 << bits).min(-1)
    best = costs.diagonal().min()
    codes = ops.encode(tile[None], bits, window, book.astype(np.float32))
    found = ((ops.decode(codes, bits, window, book.astype(np.float32))[0] - tile) ** 2).sum()
    assert best <= found * (1 + 1e-6)
    assert found <= best * 1.01


@pytest.mark.skipif(native.lib() is None, reason="no native kernels here")
def test_the_encoder_refuses_nan() -> None:
    tiles = np.full((1, 256), np.nan, np.float32)
    codes = ops.encode(tiles, 3, 10, ops.codebook("mul1", 10))
    assert codes.max() < 8
