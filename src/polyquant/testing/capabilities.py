"""Checks of the capabilities that a codec declares (polyquant.capabilities), against its dequantized values."""

from __future__ import annotations

import numpy as np

from polyquant.capabilities import (
    CountsSymbols,
    DecodesRows,
    FitsInputs,
    Fitted,
    Grouped,
    HoldsAffineCodes,
    HoldsBias,
    HoldsBlocks,
    MaybeIntegers,
    MayOnlyRead,
    Opaque,
    Ordered,
    OwnProduct,
    Packed,
    QuantizesStored,
    Stackable,
    Swappable,
    Tiled,
    TrellisDialect,
    WithBits,
)
from polyquant.errors import CodecError, UnsupportedError
from polyquant.ops import native
from polyquant.ops.matmul import Group, round_activations
from polyquant.ops.metrics import error_sums
from polyquant.rows import experts, in_memory
from polyquant.testing.refusals import refused
from polyquant.types import (
    F32,
    Affine,
    Blocks,
    Codec,
    Floats,
    Parts,
    Rounding,
    Shape,
    Ternary,
    Weight,
    as_matrix,
)

__all__ = ["check_capabilities"]

_TOKENS = 3
_BOUND = 2e-4
"""Error bound of a float32 product, relative to its largest value."""


def check_capabilities(codec: Codec, parts: Parts, shape: Shape, w: F32 | None = None) -> None:
    """Check every declared capability on a weight, `parts` of `shape`. Raises AssertionError.

    w: the float weight, for codecs with a search.

    packed, product  equal x W^T within float32 rounding, and each other for every rounding of inputs
    bias             not included when inputs are floats
    tile, fit        a given tile is kept; a tile that decodes fits
    fields           do not overlap and stay inside the block
    integers         unpacked values have an integer dtype
    opaque           gives a reason
    symbols          as many as weights
    rows             equal those of the whole weight
    blocks           belong to the named codec, and round-trip
    bits, groups, offsets   match the unpacked codes
    stacks           a matrix cut out of a stack decodes as it does inside; implied by row_sliced
    trellis          the named codec decodes to the same values
    writable         if False, `quantize` raises UnsupportedError
    inputs           codes for a Hessian have the codec's form and sizes
    stored           rows stored as float32 become the parts that `quantize` makes of them; rows with NaN are left to it
    """
    if isinstance(codec, Opaque):
        assert codec.why and (codec.finding is None or codec.finding)
        return
    if len(shape) == 2 and min(shape):
        _check_products(codec, parts, shape)
    if isinstance(codec, HoldsBias):
        for tokens in (1, 1000):
            assert isinstance(codec.holds_bias(tokens, "block"), bool)
            assert codec.holds_bias(tokens, "none") is False, "the bias must not be included when inputs are floats"
    if isinstance(codec, Tiled):
        assert codec.tile is None or codec.with_tile(codec.tile).name == codec.name
        tiled = codec.with_tile((256, 128, 32))
        assert isinstance(tiled, Tiled) and tiled.tile == (256, 128, 32)
        refused(lambda: codec.with_tile((0, 0, 0)), CodecError)
    if isinstance(codec, Fitted):
        codec.fit(shape)
    if isinstance(codec, Swappable):
        _check_fields(codec, codec)
    if isinstance(codec, CountsSymbols):
        counts = codec.symbol_histogram(parts, shape)
        rows, k = as_matrix(shape)
        assert counts.dtype == np.uint64 and counts.shape == (4,) and int(counts.sum()) == rows * k, counts
        assert codec.zero_symbol in (0, 1, 2)
    if isinstance(codec, MaybeIntegers):
        assert codec.form is Floats and codec.unpack(parts, shape).values.dtype.kind in (
            "iub" if codec.is_integer else "fV"
        )
    if isinstance(codec, DecodesRows) and codec.decodes_rows:
        whole = codec.dequantize(parts, shape)
        np.testing.assert_array_equal(codec.dequantize(parts, shape, rows=slice(1, 3)), whole[1:3])
    _check_stack(codec, parts, shape)
    _check_codes(codec, parts, shape)
    if w is not None:
        _check_searches(codec, w)


def _check_searches(codec: Codec, w: F32) -> None:
    if isinstance(codec, FitsInputs):
        _check_inputs(codec, w)
    if isinstance(codec, QuantizesStored):
        _check_stored(codec, w)


def _check_stored(codec: QuantizesStored, w: F32) -> None:
    assert isinstance(codec, Codec)
    rows, k = as_matrix(w.shape)
    flat = np.ascontiguousarray(w, np.float32).reshape(rows, k)
    done = codec.quantize_stored("f32", flat.view(np.uint8), (rows, k))
    if done is not None:
        parts, sums = done
        expected = codec.pack(codec.quantize(flat))
        assert parts.keys() == expected.keys(), (list(parts), list(expected))
        unmeasured = codec.quantize_stored("f32", flat.view(np.uint8), (rows, k), measure=False)
        assert unmeasured is not None
        for name, part in parts.items():
            np.testing.assert_array_equal(part, expected[name])
            np.testing.assert_array_equal(unmeasured[0][name], expected[name])
        error = error_sums(flat, codec.dequantize(parts, (rows, k)))
        np.testing.assert_allclose(sums, (error.aa, error.bb, error.ab, error.dd, error.worst), rtol=1e-6, atol=1e-30)
    if flat.size:
        broken = flat.copy()
        broken[-1, -1] = np.nan
        for measure in (True, False):
            taken = codec.quantize_stored("f32", broken.view(np.uint8), (rows, k), measure=measure)
            assert taken is None, "took a NaN"


def _check_products(codec: Codec, parts: Parts, shape: Shape) -> None:
    weight = codec.dequantize(parts, shape)
    if not np.isfinite(weight).all():  # random bytes of a read-only type
        return
    x = np.random.default_rng(3).standard_normal((_TOKENS, shape[1])).astype(np.float32)
    handle = codec.packed(parts, shape) if isinstance(codec, Packed) and native.lib() is not None else None
    group = None if handle is None else Group([handle], [shape[0]])
    expected = x @ weight.T
    if isinstance(codec, OwnProduct):
        _near(codec.multiply(parts, shape, x, "none"), expected)
    if group is not None:
        _near(group(x, "none")[0], expected)
        rounding: Rounding = "wide" if codec.form is Ternary else "block"  # as in runtime.linear
        rounded = x if codec.form is Floats else round_activations(x, rounding)
        own = codec.multiply(parts, shape, x, rounding) if isinstance(codec, OwnProduct) else rounded @ weight.T
        _near(group(x, rounding)[0], own)


def _near(actual: F32, expected: F32) -> None:
    assert actual.dtype == np.float32 and actual.shape == expected.shape, (actual.dtype, actual.shape, expected.shape)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=_BOUND * float(np.abs(expected).max(initial=0)))


def _check_stack(codec: Codec, parts: Parts, shape: Shape) -> None:
    """Check the same parts as a stack of two matrices.

    Codecs may reject stacks. A row_sliced or `Stackable` codec must return each matrix bit-exactly; only a `Stackable`
    one may report that matrices share bytes.
    """
    rows, k = as_matrix(shape)
    stack = (2, rows // 2, k)
    if rows % 2 or not (codec.row_sliced or isinstance(codec, Stackable)):
        return
    try:
        codec.specs(stack)
        weight = Weight("stack", stack, codec, in_memory(parts))
        taken = experts(weight)
    except (CodecError, UnsupportedError) as refusal:
        assert "\n" not in str(refusal)
        assert isinstance(refusal, CodecError) or not codec.row_sliced, refusal
        return
    whole = codec.dequantize(parts, stack)
    for one, expected in zip(taken, whole, strict=True):
        assert one.shape == stack[1:]
        specs = {key: (spec.shape, spec.dtype) for key, spec in one.codec.specs(one.shape).items()}
        assert {key: (a.spec.shape, a.spec.dtype) for key, a in one.arrays.items()} == specs, (codec.name, specs)
        for found in (one.parts, one.read()):
            same = one.codec.dequantize(found, one.shape)
            np.testing.assert_array_equal(
                same.view(np.uint32), expected.view(np.uint32), err_msg=f"{codec}: {one.name}"
            )


def _check_fields(codec: Codec, said: Swappable) -> None:
    size = codec.specs(codec.granule)["blocks"].nbytes
    at = 0
    for offset, width, count in sorted(said.fields):
        assert offset >= at and width in (2, 4, 8) and count >= 1, said.fields
        at = offset + width * count
    assert at <= size, f"fields of {codec} end at byte {at} of {size}"


def _check_codes(codec: Codec, parts: Parts, shape: Shape) -> None:
    codes = codec.unpack(parts, shape)
    if isinstance(codec, MayOnlyRead) and not codec.writable:
        refused(lambda: codec.quantize(np.zeros(shape, np.float32)), UnsupportedError)
    if isinstance(codec, HoldsBlocks):
        assert isinstance(codes, Blocks) and codes.codec == codec.holds
        for part, array in codec.pack(codes).items():
            np.testing.assert_array_equal(array, np.asarray(parts[part]).reshape(array.shape))
    if isinstance(codec, WithBits):
        assert isinstance(codec.bits, int) and 1 <= codec.bits <= 8, codec.bits
    if isinstance(codes, Affine):
        factors = isinstance(codec, HoldsAffineCodes) and codec.integers.factors
        apart = factors or (isinstance(codec, Ordered) and codec.ordered)  # one scale per column
        if isinstance(codec, Grouped) and not apart:
            groups = shape[1] // codec.group if codec.group else 1
            assert codes.scale.shape[1] == groups, (codes.scale.shape, codec.group)
        if isinstance(codec, WithBits):
            assert codes.bits >= codec.bits, (codes.bits, codec.bits)
    if isinstance(codec, TrellisDialect):
        own = codec.trellis(shape)
        assert isinstance(own, TrellisDialect) and own.trellis(shape) is own
        same = own.dequantize(own.pack(codes), shape)
        np.testing.assert_array_equal(same, codec.dequantize(parts, shape))


def _check_inputs(codec: FitsInputs, w: F32) -> None:
    """Check quantization for a Hessian on 256 columns, if the codec accepts them."""
    step = codec.granule[1]
    small = np.ascontiguousarray(w[:, : -(-256 // step) * step])
    x = np.random.default_rng(4).standard_normal((4 * small.shape[1], small.shape[1])).astype(np.float32)
    codes = codec.quantize_for(small, x.T @ x / np.float32(len(x)))
    assert isinstance(codes, codec.form)
    specs = codec.specs(small.shape)
    assert {key: part.shape for key, part in codec.pack(codes).items()} == {key: s.shape for key, s in specs.items()}
