"""The codec `trellis.*`: names, sizes, decoding and multiplication of both engines, the distortion of its encoder."""

from __future__ import annotations

import numpy as np
import pytest

import polyquant as pq
from polyquant.codecs.trellis import Trellis, trellis_named
from polyquant.errors import CodecError, UnknownNameError
from polyquant.ops import native
from polyquant.ops.matmul import Group
from polyquant.types import Parts

NAMES = ["trellis.2", "trellis.3", "trellis.4.mul1.16", "trellis.5.mul1.12", "trellis.6", "trellis.7.mul1.16",
    "trellis.8",
         "trellis.3.grid", "trellis.8.grid", "trellis.3.grid.rotated", "trellis.4.mul1.14.flat",
         "trellis.1.mul1.16.exl3", "trellis.3.mul1.16.exl3",
         "trellis.4.mcg.16.exl3", "trellis.5.3inst.16", "trellis.4.lut.8", "trellis.3.mul1.14.h16x1",
         "trellis.3.g2"]  # fmt: skip
SHAPES = [(40, 136), (256, 384), (131, 33), (16, 16), (1, 1)]
needs_native = pytest.mark.skipif(native.lib() is None, reason="no native kernels here")


def random_parts(codec: Trellis, shape: tuple[int, int], seed: int = 0) -> Parts:
    """Any bytes are legal codes."""
    rng, specs = np.random.default_rng(seed), codec.specs(shape)
    parts = {
        "indices": rng.integers(0, 256, specs["indices"].shape, np.uint8),
        "scales": rng.uniform(0.5, 1.5, specs["scales"].shape).astype(np.float32),
        "su": rng.choice(np.array([-1, 1], np.float32), shape[1]),
        "sv": rng.choice(np.array([-1, 1], np.float32), shape[0]),
    }
    if "lut" in specs:
        parts["lut"] = rng.standard_normal(specs["lut"].shape).astype(np.float32)
    return parts


def fitting(name: str) -> list[tuple[int, int]]:
    codec = trellis_named(name)
    blocks = codec.hadamard if isinstance(codec.hadamard, tuple) else (1, 1)
    return [s for s in SHAPES if s[1] % blocks[0] == 0 == s[0] % blocks[1] and s[1] >= (codec.groups or 1)]


@pytest.mark.parametrize("name", NAMES)
def test_the_name_has_every_option(name: str) -> None:
    codec = pq.codec(name)
    assert codec.name == name
    assert pq.codec(codec.name).configure() == codec.configure() or str(pq.codec(codec.name)) == str(codec)


@pytest.mark.parametrize(
    ("base", "options", "name"),
    [
        ("trellis.3", {"window_bits": 14, "hadamard": True}, "trellis.3"),
        ("trellis.3", {"window_bits": 12, "hadamard": False}, "trellis.3.mul1.12.flat"),
        ("trellis.4", {"codebook": "grid"}, "trellis.4.grid"),
        ("trellis.4", {"codebook": "grid", "hadamard": True}, "trellis.4.grid.rotated"),
        ("trellis.2", {"groups": 3}, "trellis.2.g3"),
    ],
)
def test_options(base: str, options: dict[str, object], name: str) -> None:
    found = pq.codec(base, **options)
    assert found.name == name
    assert str(trellis_named(name)) == name


@pytest.mark.parametrize(
    "options", [{"window_bits": 17}, {"window_bits": 2}, {"groups": 0}, {"hadamard": (3, 1)}, {"hadamard": (256, 1)}]
)
def test_invalid_options(options: dict[str, object]) -> None:
    with pytest.raises(CodecError):
        pq.codec("trellis.3", **options)


@pytest.mark.parametrize(
    "name", ["trellis.9", "trellis.x", "trellis.3.mul2", "trellis.3.mul1", "trellis.3.mul1.40", "trellis.3.nothing"]
)
def test_unknown_names(name: str) -> None:
    with pytest.raises(UnknownNameError):
        pq.codec(name)


@needs_native
@pytest.mark.parametrize("name", NAMES)
def test_engines_decode_equal_floats(name: str, kernels: str) -> None:
    codec = trellis_named(name)
    for shape in fitting(name):
        parts = random_parts(codec, shape)
        with native.engine("numpy"):
            want = codec.dequantize(parts, shape)
        np.testing.assert_array_equal(codec.dequantize(parts, shape), want)
        np.testing.assert_array_equal(codec.dequantize(parts, shape, rows=slice(0, 1)), want[:1])


@needs_native
@pytest.mark.parametrize("name", NAMES)
def test_engines_give_equal_products(name: str, kernels: str) -> None:
    codec = trellis_named(name)
    for shape in fitting(name):
        parts = random_parts(codec, shape)
        handle = codec.packed(parts, shape)
        if handle is None:
            assert codec.group_count(shape) > 1
            continue
        group = Group([handle], [shape[0]])
        x = np.random.default_rng(1).standard_normal((9, shape[1])).astype(np.float32)
        (every,) = group(x, "block")
        for tokens in (1, 2, 3, 4, 5, 9):
            for rounding in ("none", "block"):
                (y,) = group(x[:tokens], rounding)
                if rounding == "block":  # whatever the number of tokens
                    np.testing.assert_array_equal(y, every[:tokens])
                with native.engine("numpy"):
                    want = codec.multiply(parts, shape, x[:tokens], rounding)
                assert np.abs(y - want).max() <= 1e-5 * max(1e-6, np.abs(want).max()), (shape, tokens, rounding)


@needs_native
def test_a_group_has_one_input() -> None:
    codec = trellis_named("trellis.3")
    handles = [codec.packed(random_parts(codec, (n, 64), n), (n, 64)) for n in (48, 16)]
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    together = Group(handles, [48, 16])(x, "block")
    for handle, n, y in zip(handles, (48, 16), together, strict=True):
        np.testing.assert_array_equal(Group([handle], [n])(x, "block")[0], y)


def test_int8_activations_lose_little() -> None:
    codec = trellis_named("trellis.4")
    parts = random_parts(codec, (128, 512))
    x = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    exact = codec.multiply(parts, (128, 512), x, "none")
    error = codec.multiply(parts, (128, 512), x, "block") - exact
    assert np.sqrt((error**2).mean() / (exact**2).mean()) < 0.01


@pytest.mark.parametrize("name", ["trellis.3.grid", "trellis.2.mul1.8", "trellis.4.mul1.8.flat"])
def test_sizes(name: str) -> None:
    codec = trellis_named(name)
    for shape in [(48, 40), (17, 131)]:
        w = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        parts = codec.pack(codec.quantize(w))
        assert {k: (v.shape, v.dtype) for k, v in parts.items()} == {
            k: (s.shape, s.dtype) for k, s in codec.specs(shape).items()
        }
        again = codec.pack(codec.unpack(parts, shape))
        assert all(np.array_equal(again[k], parts[k]) for k in parts)


@pytest.mark.skipif(native.lib() is None, reason="slow in numpy")
@pytest.mark.parametrize(("bits", "bar"), [(2, 0.0726), (3, 0.0189), (4, 0.0052)])
def test_distortion(bits: int, bar: float) -> None:
    """Unit Gaussian 256 x 4096, 12-bit windows, nothing rotated, one scale."""
    w = np.random.default_rng(0).standard_normal((256, 4096)).astype(np.float32)
    w /= w.std()
    codec = pq.codec(f"trellis.{bits}", window_bits=12, hadamard=False, groups=1)
    found = codec.dequantize(codec.pack(codec.quantize(w)), w.shape)
    assert ((found - w) ** 2).mean() <= bar


@pytest.mark.skipif(native.lib() is None, reason="slow in numpy")
def test_rotation_reduces_the_error_of_outliers() -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((64, 256)).astype(np.float32)
    w[:, 5] *= 30

    def error(hadamard: bool) -> float:
        codec = pq.codec("trellis.3", window_bits=12, hadamard=hadamard, groups=1)
        found = codec.dequantize(codec.pack(codec.quantize(w)), w.shape)
        return float(((found - w) ** 2).sum() / (w**2).sum())

    assert error(True) < 0.03 < error(False)


def test_no_more_groups_than_inputs() -> None:
    with pytest.raises(CodecError, match="groups"):
        trellis_named("trellis.3.g9").specs((16, 8))


def test_zeros_stay_zeros() -> None:
    codec = trellis_named("trellis.3.mul1.8")
    w = np.zeros((32, 32), np.float32)
    assert not codec.dequantize(codec.pack(codec.quantize(w)), w.shape).any()


@pytest.mark.parametrize(
    ("w", "said"),
    [(np.full((16, 16), np.nan), "NaN"), (np.zeros((4, 0)), "column")],
)
def test_refused(w: np.ndarray, said: str) -> None:
    with pytest.raises(CodecError, match=said):
        trellis_named("trellis.3.grid").quantize(w)


def test_mismatched_parts() -> None:
    codec, shape = trellis_named("trellis.3"), (32, 48)
    parts = dict(random_parts(codec, shape))
    for key, wrong in [
        ("indices", parts["indices"][:1]),
        ("scales", parts["scales"].astype(np.float64)),
        ("su", parts["su"][:5]),
    ]:
        with pytest.raises(CodecError, match=key):
            codec.dequantize({**parts, key: wrong}, shape)
    del parts["sv"]
    with pytest.raises(CodecError, match="missing"):
        codec.dequantize(parts, shape)
