"""Contract checks of codecs. The test of a codec is one call, plus golden vectors:

    def test_contract():
        check_codec(MY_CODEC, np.random.default_rng(0).standard_normal((16, 256)), error=0.01)

    def test_golden_bytes():
        check_dequantize("my_codec", golden_bytes, golden_floats)

`check_codec` checks the following, and raises AssertionError:

    names      str() is the name; the name, `form` and `granule` have the right types
    sizes      `specs` matches shape and dtype of the parts from `pack`, for every shape it accepts
    codes      `quantize` and `unpack` return the codec's form; unpacked codes pack to the same parts
    floats     the result is float32 of the shape, near the weight (`error`), and independent of the input's dtype, byte
               order and strides
    shapes     matrices, vectors, stacks, zero rows: the same values, or `specs` raises CodecError; an extra column is
               rejected
    rows       rows [a, b) of every part of a `row_sliced` codec are rows [a, b) of the weight
    out        is filled and returned; arrays that do not fit are rejected
    refusals   non-weights, missing or short parts, wrong dtypes, wrong shapes, unknown options: one-line errors
    finite     NaN and infinity are rejected by every codec but those of unquantized values
    importance is validated, if the codec accepts it (`weighted`)
    claims     every declared capability (polyquant.testing.capabilities)

For read-only codecs pass `parts` and `shape` instead of a weight; `any_parts` generates them. Unregistered codecs and
those with other options than the registry's can be checked too; `check_registered` checks the registry entry.
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
from polyquant.types import F32, Codec, Floats, Form, Parts, Shape, as_matrix

__all__ = [
    "any_parts", "awkward_floats", "check_codec", "check_dequantize", "check_opaque", "check_quantize_bytes",
    "check_registered", "check_same_engines",
    "check_sizes", "same_floats", "weighted_error",
]  # fmt: skip

Finish = Callable[[Any], Any]
"""Codes of `quantize` -> codes that `pack` accepts."""


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
    """Run all checks above, with the current engine (ops.native.engine).

    w: float32 [rows, K] that the codec can represent; rows a multiple of 2 and of the granule. error: largest relative
    squared error; 0: exact. weighted: the codec accepts importance. finish: completes codes for `pack` if it needs more
    than the weight, e.g. the input quantization. parts, shape: instead of w, for a read-only codec.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _check_names(codec)
        if w is None:
            assert parts is not None and shape is not None, "pass a weight, or parts and their shape"
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
            _check_finite(codec, floats)
            if weighted:
                _check_importance(codec, floats, whole)
        _check_reading(codec, parts, shape)
        check_capabilities(codec, parts, shape, w)


def check_registered(codec: Codec) -> None:
    """Check that the registry has a codec of this name with the same form."""
    registered = registry.codec(codec.name)
    assert (registered.name, registered.form, registered.row_sliced) == (codec.name, codec.form, codec.row_sliced), (
        registered,
        codec,
    )


def check_opaque(codec: Codec, shape: Shape) -> None:
    """Check that an opaque codec copies its bytes, and raises an error for anything else."""
    _check_names(codec)
    parts = any_parts(codec, shape)
    codes = codec.unpack(parts, shape)
    assert isinstance(codes, codec.form)
    _same_parts(codec.pack(codes), parts)
    refused(lambda: codec.quantize(np.zeros(shape, np.float32)), UnsupportedError)
    refused(lambda: codec.dequantize(parts, shape), UnsupportedError)
    check_capabilities(codec, parts, shape)


def any_parts(codec: Codec, shape: Shape, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Return random parts for a read-only codec: integers of any value, floats between 0.01 and 0.1."""
    rng = np.random.default_rng(seed)
    parts: dict[str, NDArray[Any]] = {}
    for key, spec in codec.specs(shape).items():
        if spec.dtype.kind in "iu":
            raw = rng.integers(0, 256, spec.nbytes, np.uint8)
            parts[key] = raw.view(spec.dtype).reshape(spec.shape)
        else:
            parts[key] = rng.uniform(0.01, 0.1, spec.shape).astype(spec.dtype)
    return parts


# ---------------------------------------------------------------- the promises


def _check_names(codec: Codec) -> None:
    assert isinstance(codec, Codec), f"{codec!r} lacks members of types.Codec"
    assert str(codec) == codec.name, f"str() of a codec is its name: {codec!s}, {codec.name}"
    assert codec.name == codec.name.lower() and codec.name.isprintable() and " " not in codec.name, codec.name
    assert codec.form in Form.__args__, codec.form
    assert len(codec.granule) == 2 and all(isinstance(n, int) and n >= 1 for n in codec.granule), codec.granule


def _packed(codec: Codec, w: NDArray[Any], finish: Finish) -> dict[str, NDArray[Any]]:
    return codec.pack(finish(codec.quantize(w)))


def _same_parts(actual: Parts, expected: Parts) -> None:
    assert set(actual) == set(expected), (set(actual), set(expected))
    for key in expected:
        a, b = np.ascontiguousarray(actual[key]), np.ascontiguousarray(expected[key])
        assert (a.shape, a.dtype) == (b.shape, b.dtype), (key, a.dtype, a.shape, b.dtype, b.shape)
        np.testing.assert_array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8), err_msg=key)


def _check_sizes(codec: Codec, parts: Parts, shape: Shape) -> None:
    specs = {key: (spec.shape, spec.dtype) for key, spec in codec.specs(shape).items()}
    assert {key: (part.shape, part.dtype) for key, part in parts.items()} == specs, f"specs of {codec} for {shape}"


def _check_round(codec: Codec, w: F32, error: float, finish: Finish) -> dict[str, NDArray[Any]]:
    """Check sizes, form, codes and error; return the parts, read-only."""
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
    assert miss <= error, f"{codec}: error {miss:.3g}, expected at most {error:g}"
    return parts


def _check_arrays(codec: Codec, w: F32, finish: Finish) -> None:
    """Check that the same values in any real array give the same parts."""
    expected = _packed(codec, w, finish)
    frozen = w.copy()
    frozen.flags.writeable = False
    half = w.astype(np.float16)
    forms: Mapping[str, NDArray[Any]] = {
        "float64": w.astype(np.float64),
        "non-native byte order": w.astype(w.dtype.newbyteorder()),
        "strided": np.repeat(w, 2, axis=1)[:, ::2],
        "reversed": np.ascontiguousarray(w[::-1, ::-1])[::-1, ::-1],
        "Fortran order": np.asfortranarray(w),
        "read-only": frozen,
    }
    shape = w.shape
    numbers = codec.dequantize(expected, shape)
    for form, array in forms.items():
        decoded = codec.dequantize(_packed(codec, array, finish), shape)
        np.testing.assert_array_equal(decoded, numbers, err_msg=f"{codec}: {form}")
    narrow, wide = (codec.dequantize(_packed(codec, a, finish), shape) for a in (half, half.astype(np.float32)))
    np.testing.assert_array_equal(narrow, wide, err_msg=f"{codec}: float16")


def _check_shapes(codec: Codec, w: F32, finish: Finish) -> None:
    """Check stacks, zero rows and vectors: shapes that `specs` accepts have the same values."""
    rows, k = w.shape
    decoded = codec.dequantize(_packed(codec, w, finish), w.shape)
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
            np.testing.assert_array_equal(back.reshape(decoded.shape), decoded)
    if codec.granule[1] > 1:
        refused(lambda: codec.specs((rows, k + 1)), CodecError)


def _check_finite(codec: Codec, w: F32) -> None:
    if codec.form is Floats:
        return
    for wrong in (np.nan, np.inf, -np.inf):
        broken = w.copy()
        broken[-1, -1] = wrong
        refused(partial(codec.quantize, broken), CodecError, says="NaN or infinity")


def _check_importance(codec: Codec, w: F32, finish: Finish) -> None:
    k = w.shape[1]
    good = np.linspace(0, 2, k)  # zero is allowed, for inputs that were never active
    for importance in (good, good.astype(np.float32), list(good), good.astype(np.float16)):
        codes = codec.quantize(w, importance=importance)  # type: ignore[arg-type]
        _check_sizes(codec, codec.pack(finish(codes)), w.shape)
    refusals: tuple[tuple[Any, str], ...] = (
        (np.full(k, np.nan), "finite and non-negative"), (np.full(k, np.inf), "finite and non-negative"),
        (np.full(k, -1.0), "finite and non-negative"),
        (good[1:], "one entry per column"), (np.ones((2, k)), "one entry per column"), (1.0, "one entry per column"),
        ("x", "real numbers"),
    )  # fmt: skip
    for wrong, says in refusals:
        refused(partial(codec.quantize, w, importance=wrong), CodecError, says=says)


def _check_only_read(codec: Codec, parts: Parts, shape: Shape) -> None:
    if not getattr(codec, "writable", False):  # others are checked on parts because these may be any bits
        refused(lambda: codec.quantize(np.zeros(shape, np.float32)), UnsupportedError, says="read-only")
    _check_sizes(codec, parts, shape)
    assert isinstance(codec.unpack(parts, shape), codec.form)


def _check_reading(codec: Codec, parts: Parts, shape: Shape) -> None:
    """Check decoding as a whole, by rows and into `out`, from read-only parts; and errors."""
    frozen = {key: np.array(part) for key, part in parts.items()}
    for part in frozen.values():
        part.flags.writeable = False
    decoded = codec.dequantize(frozen, shape)
    assert decoded.dtype == np.float32 and decoded.shape == shape
    rows, k = as_matrix(shape)
    matrix, step = decoded.reshape(rows, k), codec.granule[0]
    for chosen in _slices(rows, step) if codec.row_sliced else ():
        same_floats(codec.dequantize(frozen, shape, rows=chosen), matrix[chosen])
        cut = {key: part[chosen] for key, part in frozen.items()}
        same_floats(codec.dequantize(cut, (len(matrix[chosen]), k)), matrix[chosen])
    out = np.full(shape, 7, np.float32)
    assert codec.dequantize(frozen, shape, out=out) is out
    same_floats(out, decoded)
    closed = np.empty(shape, np.float32)
    closed.flags.writeable = False
    unfit: tuple[Any, ...] = (np.empty(3, np.float32), np.empty(shape), np.empty(shape, np.float32, order="F"), closed)
    for wrong in unfit:
        refused(partial(codec.dequantize, frozen, shape, out=wrong), CodecError, says="out must be")
    _check_refusals(codec, frozen, shape)


def _slices(rows: int, step: int) -> Iterator[slice]:
    """Yield slices: first, last, empty."""
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
    """Assert bit-equal floats; NaN matches any NaN, and the sign of zero counts."""
    actual, expected = np.asarray(actual, np.float32).ravel(), np.asarray(expected, np.float32).ravel()
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    np.testing.assert_array_equal(actual.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def check_dequantize(name: str | Codec, packed: NDArray[np.uint8], expected: F32) -> None:
    """Check golden bytes (part `blocks`) against golden floats, also by row slices and into a given array."""
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
    """Check golden floats against golden bytes (part `blocks`)."""
    codec = registry.codec(name)
    parts = codec.pack(codec.quantize(source, importance=importance))
    np.testing.assert_array_equal(parts["blocks"], packed)


def check_sizes(name: str | Codec, shape: Shape = (6, 512)) -> None:
    """Check that specs() matches the result of pack(), and that unpack() reverses it."""
    codec = registry.codec(name)
    parts = codec.pack(codec.quantize(np.random.default_rng(0).standard_normal(shape).astype(np.float32)))
    _check_sizes(codec, parts, shape)
    _same_parts(codec.pack(codec.unpack(parts, shape)), parts)


def weighted_error(name: str | Codec, parts: Parts, source: F32, importance: F32) -> float:
    """Return the sum of importance * squared error."""
    miss = registry.codec(name).dequantize(parts, source.shape).astype(np.float64) - source
    return float((importance * miss**2).sum())


def awkward_floats(seed: int, shape: tuple[int, int]) -> F32:
    """Return finite floats of all magnitudes: Gaussian rows, random bits, subnormals, zeros, ties, constant rows."""
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
    """Check that native and numpy encode to the same bytes (part `blocks`), and reject NaN and infinity.

    searched: with importance.
    """
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
            if codec.form is Floats:
                for numpy_too in (False, True):
                    with native.engine("numpy" if numpy_too else "native"):
                        assert codec.pack(codec.quantize(w, importance=weight))["blocks"].shape == packed[0].shape
            else:
                refused(partial(codec.quantize, w, importance=weight), CodecError, says="NaN or infinity")
