"""mlx and mlx-lm read our folders: the same weights bit for bit, and the same logits. Skipped without them."""

import json

import ml_dtypes
import numpy as np
import pytest

import polyquant
from architectures.golden_models import Golden
from polyquant.codecs.keeping import HoldsFloats
from polyquant.opening import open_checkpoint
from polyquant.runtime.load import load

mx = pytest.importorskip("mlx.core", reason="pip install 'mlx[cpu]' mlx-lm", exc_type=ImportError)
mlx_lm = pytest.importorskip("mlx_lm.utils", reason="pip install 'mlx[cpu]' mlx-lm", exc_type=ImportError)
MODEL = "tests/vectors/models/tiny-llama-untied"
TOKENS = [0, 5, 9, 33, 120, 77, 401, 2]
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


def rounded(values, dtype):
    return values.astype(DTYPES[dtype]).astype(np.float32)


def as_mlx_rounds(weight):
    """Values as mlx computes them: of affine codes with two roundings to the dtype of the scales."""
    if isinstance(weight.codec, HoldsFloats):
        return rounded(weight.dequantize(), "bf16")
    matrix = (-1, weight.shape[-1])
    codes = weight.codec.unpack(weight.parts, weight.shape)
    levels = (codes.codes.astype(np.int16) + 2 ** (codes.bits - 1)).astype(np.float32)
    scale, bias = (np.repeat(table, weight.codec.group, 1) for table in (codes.scale, codes.bias))
    product = rounded(levels * scale, weight.codec.dtype)
    return rounded(product + bias, weight.codec.dtype).reshape(matrix).reshape(weight.shape)


def same_weights(folder):
    """mlx.core.dequantize of every weight, with the settings of config.json."""
    stored = mx.load(str(folder / "model.safetensors"))
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization"]
    found = open_checkpoint(folder)
    quantized = [n.removesuffix(".scales") for n in stored if n.endswith(".scales")]
    assert quantized
    for module in quantized:
        own = described.get(module, described)
        how = {"group_size": own["group_size"], "bits": own["bits"], "mode": own["mode"]}
        biases = stored.get(f"{module}.biases")
        values = mx.dequantize(stored[f"{module}.weight"], stored[f"{module}.scales"], biases, **how)
        np.testing.assert_array_equal(
            np.array(values.astype(mx.float32)), as_mlx_rounds(found[f"{module}.weight"]), err_msg=module
        )


def same_logits(folder, tokens, error):
    mx.set_default_device(mx.cpu)
    model, _ = mlx_lm.load_model(folder)
    want = np.array(model(mx.array([tokens])).astype(mx.float32))[0]
    found = load(folder, activations="float").logits(tokens)
    assert np.square(found - want).mean() < error**2 * np.square(want).mean()


@pytest.mark.parametrize(
    ("codec", "error"),
    [("mlx.4.g64", 0.08), ("mlx.2.g32", 0.08), ("mlx.3.g128.f16", 0.08), ("mlx.5.g32.f32", 0.001), ("mlx.6.g64", 0.08),
     ("mlx.8.g128", 0.08), ("mlx.mxfp4", 0.08), ("mlx.nvfp4", 0.08), ("mlx.mxfp8", 0.08)],
)  # fmt: skip
def test_quantized(tmp_path, codec, error):
    polyquant.quantize(f"{MODEL}/hf", tmp_path / "q", to="mlx", codec=codec)
    same_weights(tmp_path / "q")
    same_logits(tmp_path / "q", TOKENS, error)


@pytest.mark.parametrize("quant", ["Q4_0", "Q8_0"])
def test_from_gguf(tmp_path, quant):
    polyquant.convert(f"{MODEL}/tiny-llama-untied-{quant}.gguf", tmp_path / "q", to="mlx")
    same_weights(tmp_path / "q")
    same_logits(tmp_path / "q", TOKENS, 0.002)
    model, tokenizer = __import__("mlx_lm").load(str(tmp_path / "q"))
    assert tokenizer.encode("a")
    assert model.layers


@pytest.mark.parametrize("scheme", ["gptq", "awq", "compressed-tensors"])
def test_from_codes_of_other_tools(tmp_path, scheme):
    polyquant.quantize(f"{MODEL}/hf", tmp_path / "a", to=scheme)
    polyquant.convert(tmp_path / "a", tmp_path / "q", to="mlx")
    same_weights(tmp_path / "q")
    same_logits(tmp_path / "q", TOKENS, 0.05)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe"])
def test_experts(tmp_path, name):
    golden = Golden(name)
    polyquant.quantize(golden.folder, tmp_path / "q", to="mlx", codec="mlx.8.g32.f32")
    path = tmp_path / "q/config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if "num_local_experts" in config:  # mlx-lm's Qwen3 knows the older key alone
        path.write_text(json.dumps({"num_experts": config["num_local_experts"], **config}), encoding="utf-8")
    same_weights(tmp_path / "q")
    same_logits(tmp_path / "q", golden.logits()["tokens"].tolist(), 0.003)


FUSED = {  # model that transformers stores with joined experts -> entries that mlx-lm reads under other names
    "granitemoehybrid": {},
    "gemma4": {"global_head_dim": 32, "num_global_key_value_heads": 1},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe"},
    "llama4": {"model_type": "llama4"},
}


@pytest.mark.parametrize("name", FUSED)
def test_joined_experts(tmp_path, name):
    golden = Golden(name)
    polyquant.quantize(golden.folder, tmp_path / "q", to="mlx", codec="mlx.8.g32.f32")
    same_weights(tmp_path / "q")
    tokens = golden.logits()["tokens"].tolist()
    found = load(tmp_path / "q", activations="float").logits(tokens)
    stacks = [w.codec.name for n, w in open_checkpoint(tmp_path / "q").items() if len(w.shape) == 3 and "conv" not in n]
    assert stacks and set(stacks) == {"mlx.8.g32.f32"}
    path = tmp_path / "q/config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if "model_type" in FUSED[name]:  # mlx-lm has the experts only inside the model with images
        stored = mx.load(str(tmp_path / "q/model.safetensors"))
        config = {"text_config": config, "quantization": config["quantization"]}
        mx.save_safetensors(
            str(tmp_path / "q/model.safetensors"), {f"language_model.{n}": t for n, t in stored.items()}
        )
    path.write_text(json.dumps(config | FUSED[name]), encoding="utf-8")
    mx.set_default_device(mx.cpu)
    model, _ = mlx_lm.load_model(tmp_path / "q")
    want = np.array(model(mx.array([tokens])).astype(mx.float32))[0]
    assert np.square(found - want).mean() < 0.003**2 * np.square(want).mean()


def test_experts_of_gpt_oss(tmp_path):
    golden = Golden("gpt_oss_mxfp4")
    polyquant.convert(golden.folder, tmp_path / "q", to="mlx")
    same_weights(tmp_path / "q")
    same_logits(tmp_path / "q", golden.logits()["tokens"].tolist(), 0.08)
