"""What every codec promises, whoever calls it with whatever. The test of a codec is one call, plus its golden vectors:

    def test_contract():
        check_codec(MY_CODEC, np.random.default_rng(0).standard_normal((16, 256)), error=0.01)

    def test_golden_bytes():
        check_dequantize("my_codec", golden_bytes, golden_floats)

`check_codec` holds a codec against each of these, and raises AssertionError:

    names      str() is the name; the name, `form` and `granule` are of the right kind
    sizes      `specs` says shape and dtype of what `pack` gives, for every shape that it does not refuse
    codes      `quantize` and `unpack` give the codec's form; what is unpacked packs to the same parts
    floats     what comes back is float32 of the shape, near the weight (`error`), and in every real dtype, byte order and stride the same
    shapes     matrices, vectors, stacks, no rows at all: the same numbers, or `specs` raises CodecError; a column too many is refused
    rows       of a `row_sliced` codec rows [a, b) of every part are rows [a, b) of the weight
    out        is filled and returned; any array that does not fit is refused
    refusals   what is no weight, a part that is missing, too short or of another dtype, another shape, an unknown option: errors of one line
    importance is checked, where the codec takes it (`weighted`)
    claims     every capability that the codec claims (polyquant.testing.capabilities)

Codecs that only read take `parts` and `shape` in place of a weight; `any_parts` makes some. A codec that is not the registry's default, or is not
registered, is checked all the same; `check_registered` holds its name against the registry.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant import registry
from polyquant.capabilities import Configurable
from polyquant.errors import CodecError, UnsupportedError
from polyquant.ops import native
from polyquant.testing.capabilities import check_capabilities
from polyquant.testing.refusals import refused
from polyquant.types import F32, Codec, Form, Parts, Shape, as_matrix

__all__ = [
    "any_parts", "awkward_floats", "check_codec", "check_dequantize", "check_opaque", "check_quantize_bytes",
    "check_registered", "check_same_engines",
    "check_sizes", "same_floats", "weighted_error",
]  # fmt: skip

Finish = Callable[[Any], Any]
"""Codes of `quantize` -> codes that `pack` takes."""


def check_codec(
    codec: Codec,
    w: F32 | None = None,
    *,
    error: float = 0.0,
    weighted: bool = False,
    finish: Finish | None = None,
    parts: Parts | None = None,
    shape: Shape | None = None,
) -> None:
    """Everything above, with the engine that is chosen (ops.native.engine).

    w: float32 [rows, K] that the codec can hold; rows a multiple of 2 and of the granule. error: the largest squared error over the squares of w; 0: exact.
    weighted: the codec takes importance. finish: for codecs whose `pack` needs more than the weight, e.g. the grid of the inputs. parts, shape: in place
    of w, of a codec that only reads.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _check_names(codec)
        if w is None:
            assert parts is not None and shape is not None, "a weight, or parts and their shape"
            _check_only_read(codec, parts, shape)
        else:
            floats, shape = np.asarray(w, np.float32), np.shape(w)
            whole: Finish = finish if finish is not None else lambda codes: codes
            parts = _check_round(codec, floats, error, whole)
            _check_arrays(codec, floats, whole)
            _check_shapes(codec, floats, whole)
            nonsense: tuple[Any, ...] = (
                floats.astype(complex),
                floats.astype(str),
                floats.astype(object),
                "text",
                None,
            )
            for wrong in nonsense:
                refused(partial(codec.quantize, wrong), CodecError, says="real numbers")
            if weighted:
                _check_importance(codec, floats, whole)
        _check_reading(codec, parts, shape)
        check_capabilities(codec, parts, shape, w)


def check_registered(codec: Codec) -> None:
    """The registry finds a codec of this name, which says the same name and form."""
    found = registry.codec(codec.name)
    assert (found.name, found.form, found.row_sliced) == (codec.name, codec.form, codec.row_sliced), (found, codec)


def check_opaque(codec: Codec, shape: Shape) -> None:
    """A codec of bytes that are not decoded carries them, and says so when asked for more."""
    _check_names(codec)
    parts = any_parts(codec, shape)
    codes = codec.unpack(parts, shape)
    assert isinstance(codes, codec.form)
    _same_parts(codec.pack(codes), parts)
    refused(lambda: codec.quantize(np.zeros(shape, np.float32)), UnsupportedError)
    refused(lambda: codec.dequantize(parts, shape), UnsupportedError)
    check_capabilities(codec, parts, shape)


def any_parts(codec: Codec, shape: Shape, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Parts of the right sizes for a codec that only reads: whole numbers of any value, floats between 0.01 and 0.1."""
    rng = np.random.default_rng(seed)
    found: dict[str, NDArray[Any]] = {}
    for key, spec in codec.specs(shape).items():
        if spec.dtype.kind in "iu":
            raw = rng.integers(0, 256, spec.nbytes, np.uint8)
            found[key] = raw.view(spec.dtype).reshape(spec.shape)
        else:
            found[key] = rng.uniform(0.01, 0.1, spec.shape).astype(spec.dtype)
    return found


# ---------------------------------------------------------------- the promises


def _check_names(codec: Codec) -> None:
    assert isinstance(codec, Codec), f"{codec!r} lacks members of types.Codec"
    assert str(codec) == codec.name, f"str() of a codec is its name: {codec!s}, {codec.name}"
    assert codec.name == codec.name.lower() and codec.name.isprintable() and " " not in codec.name, codec.name
    assert codec.form in Form.__args__, codec.form
    assert len(codec.granule) == 2 and all(isinstance(n, int) and n >= 1 for n in codec.granule), codec.granule


def _packed(codec: Codec, w: NDArray[Any], finish: Finish) -> dict[str, NDArray[Any]]:
    return codec.pack(finish(codec.quantize(w)))


def _same_parts(found: Parts, expected: Parts) -> None:
    assert set(found) == set(expected), (set(found), set(expected))
    for key in expected:
        a, b = np.ascontiguousarray(found[key]), np.ascontiguousarray(expected[key])
        assert (a.shape, a.dtype) == (b.shape, b.dtype), (key, a.dtype, a.shape, b.dtype, b.shape)
        np.testing.assert_array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8), err_msg=key)


def _check_sizes(codec: Codec, parts: Parts, shape: Shape) -> None:
    said = {key: (spec.shape, spec.dtype) for key, spec in codec.specs(shape).items()}
    assert {key: (part.shape, part.dtype) for key, part in parts.items()} == said, f"specs of {codec} for {shape}"


def _check_round(codec: Codec, w: F32, error: float, finish: Finish) -> dict[str, NDArray[Any]]:
    """Sizes, form, codes and error; gives the parts, which nothing may write to."""
    codes = codec.quantize(w)
    assert isinstance(codes, codec.form), (type(codes), codec.form)
    parts = codec.pack(finish(codes))
    _check_sizes(codec, parts, w.shape)
    again = codec.unpack(parts, w.shape)
    assert isinstance(again, codec.form), (type(again), codec.form)
    _same_parts(codec.pack(again), parts)
    back = codec.dequantize(parts, w.shape)
    assert back.dtype == np.float32 and back.shape == w.shape, (back.dtype, back.shape)
    miss = float(np.square(back - w, dtype=np.float64).sum() / np.square(w, dtype=np.float64).sum())
    assert miss <= error, f"{codec}: error {miss:.3g}, promised {error:g}"
    return parts


def _check_arrays(codec: Codec, w: F32, finish: Finish) -> None:
    """The same numbers in any real array give the same parts."""
    expected = _packed(codec, w, finish)
    frozen = w.copy()
    frozen.flags.writeable = False
    half = w.astype(np.float16)
    forms: Mapping[str, NDArray[Any]] = {
        "float64": w.astype(np.float64),
        "the other byte order": w.astype(w.dtype.newbyteorder()),
        "strided": np.repeat(w, 2, axis=1)[:, ::2],
        "reversed": np.ascontiguousarray(w[::-1, ::-1])[::-1, ::-1],
        "Fortran's order": np.asfortranarray(w),
        "read-only": frozen,
    }
    shape = w.shape
    numbers = codec.dequantize(expected, shape)
    for form, array in forms.items():
        found = codec.dequantize(_packed(codec, array, finish), shape)
        np.testing.assert_array_equal(found, numbers, err_msg=f"{codec}: {form}")
    narrow, wide = (codec.dequantize(_packed(codec, a, finish), shape) for a in (half, half.astype(np.float32)))
    np.testing.assert_array_equal(narrow, wide, err_msg=f"{codec}: float16")


def _check_shapes(codec: Codec, w: F32, finish: Finish) -> None:
    """A stack, no rows, a vector: what `specs` takes has the same numbers."""
    rows, k = w.shape
    whole = codec.dequantize(_packed(codec, w, finish), w.shape)
    for array in (w.reshape(2, rows // 2, k), w[:0], w[0]):
        shape = array.shape
        try:
            codec.specs(shape)
        except CodecError as refusal:
            assert "\n" not in str(refusal)
            continue
        parts = _packed(codec, array, finish)
        if array.ndim == 2:
            _check_sizes(codec, parts, shape)
        back = codec.dequantize(parts, shape)
        assert back.shape == shape, (back.shape, shape)
        if array.ndim == 3:
            np.testing.assert_array_equal(back.reshape(whole.shape), whole)
    if codec.granule[1] > 1:
        refused(lambda: codec.specs((rows, k + 1)), CodecError)


def _check_importance(codec: Codec, w: F32, finish: Finish) -> None:
    k = w.shape[1]
    good = np.linspace(0, 2, k)  # zero is allowed: an input that was never active
    for importance in (good, good.astype(np.float32), list(good), good.astype(np.float16)):
        _check_sizes(codec, codec.pack(finish(codec.quantize(w, importance=importance))), w.shape)  # type: ignore[arg-type]
    refusals: tuple[tuple[Any, str], ...] = (
        (np.full(k, np.nan), "finite and non-negative"), (np.full(k, np.inf), "finite and non-negative"),
        (np.full(k, -1.0), "finite and non-negative"),
        (good[1:], "one entry per column"), (np.ones((2, k)), "one entry per column"), (1.0, "one entry per column"),
        ("x", "real numbers"),
    )  # fmt: skip
    for wrong, says in refusals:
        refused(partial(codec.quantize, w, importance=wrong), CodecError, says=says)


def _check_only_read(codec: Codec, parts: Parts, shape: Shape) -> None:
    refused(lambda: codec.quantize(np.zeros(shape, np.float32)), UnsupportedError, says="read-only")
    _check_sizes(codec, parts, shape)
    assert isinstance(codec.unpack(parts, shape), codec.form)


def _check_reading(codec: Codec, parts: Parts, shape: Shape) -> None:
    """Whole, by rows, into `out`; parts as maps of files are; refusals."""
    frozen = {key: np.array(part) for key, part in parts.items()}
    for part in frozen.values():
        part.flags.writeable = False
    whole = codec.dequantize(frozen, shape)
    assert whole.dtype == np.float32 and whole.shape == shape
    rows, k = as_matrix(shape)
    matrix, step = whole.reshape(rows, k), codec.granule[0]
    for chosen in _slices(rows, step) if codec.row_sliced else ():
        same_floats(codec.dequantize(frozen, shape, rows=chosen), matrix[chosen])
        cut = {key: part[chosen] for key, part in frozen.items()}
        same_floats(codec.dequantize(cut, (len(matrix[chosen]), k)), matrix[chosen])
    out = np.full(shape, 7, np.float32)
    assert codec.dequantize(frozen, shape, out=out) is out
    same_floats(out, whole)
    closed = np.empty(shape, np.float32)
    closed.flags.writeable = False
    unfit: tuple[Any, ...] = (np.empty(3, np.float32), np.empty(shape), np.empty(shape, np.float32, order="F"), closed)
    for wrong in unfit:
        refused(partial(codec.dequantize, frozen, shape, out=wrong), CodecError, says="out must be")
    _check_refusals(codec, frozen, shape)


def _slices(rows: int, step: int) -> Iterator[slice]:
    """First, last, none."""
    yield from (slice(0, step), slice(rows - step, rows), slice(step, step))


def _check_refusals(codec: Codec, parts: Parts, shape: Shape) -> None:
    for key, part in parts.items():
        missing = {other: a for other, a in parts.items() if other != key}
        short = {**missing, key: part.reshape(-1)[:-1]}
        floats = {**missing, key: part.astype(np.float64)}
        for wrong in (missing, short, floats):
            refused(partial(codec.dequantize, wrong, shape), CodecError)
    refused(lambda: codec.unpack({}, shape), CodecError)
    refused(lambda: codec.dequantize(parts, (2 * shape[0], *shape[1:])), CodecError)
    refused(lambda: registry.codec(codec, nonsense=1), TypeError, CodecError, says="nonsense")
    if isinstance(codec, Configurable):
        refused(lambda: codec.configure(nonsense=1), TypeError, CodecError)


# ---------------------------------------------------------------- golden vectors and twins


def same_floats(actual: NDArray[Any], expected: NDArray[Any]) -> None:
    """Bit for bit; NaN compared by position only; the sign of zero counts."""
    actual, expected = np.asarray(actual, np.float32).ravel(), np.asarray(expected, np.float32).ravel()
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    np.testing.assert_array_equal(actual.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def check_dequantize(name: str | Codec, packed: NDArray[np.uint8], expected: F32) -> None:
    """Golden bytes, part `blocks`, to golden floats; by row slices too; into a given array too."""
    codec = registry.codec(name)
    parts, shape = {"blocks": packed}, expected.shape
    same_floats(codec.dequantize(parts, shape), expected)
    same_floats(codec.dequantize(parts, shape, rows=slice(1, 3)), expected[1:3])
    out = np.empty(shape, np.float32)
    assert codec.dequantize(parts, shape, out=out) is out
    same_floats(out, expected)


def check_quantize_bytes(
    name: str | Codec, source: F32, packed: NDArray[np.uint8], importance: F32 | None = None
) -> None:
    """Golden floats to golden bytes, part `blocks`."""
    codec = registry.codec(name)
    parts = codec.pack(codec.quantize(source, importance=importance))
    np.testing.assert_array_equal(parts["blocks"], packed)


def check_sizes(name: str | Codec, shape: Shape = (6, 512)) -> None:
    """specs() says exactly what pack() gives, and unpack() takes it back."""
    codec = registry.codec(name)
    parts = codec.pack(codec.quantize(np.random.default_rng(0).standard_normal(shape).astype(np.float32)))
    _check_sizes(codec, parts, shape)
    _same_parts(codec.pack(codec.unpack(parts, shape)), parts)


def weighted_error(name: str | Codec, parts: Parts, source: F32, importance: F32) -> float:
    """Sum of importance * squared error."""
    miss = registry.codec(name).dequantize(parts, source.shape).astype(np.float64) - source
    return float((importance * miss**2).sum())


def awkward_floats(seed: int, shape: tuple[int, int]) -> F32:
    """Finite floats of every size: gaussian rows, random bit patterns, subnormals, signed zeros, ties, constant rows."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal(shape).astype(np.float32) * np.float32(10.0) ** rng.integers(-44, 38, (shape[0], 1))
    bits = rng.integers(0, 2**32, shape, np.uint32).view(np.float32)
    ties = rng.integers(-17, 18, shape).astype(np.float32) / 2
    zeros = rng.choice(np.array([0.0, -0.0, 1.0], np.float32), shape)
    constant = np.broadcast_to(rng.standard_normal((shape[0], 1)).astype(np.float32), shape)
    kinds: Any = [w.astype(np.float32), bits, ties, zeros, -np.abs(ties), constant, w.astype(np.float32)]
    out = np.choose(rng.integers(0, len(kinds), (shape[0], 1)), kinds).astype(np.float32)
    return np.where(np.isfinite(out), out, np.float32(0))


def check_same_engines(name: str | Codec, searched: bool = False, shape: tuple[int, int] = (48, 768)) -> None:
    """Native and numpy give the same bytes, part `blocks`, from finite floats, and neither fails or warns on infinity and NaN. searched: with importance."""
    codec = registry.codec(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(4):
            w = awkward_floats(seed, shape)
            weight = np.random.default_rng(seed).random(shape[1], np.float32) + np.float32(0.01) if searched else None
            packed = []
            for numpy_too in (False, True):
                with native.engine("numpy" if numpy_too else "native"):
                    packed.append(codec.pack(codec.quantize(w, importance=weight))["blocks"])
            np.testing.assert_array_equal(packed[0], packed[1])
            w[seed::5, ::7], w[2::9, seed::11] = np.nan, -np.inf
            for numpy_too in (False, True):
                with native.engine("numpy" if numpy_too else "native"):
                    assert codec.pack(codec.quantize(w, importance=weight))["blocks"].shape == packed[0].shape
