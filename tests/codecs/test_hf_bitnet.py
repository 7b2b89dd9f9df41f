import ml_dtypes
import numpy as np
import pytest

import polyquant
from bitnet_gguf import gguf_tensors, hf_parts
from polyquant.errors import CodecError
from polyquant.testing.codecs import same_floats
from polyquant.types import Ternary

NAMES = ["hf_bitnet.autobitlinear", "hf_bitnet.bitlinear"]
FOLDERS = {"hf_bitnet.autobitlinear": "hf_packed_autobitlinear", "hf_bitnet.bitlinear": "hf_packed_bitlinear"}
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def shape_of(parts):
    return parts["weight"].shape[0] * 4, parts["weight"].shape[1]


@pytest.mark.parametrize("name", NAMES)
def test_encode_and_decode_equal_transformers(name, engine):
    """transformers' bytes; the formula of its README row by row."""
    codec = polyquant.codec(name)
    found = hf_parts(FOLDERS[name])
    assert len(found) == 14
    for parts in found.values():
        shape = shape_of(parts)
        codes = codec.unpack(parts, shape)
        quarters = [(parts["weight"] >> 2 * i & 3).astype(np.int8) - 1 for i in range(4)]
        np.testing.assert_array_equal(codes.codes, np.concatenate(quarters))
        stored = parts["weight_scale"].astype(np.float32)
        assert codes.scale == (stored if name.endswith("autobitlinear") else 1 / stored)
        again = codec.pack(codes)
        np.testing.assert_array_equal(again["weight"], parts["weight"])
        assert again["weight_scale"] == parts["weight_scale"]
        assert {k: (v.shape, v.dtype) for k, v in again.items()} == {
            k: (s.shape, s.dtype) for k, s in codec.specs(shape).items()
        }
        expected = codes.codes * codes.scale
        same_floats(codec.dequantize(parts, shape), expected)
        same_floats(codec.dequantize(parts, shape, rows=slice(5, 70)), expected[5:70])
        same_floats(codec.dequantize(parts, shape, rows=slice(2, 2)), expected[2:2])
        out = np.empty(shape, np.float32)
        assert codec.dequantize(parts, shape, out=out) is out
        np.testing.assert_array_equal(codec.pack(codec.quantize(expected))["weight"], parts["weight"])
        assert codec.count_undefined(parts, shape) == 0


def test_same_weights_as_the_i2_s_file(engine):
    """Down and up projections (no row permutation) of the file that bitnet.cpp's converter made of the folder."""
    i2_s, codec = polyquant.codec("i2_s.x86"), polyquant.codec("hf_bitnet.autobitlinear")
    tensors = gguf_tensors("tiny-bitnet-b158-i2_s-x86_128.gguf")
    for module, parts in hf_parts("hf_packed_autobitlinear").items():
        layer, short = module.removeprefix("model.layers.").split(".", 1)
        shape, _, data = tensors[f"blk.{layer}.{GGUF_NAMES[short]}.weight"]
        assert shape == shape_of(parts)
        if short.startswith("mlp"):
            blocks = {"blocks": data[: i2_s.specs(shape)["blocks"].nbytes]}
            same_floats(codec.dequantize(parts, shape), i2_s.dequantize(blocks, shape))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["bf16", np.uint16, np.float16, np.float32])
def test_dtypes_of_the_scale(name, dtype, engine):
    bf16 = np.array([0.5], ml_dtypes.bfloat16)
    stored = bf16 if dtype == "bf16" else bf16.view(np.uint16) if dtype is np.uint16 else bf16.astype(dtype)
    parts = {"weight": np.full((1, 8), 0b10_01_00_10, np.uint8), "weight_scale": stored}
    scale = 0.5 if name.endswith("autobitlinear") else 2
    expected = np.repeat([[1], [-1], [0], [1]], 8, axis=1) * scale
    same_floats(polyquant.codec(name).dequantize(parts, (4, 8)), expected)


def test_the_scale_is_rounded_to_bf16():
    codes = Ternary(np.ones((4, 2), np.int8), np.float32([0.3]))
    auto, inverse = (polyquant.codec(n).pack(codes)["weight_scale"] for n in NAMES)
    assert auto[0] == ml_dtypes.bfloat16(0.3)
    assert inverse[0] == ml_dtypes.bfloat16(np.float32(1) / np.float32(0.3))


@pytest.mark.parametrize("name", NAMES)
def test_all_zeros(name, engine):
    codec = polyquant.codec(name)
    parts = codec.pack(codec.quantize(np.zeros((4, 8), np.float32)))
    assert np.isfinite(parts["weight_scale"].astype(np.float32)).all()
    same_floats(codec.dequantize(parts, (4, 8)), np.zeros((4, 8)))


def test_mismatched_parts_are_reported(engine):
    codec = polyquant.codec("hf_bitnet.bitlinear")
    with pytest.raises(CodecError, match="multiple of 4 rows"):
        codec.specs((6, 8))
    scale = np.ones(1, ml_dtypes.bfloat16)
    with pytest.raises(CodecError, match="do not fit"):
        codec.unpack({"weight": np.zeros((2, 8), np.uint8), "weight_scale": scale}, (4, 8))
    for bad in (np.ones(2, np.float32), np.ones(1, np.int32)):
        with pytest.raises(CodecError, match="one bf16 value"):
            codec.unpack({"weight": np.zeros((1, 8), np.uint8), "weight_scale": bad}, (4, 8))
    for scale in (np.float32(1e-40), np.float32(np.inf), np.float32(np.nan)):
        with pytest.raises(CodecError, match="cannot hold the scale"):
            codec.pack(Ternary(np.ones((4, 8), np.int8), scale.reshape(1)))
    with pytest.raises(CodecError, match="lossy=True"):
        codec.quantize(np.float32([[1], [2], [0], [1]]))
    lossy = polyquant.codec(codec, lossy=True)
    np.testing.assert_array_equal(lossy.quantize(np.float32([[1], [-2], [0], [1]])).codes, [[1], [-1], [0], [1]])
