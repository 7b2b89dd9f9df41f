"""Packings of codes: the native kernels against the numpy references, and against the definition bit by bit."""

import numpy as np
import pytest

from polyquant.ops import code_streams, native

BITS = range(1, 9)
COUNTS = (1, 7, 8, 31, 32, 33, 76, 320, 1029)


def _codes(rows: int, count: int, bits: int) -> np.ndarray:
    return np.random.default_rng(bits * 1000 + count).integers(0, 2**bits, (rows, count)).astype(np.uint8)


def _definition(codes: np.ndarray, bits: int, pitch: int) -> np.ndarray:
    """Code i of a row at bits [b i, b i + b) of a large integer."""
    rows = [sum(int(c) << (bits * i) for i, c in enumerate(row)).to_bytes(pitch, "little") for row in codes]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(codes), pitch)


@pytest.mark.parametrize("engine", ["native", "numpy"])
@pytest.mark.parametrize("bits", BITS)
def test_streams_follow_the_definition(bits: int, engine: str) -> None:
    for count in COUNTS:
        codes, pitch = _codes(3, count, bits), code_streams.pitch_of(count, bits)
        expected = _definition(codes, bits, pitch)
        shift = 2 ** (bits - 1)
        with native.engine(engine):
            np.testing.assert_array_equal(code_streams.pack(codes, bits, pitch), expected)
            np.testing.assert_array_equal(code_streams.unpack(expected, bits, count), codes)
            np.testing.assert_array_equal(code_streams.unpack(expected, bits, count, shift), codes - np.uint8(shift))
            np.testing.assert_array_equal(code_streams.pack(codes - np.uint8(shift), bits, pitch, shift), expected)
            # the tightest pitch, where the last eight bytes are not all there
            short = -(-count * bits // 8)
            np.testing.assert_array_equal(code_streams.pack(codes, bits, short), expected[:, :short])
            np.testing.assert_array_equal(code_streams.unpack(expected[:, :short], bits, count), codes)


@pytest.mark.parametrize("engine", ["native", "numpy"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("n", "groups"), [(1, 1), (17, 3), (40, 30)])
def test_columns_are_transposed_streams(bits: int, n: int, groups: int, engine: str) -> None:
    codes = _codes(n, 32 * groups, bits)
    words = _definition(codes, bits, 4 * groups * bits).view("<i4").T
    wide = np.full((len(words), n + 5), -1, np.int32)
    with native.engine(engine):
        code_streams.pack_columns(codes, wide[:, 2 : 2 + n], bits)
        np.testing.assert_array_equal(wide[:, 2 : 2 + n], words)
        assert (wide[:, :2] == -1).all() and (wide[:, 2 + n :] == -1).all()
        np.testing.assert_array_equal(code_streams.unpack_columns(wide[:, 2 : 2 + n], bits), codes)
        np.testing.assert_array_equal(code_streams.unpack_columns(words, bits, 1), codes - np.uint8(1))


@pytest.mark.parametrize("engine", ["native", "numpy"])
@pytest.mark.parametrize(("n", "k"), [(8, 1), (24, 200), (144, 96)])
def test_interleaved_words_have_the_order_of_awq(n: int, k: int, engine: str) -> None:
    codes, order = _codes(n, k, 4), (0, 2, 4, 6, 1, 3, 5, 7)
    words = np.zeros((k, n // 8), np.uint32)
    for p, row in enumerate(order):
        words |= codes[row::8].T.astype(np.uint32) << np.uint32(4 * p)
    wide = np.full((k, n // 8 + 3), -1, np.int32)
    with native.engine(engine):
        code_streams.pack_interleaved(codes - np.uint8(8), wide[:, 1 : 1 + n // 8], 8)
        np.testing.assert_array_equal(wide[:, 1 : 1 + n // 8].view(np.uint32), words)
        assert (wide[:, 0] == -1).all() and (wide[:, 1 + n // 8 :] == -1).all()
        np.testing.assert_array_equal(code_streams.unpack_interleaved(words.view(np.int32), 8), codes - np.uint8(8))


@pytest.mark.parametrize(("bits", "numbers"), [(4, 1), (4, 2), (5, 1), (5, 2), (8, 1)])
def test_blocks(bits: int, numbers: int) -> None:
    codes, rng = _codes(70, 32, bits), np.random.default_rng(bits)
    halves = rng.normal(size=(70, numbers)).astype(np.float16)
    size, shift = code_streams.block_bytes(bits, numbers), 2 ** (bits - 1)
    made = []
    for engine in ("native", "numpy"):
        with native.engine(engine):
            blocks = code_streams.pack_blocks(codes, halves, bits)
            assert blocks.shape == (70, size)
            made.append(blocks)
            for less in (0, shift):
                got, numbers_back = code_streams.unpack_blocks(blocks, bits, numbers, less)
                np.testing.assert_array_equal(got, codes - np.uint8(less))
                np.testing.assert_array_equal(numbers_back.view(np.uint16), halves.view(np.uint16))
            moved = code_streams.pack_blocks(codes - np.uint8(shift), halves, bits, shift)
            np.testing.assert_array_equal(moved, blocks)
    np.testing.assert_array_equal(*made)
