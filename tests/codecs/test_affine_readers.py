"""Codecs that read GPTQ, AWQ, compressed-tensors and ChatGLM, against packers that follow the published layouts."""

import ml_dtypes
import numpy as np
import pytest

import packers
import polyquant
from polyquant.codecs.affine_codec import unpacked_bits
from polyquant.errors import CodecError, UnknownNameError, UnsupportedError
from polyquant.types import Affine


def expected(codes, zeros, scales):
    """(q - z) * s per group of columns, in float32."""
    n, k = codes.shape
    grouped = codes.reshape(n, scales.shape[1], -1).astype(np.float32) - zeros[:, :, None].astype(np.float32)
    return (grouped * scales[:, :, None]).reshape(n, k)


def check(name, parts, want):
    """Dequantized whole, by rows and into a given array; sizes as the specs say."""
    codec = polyquant.codec(name)
    assert codec.name == name == str(codec)
    assert {k: (a.shape, a.dtype) for k, a in parts.items()} == {
        k: (s.shape, s.dtype) for k, s in codec.specs(want.shape).items()
    }
    np.testing.assert_array_equal(codec.dequantize(parts, want.shape), want)
    np.testing.assert_array_equal(codec.dequantize(parts, want.shape, rows=slice(1, 3)), want[1:3])
    out = np.empty(want.shape, np.float32)
    assert codec.dequantize(parts, want.shape, out=out) is out
    form = codec.unpack(parts, want.shape)
    assert isinstance(form, Affine)
    assert form.codes.dtype == np.int8
    limit = 2 ** (form.bits - 1)
    assert -limit <= form.codes.min() <= form.codes.max() < limit
    return form


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("v2", [False, True])
def test_gptq(bits, v2):
    codes, zeros, scales = packers.some_codes(bits, 64, 96, 3, bits)
    check(
        f"gptq.{bits}.g32{'.v2' * v2}", packers.gptq(codes, zeros, scales, bits, v2=v2), expected(codes, zeros, scales)
    )


@pytest.mark.parametrize(("bits", "ones"), [(2, 0x55555555), (4, 0x11111111), (8, 0x01010101)])
def test_gptq_v1_decrements_the_zeros_of_a_whole_word(bits, ones):
    """A zero of 0 borrows from the next, which a sum of each code alone would read as one too many (GPTQModel 7.7)."""
    count = 32 // bits
    zeros = np.array([0, 1, *[2**bits - 1, 0] * 7][:count])
    word = np.uint32((int(packers.stream(zeros, bits).view(np.uint32)[0]) - ones) % 2**32)
    parts = {"qzeros": np.array([[word]]).view(np.int32), "scales": np.ones((1, count), np.float16)}
    _, offsets, _ = polyquant.codec(f"gptq.{bits}").tables(parts, (count, 32))
    assert (offsets[:, 0] + 2 ** (bits - 1)).tolist() == zeros.tolist()


def test_gptq_one_group_and_scale_dtypes():
    codes, zeros, scales = packers.some_codes(1, 32, 64, 1, 4)
    parts = packers.gptq(codes, zeros, scales, 4)
    check("gptq.4", parts, expected(codes, zeros, scales))
    check("gptq.4.f32", {**parts, "scales": parts["scales"].astype(np.float32)}, expected(codes, zeros, scales))


def test_gptq_with_act_order():
    codes, zeros, scales = packers.some_codes(2, 32, 96, 3, 4)
    order = np.random.default_rng(0).permutation(96)
    g_idx = np.empty(96, np.int32)
    g_idx[order] = np.arange(96) // 32  # column order[i] was the i-th to be quantized
    want = (codes - zeros[:, g_idx]).astype(np.float32) * scales[:, g_idx]
    parts = packers.gptq(codes, zeros, scales, 4, g_idx=g_idx)
    form = check("gptq.4.g32.act", parts, want)
    assert form.scale.shape == (32, 96)
    g_idx[7] = 3
    with pytest.raises(CodecError, match="group indices out of range"):
        polyquant.codec("gptq.4.g32.act").unpack({**parts, "g_idx": g_idx}, want.shape)


@pytest.mark.parametrize("groups", [1, 3])
def test_awq(groups):
    codes, zeros, scales = packers.some_codes(3, 40, 96, groups, 4)
    name = "awq.4.g32" if groups == 3 else "awq.4"
    check(name, packers.awq(codes, zeros, scales), expected(codes, zeros, scales))


@pytest.mark.parametrize(("bits", "k"), [(4, 96), (4, 92), (8, 96), (8, 90)])
@pytest.mark.parametrize("zero", ["", "zp", "zpp"])
def test_compressed_tensors_packed(bits, k, zero):
    codes, zeros, scales = packers.some_codes(4, 20, k, 2, bits)
    half = 2 ** (bits - 1)
    parts = packers.compressed(codes - half, scales, bits, zeros - half if zero else None)
    del parts["weight_shape"]
    if zero == "zp":
        parts["weight_zero_point"] = (zeros - half).astype(np.int8)
    want = expected(codes, zeros if zero else np.full_like(zeros, half), scales)
    check(".".join(filter(None, [f"compressed.p{bits}.g{k // 2}", zero, "f32"])), parts, want)


def test_compressed_tensors_int8():
    codes, zeros, scales = packers.some_codes(5, 20, 30, 1, 8)
    weight, bf16 = (codes - 128).astype(np.int8), scales.astype(ml_dtypes.bfloat16)
    want = expected(codes, np.full_like(zeros, 128), bf16.astype(np.float32))
    check("compressed.i8.dynamic", {"weight": weight, "weight_scale": bf16}, want)
    one = np.array([0.5], np.float16)
    check("compressed.i8.tensor.f16", {"weight": weight, "weight_scale": one}, weight.astype(np.float32) / 2)


def test_compressed_tensors_with_act_order():
    codes, _, scales = packers.some_codes(6, 8, 64, 2, 4)
    g_idx = np.random.default_rng(1).permutation(np.arange(64) // 32).astype(np.int32)
    parts = {**packers.compressed(codes - 8, scales, 4), "weight_g_idx": g_idx}
    del parts["weight_shape"]
    check("compressed.p4.g32.act.f32", parts, (codes - 8).astype(np.float32) * scales[:, g_idx])


def test_chatglm():
    rng = np.random.default_rng(7)
    codes, scales = rng.integers(-8, 8, (12, 10)), rng.uniform(0.01, 1, 12).astype(np.float16)
    want = codes.astype(np.float32) * scales.astype(np.float32)[:, None]
    check("chatglm.8", {"weight": codes.astype(np.int8), "weight_scale": scales}, want)
    nibbles = codes & 15
    packed = (nibbles[:, ::2] << 4 | nibbles[:, 1::2]).astype(np.uint8).view(np.int8)
    check("chatglm.4", {"weight": packed, "weight_scale": scales}, want)


def test_three_bits_cross_words():
    codes = np.random.default_rng(8).integers(0, 8, (2, 64))
    words = np.stack([packers.stream(row, 3) for row in codes])
    np.testing.assert_array_equal(unpacked_bits(words, 3), codes)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("gptq.4.g32", (32, 48)),
        ("gptq.4", (32, 12)),
        ("gptq.4", (12, 32)),
        ("awq.4.g32", (12, 32)),
        ("awq.4", (32,)),
        ("compressed.p4.g32", (8, 40)),
        ("chatglm.4", (8, 9)),
        ("chatglm.4", (2, 8, 8)),
    ],
)
def test_invalid_shapes(name, shape):
    with pytest.raises(CodecError):
        polyquant.codec(name).specs(shape)


@pytest.mark.parametrize(
    "name",
    ["gptq", "gptq.5", "gptq.4.g", "gptq.4.v3", "gptq.4.act.g32", "awq", "awq.8", "awq.4.f16", "compressed",
        "compressed.i5", "compressed.p4.bf16", "chatglm.2", "chatglm"],
)  # fmt: skip
def test_unknown_names(name):
    with pytest.raises(UnknownNameError):
        polyquant.codec(name)


@pytest.mark.parametrize("name", ["gptq.4.g32.act", "compressed.p4.g32.act", "chatglm.8"])
def test_quantizing_is_refused(name):
    codec = polyquant.codec(name)
    with pytest.raises(UnsupportedError, match="is read-only"):
        codec.quantize(np.zeros((32, 32), np.float32))
    with pytest.raises((UnsupportedError, CodecError), match=r"is read-only|do not divide"):
        codec.pack(Affine(8, np.zeros((1, 1), np.int8), np.ones((1, 1), np.float32), np.zeros((1, 1), np.float32)))


def test_mismatched_parts():
    codes, zeros, scales = packers.some_codes(9, 32, 32, 1, 4)
    parts = packers.gptq(codes, zeros, scales, 4)
    with pytest.raises(CodecError, match="qzeros"):
        polyquant.codec("gptq.4").unpack({**parts, "qzeros": parts["qzeros"][:, :-1]}, (32, 32))
