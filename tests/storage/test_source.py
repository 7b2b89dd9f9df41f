import os

import numpy as np
import pytest

from polyquant.errors import InputError
from polyquant.ops.strings import skip_strings
from polyquant.storage.source import FileArray, Source, Swap, foreign
from polyquant.types import ArraySpec

U8 = np.dtype(np.uint8)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(range(200)))
    return Source(path)


def test_reads_and_map_agree(source):
    assert source.size == 200
    assert source.map().tobytes() == bytes(range(200))
    assert source.map() is source.map()
    assert not source.map().flags.writeable
    np.testing.assert_array_equal(source.pread(10, 5), [10, 11, 12, 13, 14])
    with pytest.raises(InputError, match="is too short"):
        source.pread(190, 11)


def test_an_empty_file_has_an_empty_map(tmp_path):
    (tmp_path / "x").touch()
    assert Source(tmp_path / "x").map().shape == (0,)


def test_the_descriptor_is_closed(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    source = Source(tmp_path / "x")
    fd, mapped = source.fileno(), source.map()
    del source
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert mapped.tobytes() == b"abc"


def test_a_file_that_shrinks_is_an_error(source):
    array = FileArray(source, 100, ArraySpec((100,), U8))
    os.truncate(source.path, 150)
    with pytest.raises(InputError, match="is too short for its data"):
        array.read(0, 100)
    np.testing.assert_array_equal(array.read(0, 50), np.arange(100, 150))


@pytest.mark.parametrize(("offset", "n"), [(-1, 1), (200, 1), (0, 201), (1 << 70, 1), (0, 1 << 70)])
def test_arrays_are_inside_the_file(source, offset, n):
    with pytest.raises(InputError, match="outside the file"):
        FileArray(source, offset, ArraySpec((n,), U8))


@pytest.mark.parametrize(
    ("shape", "dtype", "offset"),
    [((4, 3), "<u2", 8), ((4, 3), "<u4", 1), ((), "<f4", 5), ((7,), "u1", 3), ((0, 4), "<f4", 9)],
)
def test_view_and_read_agree(source, shape, dtype, offset):
    spec = ArraySpec(shape, np.dtype(dtype))
    array = FileArray(source, offset, spec)
    expected = np.frombuffer(bytes(range(200))[offset : offset + spec.nbytes], dtype).reshape(shape)
    for found in (array.view(), array.read(0, shape[0] if shape else 1)):
        assert found.shape == shape and found.dtype == spec.dtype and found.flags.aligned
        np.testing.assert_array_equal(found, expected)
    assert not array.view().flags.writeable
    if shape and shape[0] > 3:
        np.testing.assert_array_equal(array.read(1, 3), expected[1:3])


def test_fields_inside_blocks_are_swapped(source):
    array = FileArray(source, 0, ArraySpec((2, 16), U8), Swap(8, ((0, 2, 2), (6, 2, 1))))
    row = [1, 0, 3, 2, 4, 5, 7, 6, 9, 8, 11, 10, 12, 13, 15, 14]
    expected = np.array([row, [16 + x for x in row]])
    np.testing.assert_array_equal(array.view(), expected)
    np.testing.assert_array_equal(array.read(1, 2), expected[1:])
    assert source.map()[:2].tolist() == [0, 1]
    assert array.read(1, 1).shape == (0, 16)


def test_exactly_one_byte_order_is_foreign():
    assert foreign("<") != foreign(">")


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("wide", [True, False])
def test_strings_are_skipped(engine, order, wide):
    texts = [b"", b"abc", b"x" * 300]
    width = 8 if wide else 4
    raw = b"??" + b"".join(len(t).to_bytes(width, "little" if order == "<" else "big") + t for t in texts)
    buffer, starts = np.frombuffer(raw, U8), np.empty(3, np.int64)
    options = {"big_endian": order == ">", "wide": wide}
    assert skip_strings(buffer, 2, 3, **options, starts=starts) == len(raw)
    assert starts.tolist() == [2, 2 + width, 2 + 2 * width + 3]
    assert skip_strings(buffer, 2, 0, **options) == 2
    for cut in range(2, len(raw)):
        assert skip_strings(buffer[:cut], 2, 3, **options) == -1
    for count in (1, 2):
        assert skip_strings(np.full(64, 255, np.uint8), 0, count, **options, starts=np.empty(count, np.int64)) == -1
