"""MXFP4 in tensors of codes and of scales: the same values as ggml's blocks, and the same bits after a round trip."""

import numpy as np
import pytest

import polyquant
from polyquant.errors import CodecError
from polyquant.types import Blocks

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def parts_of(rows, k, seed):
    rng = np.random.default_rng(seed)
    blocks, scales = rng.integers(0, 256, (rows, k // 2)), rng.integers(0, 255, (rows, k // 32))
    return {"blocks": blocks.astype(np.uint8), "scales": scales.astype(np.uint8)}


def test_adjacent_codes_share_a_byte(engine):
    """Decode as transformers' convert_moe_packed_tensors: out[2j] is the low nibble, out[2j + 1] the high one.

    Values are multiplied with 2^(scale - 127).
    """
    codec, parts = polyquant.codec("hf_mxfp4"), parts_of(6, 96, 0)
    parts["scales"] = parts["scales"] % 40 + 100
    wanted = np.empty((6, 96))
    wanted[:, 0::2], wanted[:, 1::2] = E2M1[parts["blocks"] & 15], E2M1[parts["blocks"] >> 4]
    wanted *= 2.0 ** (np.repeat(parts["scales"], 32, axis=1) - 127.0)
    np.testing.assert_array_equal(codec.dequantize(parts, (6, 96)), wanted)
    np.testing.assert_array_equal(codec.dequantize(parts, (2, 3, 96)), wanted.reshape(2, 3, 96))


def test_bits_survive_a_round_trip_through_ggml(engine):
    """Codes of -0 and scales of 255 too, which no floats would keep."""
    codec, ggml, parts = polyquant.codec("hf_mxfp4"), polyquant.codec("mxfp4"), parts_of(5, 160, 1)
    parts["blocks"][0], parts["scales"][1] = 0x88, 255
    codes = codec.unpack(parts, (5, 160))
    packed = ggml.pack(codes)
    np.testing.assert_array_equal(packed["blocks"].reshape(5, 5, 17)[:, :, 0], parts["scales"])
    again = codec.pack(ggml.unpack(packed, (5, 160)))
    assert again.keys() == parts.keys()
    for name in parts:
        np.testing.assert_array_equal(again[name], parts[name])
    np.testing.assert_array_equal(codec.dequantize(parts, (5, 160)), ggml.dequantize(packed, (5, 160)))


def test_quantizing_is_never_worse_than_ggml(engine):
    codec, ggml = polyquant.codec("hf_mxfp4"), polyquant.codec("mxfp4")
    w = np.random.default_rng(2).standard_normal((64, 64)).astype(np.float32)
    errors = []
    for one in (codec, ggml):
        back = one.dequantize(one.pack(one.quantize(w)), w.shape)
        errors.append(((back - w).reshape(-1, 32) ** 2).sum(1))
    assert (errors[0] <= errors[1] * (1 + 1e-5)).all()
    assert errors[0].sum() < 0.97 * errors[1].sum()


def test_mismatched_parts():
    codec, parts = polyquant.codec("hf_mxfp4"), parts_of(4, 64, 3)
    with pytest.raises(CodecError, match="a different block type"):
        codec.pack(Blocks("q4_0", np.zeros((1, 18), np.uint8)))
    with pytest.raises(CodecError, match="multiple of 32"):
        codec.specs((4, 48))
    with pytest.raises(CodecError, match="do not fit"):
        codec.unpack(parts, (4, 96))
