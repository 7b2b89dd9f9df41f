"""msModelSlim's codecs on every linear layer of every golden folder: bytes both ways, and the layer's output."""

import numpy as np
import pytest

import polyquant
from msmodelslim_vectors import FOLDERS, LAYERS, ROOT, forward, relative, source_of
from polyquant.codecs.msmodelslim import TYPES, MsModelSlim
from polyquant.errors import CodecError, UnknownNameError
from polyquant.ops import int8
from polyquant.ops.matmul import Group
from polyquant.testing.codecs import same_floats
from polyquant.types import Affine

RUN = [f for f in FOLDERS if any(f"{name}.x" in forward(f) for name in LAYERS)]


def linears(folder):
    return [w for w in polyquant.open(ROOT / folder).values() if isinstance(w.codec, MsModelSlim)]


def bias_of(folder, name):
    found = polyquant.open(ROOT / folder).weights.get(f"{name}.bias")
    return 0 if found is None else found.dequantize()


@pytest.mark.parametrize("folder", FOLDERS)
def test_unpacked_codes_pack_to_the_same_bytes(folder):
    found = linears(folder)
    assert len(found) >= 13
    for w in found:
        assert polyquant.codec(w.codec.name) == w.codec
        again = w.codec.pack(w.codec.unpack(w.parts, w.shape))
        assert {k: (v.shape, v.dtype) for k, v in again.items()} == {
            k: (s.shape, s.dtype) for k, s in w.codec.specs(w.shape).items()
        }
        if not w.codec.second:  # two scales per group become one
            for part, stored in w.read().items():
                np.testing.assert_array_equal(
                    again[part].view(np.uint8), stored.view(np.uint8), err_msg=f"{w.name} {part}"
                )
        same_floats(w.codec.dequantize(again, w.shape), w.dequantize())


@pytest.mark.parametrize(
    "folder", [f for f in FOLDERS if not any(m in f for m in ("_m1", "_m2", "_m3", "_m4", "smooth"))]
)
def test_weights_are_near_their_source(folder):
    source = polyquant.open(source_of(folder))
    for w in linears(folder):
        bound = 0.2 if w.codec.bits == 4 else 0.13 if w.codec.kind == "w8a8s" else 0.05 if w.codec.tensor else 0.013
        assert relative(w.dequantize(), source[w.name].dequantize()) < bound, w


def test_row_ranges_equal_the_whole(engine):
    for name in ("w8a16.g32.asym", "w8a8.dynamic", "w4a16.pack_k", "w4a16.g32.pack_n", "w8a16.tensor"):
        codec = polyquant.codec(name)
        w = np.random.default_rng(1).standard_normal((12, 96)).astype(np.float32)
        parts = codec.pack(codec.quantize(w))
        whole = codec.dequantize(parts, w.shape)
        same_floats(codec.dequantize(parts, w.shape, rows=slice(3, 7)), whole[3:7])
        out = np.empty(w.shape, np.float32)
        assert codec.dequantize(parts, w.shape, out=out) is out
        same_floats(out, whole)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_scale_covers_the_range(engine, bits, symmetric):
    rng = np.random.default_rng(2)
    w = rng.standard_t(4, (40, 96)).astype(np.float32)
    w[0], w[1], w[2] = 0, np.abs(w[1]), -np.abs(w[2])
    name = f"w{bits}a16.g32" + ("" if symmetric else ".asym")
    found = polyquant.codec(name).quantize(w)
    low = -(2 ** (bits - 1)) + symmetric
    assert found.codes.min() >= low and found.codes.max() <= 2 ** (bits - 1) - 1
    assert (found.offset == np.rint(found.offset)).all() and (not symmetric or not found.offset.any())
    error = np.abs(polyquant.codec(name).dequantize(polyquant.codec(name).pack(found), w.shape) - w).reshape(40, 3, 32)
    assert (error <= found.scale[:, :, None] * (0.5001 if symmetric else 1.0001)).all()
    assert not found.codes[0].astype(np.float32).any() or not symmetric
    np.testing.assert_array_equal(polyquant.codec(name).dequantize(polyquant.codec(name).pack(found), w.shape)[0], 0)


def test_both_engines_give_the_same_codes():
    from polyquant.ops import native

    if native.lib() is None:
        pytest.skip("native kernels are not built or switched off")
    w = np.random.default_rng(3).standard_t(3, (33, 320)).astype(np.float32)
    w[5, 7] = 1e4
    for name in ("w8a16", "w8a16.asym", "w8a16.g32.asym", "w4a16.g32", "w8a16.tensor.f16", "w8a16.bf16"):
        codec = polyquant.codec(name)
        with native.engine("numpy"):
            expected = codec.pack(codec.quantize(w))
            floats = codec.dequantize(expected, w.shape)
        parts = codec.pack(codec.quantize(w))
        for part in expected:
            np.testing.assert_array_equal(
                parts[part].view(np.uint8), expected[part].view(np.uint8), err_msg=f"{name} {part}"
            )
        same_floats(codec.dequantize(parts, w.shape), floats)


# ---------------------------------------------------------------- what a layer computes


@pytest.mark.parametrize("folder", RUN)
@pytest.mark.parametrize("name", LAYERS)
def test_layer_outputs_equal_the_tool(engine, folder, name):
    """Static types from the tool's integer inputs; dynamic types within the input rounding error.

    The tool's preview rounds dynamic inputs to 255 asymmetric levels.
    """
    seen, w = forward(folder), polyquant.open(ROOT / folder)[f"{name}.weight"]
    if f"{name}.x" not in seen or not isinstance(w.codec, MsModelSlim):
        pytest.skip("not recorded for this layer")
    y, codes = seen[f"{name}.y"][0], w.codec.unpack(w.parts, w.shape)
    if w.codec.static:
        grid = codes.activation
        total = seen[f"{name}.x_int"][0].astype(np.int64) @ codes.codes.astype(np.int64).T + grid.quant_bias
        assert relative(total * grid.deq_scale, y) <= (3.2e-3 if "fp16" in folder else 6.5e-3)
        own = int8.round_fixed(seen[f"{name}.x"][0], grid.scale, grid.offset)
        assert np.abs(own - seen[f"{name}.x_int"][0]).max() <= 1  # the tool divides in half precision
        return
    got = w.codec.multiply(w.parts, w.shape, seen[f"{name}.x"][0], "block") + bias_of(folder, name)
    assert relative(got, y) < (0.025 if "w8a8_dynamic" in folder else 0.0035)


@pytest.mark.parametrize("folder", RUN)
def test_kernels_agree_with_the_reference(folder):
    from polyquant.ops import native

    if native.lib() is None:
        pytest.skip("native kernels are not built or switched off")
    w = polyquant.open(ROOT / folder)[f"{LAYERS[0]}.weight"]
    x = forward(folder)[f"{LAYERS[0]}.x"][0]
    group = Group([w.codec.packed(w.parts, w.shape)], [w.shape[0]])
    for rounding in ("block", "none"):
        for tokens in (1, 2, 3, 4, 5, 16):
            (got,) = group(np.ascontiguousarray(x[:tokens]), rounding)
            expected = w.codec.multiply(w.parts, w.shape, x[:tokens], rounding)
            if rounding == "block" and w.codec.inputs != "floats" and codes_per_row(w) == 1:
                np.testing.assert_array_equal(got, expected)  # integers: bit-exact
            else:
                np.testing.assert_allclose(got, expected, atol=2e-6 * np.abs(expected).max())


def codes_per_row(w):
    return w.codec.unpack(w.parts, w.shape).scale.shape[1]


@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (5, 33), (13, 95), (50, 1024), (7, 1100), (49, 2080)])
@pytest.mark.parametrize("inputs", ["token", "fixed", "mixed", "floats"])
@pytest.mark.parametrize("offsets", [False, True])
def test_odd_shapes(shape, inputs, offsets, kernels):
    """Kernels against the reference at every remainder: rows, columns, tokens; extreme codes cannot overflow."""
    from polyquant.ops import native
    from polyquant.types import Activation

    if native.lib() is None:
        pytest.skip("native kernels are not built or switched off")
    rng = np.random.default_rng(shape[1])
    n, k = shape
    codes = rng.integers(-128, 128, shape).astype(np.int8)
    codes[0] = -128
    scale = rng.uniform(1e-3, 1e-2, (n, 1)).astype(np.float32)
    offset = rng.integers(-20, 20, (n, 1)).astype(np.float32) * offsets
    grid = Activation(
        np.array([0.02], np.float32),
        np.array([-7], np.float32),
        scale[:, 0] * np.float32(0.02),
        rng.integers(-9999, 9999, n).astype(np.int32),
    )
    weight = Affine(8, codes, scale, offset, grid)
    group = Group([int8.handle(weight, inputs)], [n])
    for tokens in (1, 2, 3, 4, 5, 8, 67):
        x = rng.standard_normal((tokens, k)).astype(np.float32)
        x[0] = -9
        x[-1] = 0
        (got,) = group(x, "token")
        expected = int8.multiply(x, weight, inputs)
        if inputs == "floats":
            np.testing.assert_allclose(got, expected, atol=3e-6 * max(1, np.abs(expected).max()), rtol=1e-5)
        else:
            np.testing.assert_array_equal(got, expected)


def test_layers_with_separate_scales_share_an_input():
    """q, k, v of one input: two on one grid, one on another, one in floats."""
    from polyquant.ops import native
    from polyquant.types import Activation

    if native.lib() is None:
        pytest.skip("native kernels are not built or switched off")
    rng = np.random.default_rng(8)
    x = rng.standard_normal((6, 64)).astype(np.float32)
    weights, kinds = [], ["fixed", "fixed", "fixed", "token", "floats"]
    for step in (0.02, 0.02, 0.05, 0.02, 0.02):
        codes, scale = rng.integers(-127, 128, (9, 64)).astype(np.int8), np.full((9, 1), 0.01, np.float32)
        grid = Activation(
            np.array([step], np.float32), np.zeros(1, np.float32), scale[:, 0] * np.float32(step), np.zeros(9, np.int32)
        )
        weights.append(Affine(8, codes, scale, np.zeros((9, 1), np.float32), grid))
    group = Group([int8.handle(w, kind) for w, kind in zip(weights, kinds, strict=True)], [9] * 5)
    for got, w, kind in zip(group(x, "block"), weights, kinds, strict=True):
        np.testing.assert_allclose(got, int8.multiply(x, w, kind), atol=1e-5)


def test_sums_of_too_many_inputs_use_the_reference():
    wide = Affine(
        8, np.ones((1, int8.MOST_COLUMNS), np.int8), np.ones((1, 1), np.float32), np.zeros((1, 1), np.float32)
    )
    assert int8.handle(wide, "token") is None


# ---------------------------------------------------------------- names and misfits


def test_names():
    for kind in TYPES:
        if kind != "w8a8.mix":
            assert polyquant.codec(kind).word == TYPES[kind]
    assert polyquant.codec("w8a16.g128.asym.f16").group == 128
    for wrong in (
        "w8a16.g0",
        "w8a16.asym.g32",
        "w8a16.nonsense",
        "w8a8.g32",
        "w8a16.i64",
        "w4a16.pack_k.pack_n",
        "w8a8.mix.f32",
        "w8a16.gx",
    ):
        with pytest.raises(UnknownNameError):
            polyquant.codec(wrong)


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("w8a16.g128", (4, 96), "do not divide"),
        ("w8a16", (4, 4, 4), "needs a matrix"),
        ("w4a16.pack_k", (4, 33), "do not divide"),
        ("w4a16.g32.pack_n", (3, 64), "do not divide"),
    ],
)
def test_invalid_shapes(name, shape, says):
    with pytest.raises(CodecError, match=says):
        polyquant.codec(name).specs(shape)


def test_packing_reports_missing_parts():
    codec = polyquant.codec("w8a8")
    with pytest.raises(CodecError, match="input range of the layer"):
        codec.pack(codec.quantize(np.ones((4, 32), np.float32)))
    asymmetric = polyquant.codec("w8a16.asym").quantize(np.linspace(0.5, 1, 64, dtype=np.float32).reshape(2, 32))
    with pytest.raises(CodecError, match="symmetric weights only"):
        codec.pack(asymmetric)
    with pytest.raises(CodecError, match="4-bit codes"):
        polyquant.codec("w4a16").pack(asymmetric)
    with pytest.raises(CodecError, match="NaN or infinity"):
        polyquant.codec("w8a16").quantize(np.array([[1, np.nan]], np.float32))
    with pytest.raises(CodecError, match="half precision"):
        polyquant.codec("w8a16.f16").quantize(np.full((1, 32), 1e9, np.float32))
