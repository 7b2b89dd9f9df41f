"""Weights of other tools' checkpoints multiply in their stored bits, and give the codec's reference product."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import polyquant as pq
from polyquant.ops import code_streams, native
from polyquant.ops.matmul import Group, round_activations
from polyquant.types import Affine, Parts, Rounding

N, K = 64, 384
INTEGERS = (
    "compressed.p4.g32", "compressed.p4.g128.zpp", "compressed.p4.g32.zp.f16", "compressed.p8", "compressed.p3.g64",
    "compressed.p8.g128.f32", "gptq.2.g32", "gptq.3.g128", "gptq.4.g128", "gptq.4.g32.v2", "gptq.8", "awq.4.g64",
    "awq.4", "modelopt.int4.g32", "modelopt.int4",
)  # fmt: skip
FLOATS = ("fp8.e4m3", "fp8.e5m2.f32", "fp8.e4m3.tensor", "fp8.e4m3.b128.inv.f32", "hf_mxfp4")


def sample(name: str) -> Parts:
    """Parts of random codes, with zero points where the codec has them."""
    rng = np.random.default_rng(3)
    codec = pq.codec(name)
    if name in FLOATS:
        parts = {}
        for key, spec in codec.specs((N, K)).items():
            raw = rng.integers(110 if key == "scales" else 0, 123 if key == "scales" else 256, spec.shape).astype(
                np.uint8
            )
            small = spec.dtype in (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
            parts[key] = (
                (raw & 0xBB).view(spec.dtype) if small
                else raw if spec.dtype == np.uint8 else rng.uniform(0.01, 0.02, spec.shape).astype(spec.dtype)
            )  # fmt: skip
        return parts
    traits = codec.integers
    groups = K // (traits.group or K)
    low, high = -(2 ** (traits.bits - 1)), 2 ** (traits.bits - 1)
    offset = rng.integers(low, high, (N, groups)) if traits.zero == "integer" else np.zeros((N, groups))
    scale = rng.uniform(0.01, 0.02, (N, groups)).astype(ml_dtypes.bfloat16).astype(np.float16).astype(np.float32)
    codes = rng.integers(low, high, (N, K)).astype(np.int8)
    return codec.pack(Affine(traits.bits, codes, scale, offset.astype(np.float32)))


@pytest.mark.skipif(not native.available(), reason="no native kernels here")
@pytest.mark.parametrize("name", INTEGERS + FLOATS)
def test_products_equal_the_reference(name: str) -> None:
    codec, parts = pq.codec(name), sample(name)
    handle = codec.packed(parts, (N, K))
    assert isinstance(handle, native.module().Packed)
    rng = np.random.default_rng(5)
    w = np.abs(codec.dequantize(parts, (N, K)))
    for tokens in (1, 3, 7):
        x = rng.standard_normal((tokens, K)).astype(np.float32)
        roundings: tuple[Rounding, ...] = ("none", "block")
        for rounding in roundings:
            (y,) = Group([handle], [N])(x, rounding)
            if name == "hf_mxfp4":
                seen = round_activations(x, rounding)
                want = seen @ codec.dequantize(parts, (N, K)).T
            else:
                want = codec.multiply(parts, (N, K), x, rounding)
            assert (np.abs(y - want) <= 1e-5 * (np.abs(x) @ w.T + np.abs(w).max())).all()


@pytest.mark.parametrize("name", INTEGERS)
def test_streams_hold_the_codes(name: str) -> None:
    codec, parts = pq.codec(name), sample(name)
    stream = codec.stream(parts, (N, K))
    codes = codec.unpack(parts, (N, K)).codes
    bits = codec.integers.bits
    unsigned = (codes - np.int8(0)).view(np.uint8) + np.uint8(2 ** (bits - 1))
    np.testing.assert_array_equal(code_streams.unpack(stream, bits, K), unsigned)
    if name.startswith("compressed"):
        assert np.shares_memory(stream, parts["weight_packed"]), "a second copy"


@pytest.mark.skipif(not native.available(), reason="no native kernels here")
@pytest.mark.parametrize(
    ("name", "shape"), [("gptq.4.g8", (32, 64)), ("compressed.i8", (32, 64)), ("compressed.p4", (32, 60))]
)
def test_layouts_without_such_a_kernel_use_bytes(name: str, shape: tuple[int, int]) -> None:
    codec = pq.codec(name)
    parts = codec.pack(codec.quantize(np.random.default_rng(0).standard_normal(shape).astype(np.float32)))
    assert isinstance(codec.packed(parts, shape), native.module().Affine)


def test_zero_points_beyond_the_codes_use_bytes() -> None:
    parts = sample("compressed.p4.g32.zp.f16")
    codec = pq.codec("compressed.p4.g32.zp.f16")
    parts["weight_zero_point"][0, 0] = -9
    assert codec.stream(parts, (N, K)) is None
    if native.available():
        assert isinstance(codec.packed(parts, (N, K)), native.module().Affine)
