import itertools
from importlib.util import find_spec

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polyquant
from bitnet_gguf import gguf_tensors, hf_parts
from golden import arrays
from polyquant.codecs.transcode import ScaleFate, transcode
from polyquant.errors import CodecError, UnknownNameError, UnsupportedError
from polyquant.ops import native
from polyquant.testing.codecs import same_floats
from polyquant.types import Ternary

NAMES = [
    "i2_s.x86", "i2_s.arm", "i2_s.x4", "trinity.i2_s", "trinity.tq2_0", "tl1", "tl2", "hf_bitnet.autobitlinear",
    "hf_bitnet.bitlinear",
]  # fmt: skip
NAMES += ["tq1_0", "tq2_0"] if find_spec("polyquant.codecs.ggml_ternary") else []
ONE = [n for n in NAMES if n[:2] in ("i2", "tl", "hf")]
TILES = {"tl1": (64, 64, 32), "tl2": (64, 96, 32)}


def codec(name):
    return polyquant.codec(name, tile=TILES[name]) if name in TILES else polyquant.codec(name)


@pytest.mark.parametrize(("a", "b"), list(itertools.permutations(NAMES, 2)))
@settings(max_examples=4, deadline=None)
@given(rows=st.integers(1, 2), k=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_every_pair_keeps_the_codes(a, b, rows, k, seed):
    src, dst = codec(a), codec(b)
    rng = np.random.default_rng(seed)
    shape = (64 * rows, 256 * k) if {"tl1", "tl2"} & {a, b} else (4 * rows, 256 * k)
    codes = rng.integers(-1, 2, shape, np.int8)
    codes[:2] = 0  # blocks of zeros, whose scale has no effect
    parts = src.pack(Ternary(codes, np.array([0.75], np.float32)))
    results = []
    for which in ("native", "numpy"):
        if which == "native" and native.lib() is None:
            continue
        with native.engine(which):
            out, change = transcode(parts, shape, src, dst)
            back = dst.unpack(out, shape)
        np.testing.assert_array_equal(back.codes, codes)
        assert {n: (p.shape, p.dtype) for n, p in out.items()} == {
            n: (s.shape, s.dtype) for n, s in dst.specs(shape).items()
        }
        results.append(({n: p.tobytes() for n, p in out.items()}, change))
    assert all(r == results[0] for r in results)
    change = results[0][1]
    if b == "trinity.i2_s":
        assert change.fate is ScaleFate.DROPPED
    elif a == "trinity.i2_s":
        assert change.fate is ScaleFate.INVENTED
    elif "hf_bitnet.bitlinear" in (a, b):
        assert change.relative < 2**-8
    else:
        assert change.exact, str(change)
        same_floats(np.abs(dst.dequantize(out, shape)), np.abs(src.dequantize(parts, shape)))


@pytest.mark.parametrize("layout", ["4x128", "8x256", "12x384", "8x640", "16x2560"])
def test_layouts_equal_bitnet_cpp(layout, engine):
    """The same weight packed by three builds."""
    z = {
        n: arrays(f"i2_s/i2_s_{f}_{layout}.npz") for n, f in zip(NAMES, ("x86_128", "arm_64", "x86_1x4"), strict=False)
    }
    shape = tuple(int(d) for d in z["i2_s.x86"]["shape"])
    for a, b in itertools.permutations(z, 2):
        out, change = transcode({"blocks": z[a]["packed"]}, shape, codec(a), codec(b))
        np.testing.assert_array_equal(out["blocks"], z[b]["packed"])
        assert change.exact


def test_the_arm_file(engine):
    arm = gguf_tensors("tiny-bitnet-b158-i2_s-arm_64.gguf")
    seen = 0
    for name, (shape, kind, data) in gguf_tensors("tiny-bitnet-b158-i2_s-x86_128.gguf").items():
        if kind == 36:
            seen += 1
            size = codec("i2_s.x86").specs(shape)["blocks"].nbytes
            out, _ = transcode({"blocks": data[:size]}, shape, codec("i2_s.x86"), codec("i2_s.arm"))
            np.testing.assert_array_equal(out["blocks"], arm[name][2][:size])
    assert seen == 14


def test_one_folder_into_the_other(engine):
    """autobitlinear -> bitlinear: the packed bytes of the other folder; the scale is 1 / scale, rounded to bf16."""
    src, dst = codec("hf_bitnet.autobitlinear"), codec("hf_bitnet.bitlinear")
    other = hf_parts("hf_packed_bitlinear")
    for module, parts in hf_parts("hf_packed_autobitlinear").items():
        shape = (parts["weight"].shape[0] * 4, parts["weight"].shape[1])
        out, change = transcode(parts, shape, src, dst)
        np.testing.assert_array_equal(out["weight"], other[module]["weight"])
        assert out["weight_scale"] == (1 / parts["weight_scale"].astype(np.float32)).astype(ml_dtypes.bfloat16)
        assert change.fate is ScaleFate.ROUNDED and 0 < change.relative < 2**-8


def test_undefined_symbols_become_zero(engine):
    """Symbol 3 reads as 0, so 0 is written: no layout preserves it."""
    blocks = np.full(64, 0xFF, np.uint8)
    for a, b in itertools.permutations(["i2_s.x86", "i2_s.arm", "i2_s.x4", "trinity.i2_s"], 2):
        parts = {"blocks": blocks[: codec(a).specs((4, 32))["blocks"].nbytes]}
        out, _ = transcode(parts, (4, 32), codec(a), codec(b))
        assert codec(b).count_undefined(out, (4, 32)) == 0
        assert not codec(b).unpack(out, (4, 32)).codes.any()


def packed(name, scale, shape=(64, 256)):
    rng = np.random.default_rng(7)
    return codec(name).pack(Ternary(rng.integers(-1, 2, shape, np.int8), np.asarray(scale, np.float32)))


def said(a, b, scale):
    return str(transcode(packed(a, scale), (64, 256), codec(a), codec(b))[1])


def test_reported_changes_of_the_scale(engine):
    assert said("i2_s.x86", "tl1", [0.3]) == "scale kept exactly"
    assert said("i2_s.x86", "i2_s.arm", [0.3]) == "scale kept exactly"
    assert said("i2_s.x86", "hf_bitnet.autobitlinear", [0.3]) == "scale rounded, by at most 0.0026 of its value"
    assert said("i2_s.x86", "trinity.tq2_0", [0.3]) == (
        "scale rounded, by at most 0.00016 of its value (repeated for 512 blocks)"
    )
    assert said("trinity.tq2_0", "i2_s.x86", [0.5]) == "scale kept exactly (512 equal scales merged into one)"
    assert said("i2_s.x86", "trinity.i2_s", [0.3]) == "scale dropped: the target cannot store one"
    assert said("i2_s.x86", "trinity.i2_s", [1]) == "scale kept exactly"
    assert said("trinity.i2_s", "i2_s.x86", [1]) == "scale set to 1: the source has none"


@pytest.mark.skipif("tq2_0" not in NAMES, reason="needs ggml's TQ2_0")
def test_blocks_of_32_become_blocks_of_256_if_scales_are_equal(engine):
    scale = np.repeat(np.float32([[0.5, 2, 0.25]]), 8, axis=1) * np.ones((64, 1), np.float32)
    src, dst, shape = codec("trinity.tq2_0"), codec("tq2_0"), (64, 768)
    parts = packed("trinity.tq2_0", scale, shape)
    out, change = transcode(parts, shape, src, dst)
    assert change.exact
    same_floats(np.abs(dst.dequantize(out, shape)), np.abs(src.dequantize(parts, shape)))
    scale[:, 3] = 1
    with pytest.raises(CodecError):
        transcode(packed("trinity.tq2_0", scale, shape), shape, src, dst)


@pytest.mark.parametrize("name", ONE)
def test_different_scales_cannot_be_merged(name, engine):
    parts = packed("trinity.tq2_0", np.linspace(1, 2, 64 * 8).reshape(64, 8))
    with pytest.raises(CodecError, match=r"one scale per tensor.*requantize"):
        transcode(parts, (64, 256), codec("trinity.tq2_0"), codec(name))


@pytest.mark.parametrize("name", ONE)
def test_a_scale_of_nan_is_an_error_or_stays(name, engine):
    """Hostile scales neither crash nor warn."""
    for scale in (np.nan, np.inf, 0.0, -1.0):
        parts = packed("i2_s.x86", [scale])
        try:
            out, _ = transcode(parts, (64, 256), codec("i2_s.x86"), codec(name))
        except CodecError:
            assert not np.isfinite(scale)
            continue
        codec(name).dequantize(out, (64, 256))


def test_refusals(engine):
    parts = packed("i2_s.arm", [1], (1, 64))
    with pytest.raises(CodecError, match="multiple of 128"):
        transcode(parts, (1, 64), codec("i2_s.arm"), codec("i2_s.x86"))
    with pytest.raises(UnsupportedError, match="do not share ternary codes"):
        transcode(parts, (1, 64), codec("i2_s.arm"), codec("q8_0"))
    with pytest.raises(UnknownNameError):
        codec("i2_s.mips")


@pytest.mark.parametrize("name", NAMES)
def test_a_shape_of_a_trillion_is_refused_before_any_allocation(name, engine):
    parts = packed(name, [1])
    for call in (
        codec(name).unpack,
        codec(name).dequantize,
        lambda p, s: transcode(p, s, codec(name), codec("i2_s.arm")),
    ):
        with pytest.raises(CodecError):
            call(parts, (64 << 24, 1536))
