"""NVFP4 experts: one scale of the tensor for each, as separate matrices in folders and as a stack in GGUF files."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest

import golden
import polyquant
from formats.gguf_files import ARCH, file, tensor
from polyquant.codecs.float_forms import for_stack
from polyquant.errors import CodecError, UnsupportedError
from polyquant.formats.gguf.check import check
from polyquant.opening import open_checkpoint
from polyquant.ops import native
from polyquant.rows import expert, in_memory
from polyquant.runtime.load import load
from polyquant.types import Weight

TOKENS = [1, 5, 9, 33, 77, 100]
SCHEMES = {"modelopt": "hf_nvfp4", "compressed-tensors": "hf_nvfp4.div"}
STACK = "blk.0.ffn_{}_exps"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A mixture whose experts have 128 rows and different magnitudes, so that their scales differ."""
    source, out = golden.VECTORS / "architectures" / "qwen3_moe", tmp_path_factory.mktemp("moe") / "model"
    shutil.copytree(source, out)
    rng, tensors = np.random.default_rng(0), {}
    for name, weight in polyquant.open(source).items():
        values = weight.dequantize()
        if ".experts." in name:
            size = 0.02 * (1 + int(name.split(".experts.")[1].split(".")[0]))
            shape = (64, 128) if "down_proj" in name else (128, 64)
            values = rng.standard_normal(shape, np.float32) * np.float32(size)
        tensors[name] = values.astype(ml_dtypes.bfloat16)
    polyquant.save(tensors, out / "model.safetensors", overwrite=True)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 128}))
    return out


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gguf_and_back(scheme, model, tmp_path):
    """Codes and scales of every expert are kept both ways, and the logits with them."""
    folder, gguf, back = tmp_path / "folder", tmp_path / "a.gguf", tmp_path / "back"
    polyquant.quantize(model, folder, to=scheme, codec=SCHEMES[scheme])
    for source, target, to in ((folder, gguf, "gguf"), (gguf, back, scheme)):
        steps = polyquant.convert(source, target, to=to).steps
        assert {s.action for s in steps if "exp" in s.tensor and "gate_inp" not in s.tensor} == {"transcode"}
    before, stacks, after = (polyquant.open(path) for path in (folder, gguf, back))
    for part, rows in (("gate", 128), ("up", 128), ("down", 64)):
        stack = stacks[STACK.format(part) + ".weight"]
        assert stack.codec.name == f"nvfp4.scaled.r{rows}" and stack.parts["scale"].shape == (8,)
        assert len(set(stack.parts["scale"].tolist())) == 8
        for e in range(8):
            name = f"model.layers.0.mlp.experts.{e}.{part}_proj.weight"
            theirs, ours, again = before[name], expert(stack, e), after[name]
            for key in ("weight", "weight_scale"):
                np.testing.assert_array_equal(again.parts[key].view(np.uint8), theirs.parts[key].view(np.uint8))
            np.testing.assert_allclose(again.parts["weight_scale_2"], theirs.parts["weight_scale_2"], rtol=2e-7)
            np.testing.assert_allclose(ours.dequantize(), theirs.dequantize(), rtol=3e-7)
            np.testing.assert_array_equal(ours.dequantize(), stack.dequantize()[e])
            if scheme == "modelopt":  # no reciprocals
                np.testing.assert_array_equal(ours.parts["scale"], theirs.parts["weight_scale_2"])
                np.testing.assert_array_equal(again.parts["weight_scale_2"], theirs.parts["weight_scale_2"])
    want = load(folder).logits(TOKENS)
    for path in (gguf, back):
        np.testing.assert_allclose(load(path).logits(TOKENS), want, atol=2e-2 * np.abs(want).max())
    if scheme == "modelopt":
        floats = load(folder, activations="float").logits(TOKENS)
        close = 0 if native.lib() is not None else 1e-5  # BLAS adds the products of a stack in another order
        found = load(gguf, activations="float").logits(TOKENS)
        np.testing.assert_allclose(found, floats, rtol=0, atol=close * np.abs(floats).max())


def test_stacks_are_copied_and_decoded(model, tmp_path):
    """A stack keeps its bytes in another GGUF file; floats of one expert have its own scale."""
    polyquant.quantize(model, tmp_path / "a.gguf", codec="nvfp4.scaled")
    polyquant.convert(tmp_path / "a.gguf", tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    polyquant.convert(tmp_path / "a.gguf", tmp_path / "f", to="hf", codec="f32")
    stack = polyquant.open(tmp_path / "a.gguf")[STACK.format("up") + ".weight"]
    floats = polyquant.open(tmp_path / "f")
    for e, values in enumerate(stack.dequantize()):
        np.testing.assert_array_equal(floats[f"model.layers.0.mlp.experts.{e}.up_proj.weight"].dequantize(), values)


def test_experts_are_quantized_one_by_one(model, tmp_path):
    """Each expert gets the scale and the codes that it has as a matrix, from separate matrices and from a stack."""
    polyquant.quantize(model, tmp_path / "a.gguf", codec="nvfp4.scaled")
    polyquant.convert(model, tmp_path / "f.gguf", codec="bf16")
    polyquant.quantize(tmp_path / "f.gguf", tmp_path / "b.gguf", codec="nvfp4.scaled")
    single, source = polyquant.codec("nvfp4.scaled"), polyquant.open(model)
    for path in ("a.gguf", "b.gguf"):
        stack = polyquant.open(tmp_path / path)[STACK.format("down") + ".weight"]
        assert stack.codec.name == "nvfp4.scaled.r64"
        for e in range(8):
            w = source[f"model.layers.0.mlp.experts.{e}.down_proj.weight"].dequantize()
            want = single.pack(single.quantize(w))
            for key, part in expert(stack, e).parts.items():
                np.testing.assert_array_equal(part, want[key])


def stacked(experts=2, rows=4, seed=0):
    """An NVFP4 stack [experts, rows, 64] without scales."""
    blocks = np.random.default_rng(seed).integers(0, 120, (experts * rows, 36)).astype(np.uint8)
    return Weight(STACK.format("up") + ".weight", (experts, rows, 64), polyquant.codec("nvfp4"),
                  in_memory({"blocks": blocks}))  # fmt: skip


@pytest.mark.parametrize("keys", [["scale"], ["input_scale"], ["scale", "input_scale"]])
def test_scales_next_to_a_stack(keys, tmp_path):
    """The tensors of llama.cpp's converter, which omits scales that are all 1."""
    stack, scales = stacked(), np.array([0.5, 3], np.float32)
    stem = stack.name.removesuffix("weight")
    polyquant.save({stack.name: stack, **{stem + key: scales for key in keys}}, tmp_path / "a.gguf")
    checkpoint = open_checkpoint(tmp_path / "a.gguf")
    assert set(checkpoint) == {stack.name}
    found = checkpoint[stack.name]
    assert found.codec.name == "nvfp4.scaled" + ".static" * ("input_scale" in keys) + ".r4"
    factors = scales if "scale" in keys else np.ones(2, np.float32)
    np.testing.assert_array_equal(found.dequantize(), stack.dequantize() * factors[:, None, None])
    np.testing.assert_array_equal(found.codec.dequantize(found.read(), found.shape, rows=slice(3, 6)),
                                  found.dequantize().reshape(8, 64)[3:6])  # fmt: skip
    assert not [f for f in polyquant.validate(tmp_path / "a.gguf", target="llama.cpp") if f.code == "HUB503"]
    found = polyquant.validate(tmp_path / "a.gguf", target="transformers")
    assert [f.tensor for f in found if f.code == "HUB320"] == [stack.name]
    assert not [f for f in found if f.code == "HUB316"]


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 1)])
def test_scales_of_another_shape_are_refused(shape, tmp_path):
    stack, path = stacked(), tmp_path / "a.gguf"
    polyquant.save({stack.name: stack, STACK.format("up") + ".scale": np.ones(shape, np.float32)}, path)
    assert "GGUF037" in {f.code for f in polyquant.validate(path)}
    for use in (lambda: open_checkpoint(path), lambda: polyquant.convert(path, tmp_path / "b.gguf", codec="f16")):
        with pytest.raises(UnsupportedError, match="scales that do not fit"):
            use()
    assert stack.name in polyquant.open(path) and not (tmp_path / "b.gguf").exists()


def test_a_matrix_with_several_scales_is_refused(tmp_path):
    raw = file([ARCH], [tensor("a.weight", (64, 2), 40, 0), tensor("a.scale", (2,), 0, 96)], bytes(128))
    (tmp_path / "a.gguf").write_bytes(raw)
    assert "GGUF037" in {f.code for f in check(tmp_path / "a.gguf")}
    with pytest.raises(UnsupportedError, match="scales that do not fit"):
        open_checkpoint(tmp_path / "a.gguf")


def test_codec():
    codec = for_stack(polyquant.codec("nvfp4.scaled.static"), (3, 32, 64))
    assert codec == polyquant.codec("nvfp4.scaled.static.r32") == polyquant.codec(codec.name)
    assert for_stack(codec, (32, 64)) == polyquant.codec("nvfp4.scaled.static")
    for name in ("nvfp4.scaled.r0", "nvfp4.scaled.r01", "nvfp4.scaled.rx", "nvfp4.scaled.r", "nvfp4.scaled.x"):
        with pytest.raises(LookupError):
            polyquant.codec(name)
    apart, single = polyquant.codec("nvfp4.scaled.r32"), polyquant.codec("nvfp4.scaled")
    w = np.random.default_rng(1).standard_normal((96, 64), np.float32) * np.repeat([1, 2, 4], 32)[:, None]
    codes = apart.quantize(w)
    again = apart.unpack(apart.pack(codes), w.shape)
    np.testing.assert_array_equal(again.codes, codes.codes)
    np.testing.assert_array_equal(again.tensor, codes.tensor)
    with pytest.raises(CodecError, match="one scale of the tensor"):
        single.pack(codes)
