"""Codes of a GGUF file's stacks of experts, kept in the separate matrices of folders, and back."""

import numpy as np
import pytest

import golden
import polyquant
from polyquant.errors import PlanError
from polyquant.rows import expert
from polyquant.runtime.load import load

SOURCE = golden.VECTORS / "architectures" / "qwen3_moe"
STACK, MATRIX = "blk.1.ffn_up_exps.weight", "model.layers.1.mlp.experts.{}.up_proj.weight"
KEPT = [
    ("q4_0", "compressed-tensors", "compressed.p4.g32.f16"), ("q4_0", "gptq", "gptq.4.g32.sym"),
    ("q4_0", "awq", "awq.4.g32"), ("q4_0", "mlx", "mlx.4.g32.f16"), ("q4_0", "modelopt", "modelopt.int4.g32"),
    ("q8_0", "compressed-tensors", "compressed.p8.g32.f16"), ("q8_0", "gptq", "gptq.8.g32.sym"),
    ("mxfp4", "compressed-tensors", "hf_mxfp4"), ("mxfp4", "modelopt", "hf_mxfp4"),
    ("nvfp4", "modelopt", "hf_nvfp4"), ("nvfp4", "compressed-tensors", "hf_nvfp4.div"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "scheme", "codec"), KEPT)
def test_kept(name, scheme, codec, tmp_path):
    """Every expert is transcoded with equal weights, the logits too, and the codes come back."""
    source, out, back = tmp_path / "a.gguf", tmp_path / "out", tmp_path / "b.gguf"
    polyquant.quantize(SOURCE, source, codec=name)
    steps = polyquant.convert(source, out, to=scheme).steps
    if scheme != "mlx":
        own = [s for s in steps if ".experts." in s.tensor and ("down_proj" not in s.tensor or name != "nvfp4")]
        assert len(own) == 8 * 3 * (2 if name == "nvfp4" else 3) and {s.action for s in own} == {"transcode"}
    stack, made = polyquant.open(source)[STACK], polyquant.open(out)
    if scheme == "mlx":
        assert made["model.layers.1.mlp.switch_mlp.up_proj.weight"].codec.name == codec
    else:
        for e in range(8):
            assert made[MATRIX.format(e)].codec.name == codec
            np.testing.assert_array_equal(made[MATRIX.format(e)].dequantize(), expert(stack, e).dequantize())
    tokens = [1, 5, 9, 33]
    want = load(source, activations="float").logits(tokens)
    np.testing.assert_allclose(load(out, activations="float").logits(tokens), want, atol=2e-2 * np.abs(want).max())
    polyquant.convert(out, back)
    again = polyquant.open(back)[STACK]
    np.testing.assert_allclose(again.dequantize(), stack.dequantize(), rtol=2e-3)  # q4_1 rounds a minimum
    if scheme not in ("awq", "mlx"):
        np.testing.assert_array_equal(again.dequantize(), stack.dequantize())


def test_codes_that_cannot_be_kept_are_named(tmp_path):
    """The reason is the codes, not the default codec's groups, which do not divide 64 columns either."""
    polyquant.quantize(SOURCE, tmp_path / "a.gguf", codec="q4_1")
    with pytest.raises(PlanError, match="cannot hold the codes of q4_1") as raised:
        polyquant.plan(tmp_path / "a.gguf", "gptq")
    assert "\n" not in str(raised.value)
