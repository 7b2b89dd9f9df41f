"""Parts and shapes that do not fit: a CodecError of one line from every codec, never another exception or a crash."""

import numpy as np
import pytest

import polyquant
from polyquant.errors import CodecError, PolyquantError
from polyquant.types import Affine, Blocks, Floats, Ternary, TrellisCodes

CODECS = [info.name for info in polyquant.codecs()]
SHAPE = (32, 256)
SHAPES = [SHAPE, [32, 256], (0, 256), (32, 0), (0, 0), (), (256,), (2, 16, 256), (-1, 256), (32, -256), (10**12, 256)]


def random_parts(codec):
    """Parts of the right sizes with random bytes; None where the codec has no such shape."""
    rng = np.random.default_rng(0)
    try:
        specs = codec.specs(SHAPE)
    except CodecError:
        return None
    out = {}
    for key, spec in specs.items():
        raw = rng.integers(0, 2 if spec.dtype == bool else 256, spec.nbytes, dtype=np.uint8)
        out[key] = raw.view(spec.dtype).reshape(spec.shape)
    return out


def changed(array):
    """The same part with other rows, types and layouts, and objects that are not arrays."""
    yield from (None, 3, "x", b"bytes", [1, 2], array.tolist(), np.zeros((), array.dtype))
    yield array[:0] if array.ndim else array
    yield array.reshape(1, *array.shape)
    yield from (np.zeros(array.shape, kind) for kind in (object, complex, np.int64, np.float64, "U1", "M8[s]"))
    yield np.zeros(array.shape, np.dtype(np.uint32).newbyteorder(">"))
    yield np.broadcast_to(np.zeros((), array.dtype), array.shape)  # strides of 0
    yield array[::-1] if array.ndim else array


def refused_or_done(call):
    """True if the call succeeds; exceptions other than a PolyquantError of one line fail the test."""
    try:
        with np.errstate(all="ignore"):
            call()
    except PolyquantError as problem:
        assert "\n" not in str(problem)
        return False
    return True


@pytest.mark.parametrize("name", CODECS)
def test_parts_that_do_not_fit_are_refused(name):
    codec = polyquant.codec(name)
    parts = random_parts(codec)
    if parts is None:
        pytest.skip("only for the shapes of known models")
    refused_or_done(lambda: codec.dequantize(parts, SHAPE))  # any bytes: values or an error
    for wrong in (None, [], "x", {}):
        assert not refused_or_done(lambda wrong=wrong: codec.dequantize(wrong, SHAPE))
    for key, array in parts.items():
        missing = {k: v for k, v in parts.items() if k != key}
        assert not refused_or_done(lambda missing=missing: codec.dequantize(missing, SHAPE)) or "bias" in key, key
        for other in changed(array):
            refused_or_done(lambda key=key, other=other: codec.dequantize({**parts, key: other}, SHAPE))
            refused_or_done(lambda key=key, other=other: codec.unpack({**parts, key: other}, SHAPE))
    if codec.row_sliced:
        refused_or_done(lambda: codec.dequantize(parts, SHAPE, rows=slice(5, 5)))


@pytest.mark.parametrize("name", CODECS)
def test_shapes_that_do_not_fit_are_refused(name):
    codec = polyquant.codec(name)
    parts = random_parts(codec) or {}
    for shape in SHAPES:
        refused_or_done(lambda shape=shape: codec.specs(shape))
    for shape in SHAPES[1:-1]:
        refused_or_done(lambda shape=shape: codec.dequantize(parts, shape))
        refused_or_done(lambda shape=shape: codec.unpack(parts, shape))


@pytest.mark.parametrize("name", CODECS)
def test_arrays_without_rows_or_columns_quantize_or_are_refused(name):
    codec = polyquant.codec(name)
    for shape in ((0, 256), (32, 0), (0, 0), (0,), ()):
        refused_or_done(lambda shape=shape: codec.pack(codec.quantize(np.zeros(shape, np.float32))))
    for wrong in (None, "x", np.zeros(SHAPE, complex), np.full(SHAPE, None), np.full(SHAPE, "x")):
        assert not refused_or_done(lambda wrong=wrong: codec.quantize(wrong))


@pytest.mark.parametrize("name", CODECS)
def test_objects_that_are_not_codes_are_refused(name):
    codec = polyquant.codec(name)
    others = [form for form in (Floats, Ternary, Affine, Blocks, TrellisCodes) if form is not codec.form]
    for wrong in (None, 3, "x", [1], np.zeros(SHAPE, np.float32), codec, *(object.__new__(form) for form in others)):
        with pytest.raises(PolyquantError) as problem:
            codec.pack(wrong)
        assert "\n" not in str(problem.value)
        assert "read-only" in str(problem.value) or codec.form.__name__ in str(problem.value)
