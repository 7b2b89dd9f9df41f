"""load_model: files of every format as transformers models with packed weights, and the logits of our runtime.

Needs torch and transformers: `make check-slow`.
"""

from __future__ import annotations

import copy
import json
import logging
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import packers
import polyquant as pq
from polyquant.errors import InputError, UnsupportedError

VECTORS = Path(__file__).parents[1] / "vectors"
MODELS, ARCHITECTURES, SLIM = VECTORS / "models", VECTORS / "architectures", VECTORS / "msmodelslim"
LLAMA = MODELS / "tiny-llama-untied"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("torch") is None or find_spec("transformers") is None,
        reason="torch or transformers is not installed: pip install 'polyquant[transformers]'",
    ),
]
TOKENS = list(range(1, 20))


def load(path, **options):
    import torch
    import transformers

    from polyquant.hf import load_model

    transformers.utils.logging.disable_progress_bar()
    return load_model(path, **{"dtype": torch.float32, "activations": "float", **options})


def logits(model):
    import torch

    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].float().numpy()


def ours(path, activations="float"):
    return pq.load(path, activations=activations, cache="f32").session().feed_all(TOKENS)


def agree(path, *, atol=2e-5, **options):
    want = ours(path, options.get("activations", "float"))
    model = load(path, **options)
    np.testing.assert_allclose(logits(model), want, rtol=0, atol=atol * np.abs(want).max())
    return model


def packed(model):
    from polyquant.hf import PackedLinear

    return [module for module in model.modules() if isinstance(module, PackedLinear)]


# ---------------------------------------------------------------- formats


@pytest.mark.parametrize("file", sorted(p for p in MODELS.rglob("*.gguf")), ids=lambda p: p.name)
def test_gguf_files(file):
    model = agree(file)
    assert bool(packed(model)) == ("f16" not in file.name)
    assert "packed" not in dict(model.named_parameters())


@pytest.mark.parametrize("codec", ["i2_s.x86", "tq2_0"])
def test_ternary_files_of_bitnet(tmp_path, codec):
    pq.convert(MODELS / "tiny-bitnet" / "hf", tmp_path / "m.gguf", to="gguf", codec=codec)
    assert len(packed(agree(tmp_path / "m.gguf"))) > 10
    want = ours(tmp_path / "m.gguf", "int8")
    miss = np.abs(logits(load(tmp_path / "m.gguf", activations="int8")) - want).max(-1)
    # An input on the edge between two codes may round to the other one, and changes all tokens after it.
    assert np.median(miss) < 2e-5 * np.abs(want).max() and miss.max() < 0.05 * np.abs(want).max()


def test_bitnet_masters_become_ternary_as_in_our_runtime():
    model = agree(MODELS / "tiny-bitnet" / "hf")
    assert {linear.weight.weight().codec.name for linear in packed(model)} <= {"i2_s.x86", "i2_s.x4"}


def folder(path, pack, quantization):
    """A copy of the tiny llama whose layers are packed by `pack(name, weight) -> tensors`."""
    shutil.copytree(LLAMA / "hf", path, copy_function=shutil.copyfile)
    out = {}
    for file in path.glob("*.safetensors"):
        for name, weight in load_file(file).items():
            layer = "_proj.weight" in name
            out |= pack(name.removesuffix(".weight"), weight.astype(np.float32)) if layer else {name: weight}
        file.unlink()
    save_file({k: np.ascontiguousarray(v) for k, v in out.items()}, path / "model.safetensors")
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return path


def levels(weight, bits=4, group=32):
    """Unsigned codes, zeros and scales of the usual min-max quantization."""
    blocks = weight.reshape(len(weight), -1, group)
    low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
    scales = ((high - low) / (2**bits - 1)).astype(np.float16).astype(np.float32)
    zeros = np.clip(np.round(-low / scales), 0, 2**bits - 1).astype(int)
    codes = np.clip(np.round(blocks / scales[..., None]) + zeros[..., None], 0, 2**bits - 1).astype(int)
    return codes.reshape(weight.shape), zeros, scales


def as_gptq(name, weight):
    return {f"{name}.{part}": a for part, a in packers.gptq(*levels(weight), 4, v2=True).items()}


def as_awq(name, weight):
    return {f"{name}.{part}": a for part, a in packers.awq(*levels(weight)).items()}


def as_compressed(name, weight):
    scales = np.abs(weight.reshape(len(weight), -1, 32)).max(-1) / 7
    codes = np.clip(np.round(weight.reshape(len(weight), -1, 32) / scales[..., None]), -8, 7).reshape(weight.shape)
    return {f"{name}.{part}": a for part, a in packers.compressed(codes.astype(np.int8), scales, 4).items()}


def as_fp8(name, weight):
    import ml_dtypes

    n, k = weight.shape
    scales = np.abs(weight.reshape(n // 128, 128, k // 128, 128)).max((1, 3)) / 448
    codes = (weight / np.kron(scales, np.ones((128, 128)))).astype(ml_dtypes.float8_e4m3fn)
    return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scales.astype(np.float32)}


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}}
QUANTIZED = {
    "gptq": (as_gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False,
                       "checkpoint_format": "gptq_v2"}),
    "awq": (as_awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "compressed": (as_compressed, {"quant_method": "compressed-tensors", "format": "pack-quantized",
                                   "config_groups": {"group_0": GROUP}}),
    "fp8": (as_fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}  # fmt: skip


@pytest.mark.parametrize("method", QUANTIZED)
def test_folders_of_other_tools(tmp_path, method):
    pack, quantization = QUANTIZED[method]
    path = folder(tmp_path / "m", pack, quantization)
    assert len(packed(agree(path))) == 14


SLIM_FOLDERS = sorted(p.parent for p in SLIM.glob("v?/*/*/config.json"))
OLD_SLIM = sorted(p for p in (SLIM / "v0" / "fp16").iterdir() if "c8" not in p.name)


@pytest.mark.parametrize("path", SLIM_FOLDERS, ids=lambda p: p.name)
@pytest.mark.parametrize("activations", ["float", "int8"])
def test_genuine_msmodelslim_folders(path, activations, caplog):
    with caplog.at_level(logging.WARNING, "polyquant"):
        assert packed(agree(path, activations=activations))
    assert ("scales of the int8 cache are not used" in caplog.text) == ("c8" in path.name)


@pytest.mark.parametrize("path", OLD_SLIM, ids=lambda p: p.name)
def test_genuine_folders_of_the_older_tool(tmp_path, path):
    shutil.copytree(path, tmp_path / "m", copy_function=shutil.copyfile)
    shutil.copyfile(SLIM / "models" / "qwen2_fp16" / "config.json", tmp_path / "m" / "config.json")
    assert packed(agree(tmp_path / "m", activations="int8"))


@pytest.mark.parametrize("codec", ["w8a16", "w8a8.dynamic"])
def test_msmodelslim_folders_of_ours(tmp_path, codec):
    pq.quantize(SLIM / "models" / "qwen3_bf16", tmp_path / "m", to="msmodelslim", codec=codec)
    assert len(packed(agree(tmp_path / "m"))) >= 14


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_trellis_folders(tmp_path, bits):
    pq.quantize(LLAMA / "hf", tmp_path / "v3", to="trellis-v3", bits=bits, effort="fast")
    assert len(packed(agree(tmp_path / "v3"))) == 14


# ---------------------------------------------------------------- architectures

KEPT_AS_FLOATS = {"deepseek_v2": 26, "llama4": 4, "nemotron_h": 24, "qwen3_5_moe": 3}
SHOWN = [
    "bloom", "cohere2", "deepseek_v2", "falcon", "falcon_h1", "gemma3_text", "gemma4", "glm4_moe", "gpt2", "gpt_oss",
    "granitemoehybrid", "lfm2_moe", "llama4", "mamba2", "mixtral", "nemotron", "nemotron_h", "phi3", "qwen2_moe",
    "qwen3", "qwen3_5_moe", "qwen3_next", "stablelm", "starcoder2",
]  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_architectures(tmp_path, name, caplog):
    pq.quantize(ARCHITECTURES / name, tmp_path / "m.gguf", to="gguf", codec="q8_0")
    with caplog.at_level(logging.WARNING, "polyquant"):
        agree(tmp_path / "m.gguf", attn_implementation="eager")
    said = [r.getMessage() for r in caplog.records if "were dequantized" in r.getMessage()]
    kept = KEPT_AS_FLOATS.get(name)
    assert len(said) == (kept is not None) and (not said or said[0].startswith(f"{kept} quantized tensors"))


def test_the_packed_folder_of_gpt_oss():
    from polyquant.integrations.transformers.experts import StackedExperts

    model = agree(ARCHITECTURES / "gpt_oss_mxfp4", attn_implementation="eager")
    experts = [m for m in model.modules() if isinstance(m, StackedExperts)]
    assert len(experts) == model.config.num_hidden_layers and "hf_mxfp4" in repr(experts[0])
    assert {name for name, _ in experts[0].named_parameters()} == {"gate_up_proj_bias", "down_proj_bias"}
    plain = load(ARCHITECTURES / "gpt_oss_mxfp4", attn_implementation="eager", dequantize=True)
    np.testing.assert_allclose(logits(plain), logits(model), atol=1e-4)


def test_packed_experts_have_no_float_copy(tmp_path):
    from polyquant.integrations.transformers.experts import StackedExperts

    pq.quantize(ARCHITECTURES / "mixtral", tmp_path / "m.gguf", to="gguf", codec="q8_0")
    model = load(tmp_path / "m.gguf")
    experts = [m for m in model.modules() if isinstance(m, StackedExperts)]
    assert len(experts) == model.config.num_hidden_layers and not list(experts[0].parameters())
    np.testing.assert_array_equal(logits(copy.deepcopy(model)), logits(model))
    with pytest.raises(UnsupportedError, match="packed experts have no gradients"):
        model(inputs_embeds=model.get_input_embeddings()(model.dummy_inputs["input_ids"]).requires_grad_())


def test_encoders(tmp_path):
    import torch
    import transformers

    pq.quantize(ARCHITECTURES / "modernbert", tmp_path / "m.gguf", to="gguf", codec="q8_0")
    model = load(tmp_path / "m.gguf", auto_class=transformers.AutoModel)
    with torch.no_grad():
        states = model(torch.tensor([TOKENS])).last_hidden_state[0].numpy()
    want = pq.load(tmp_path / "m.gguf", activations="float").states(TOKENS)
    np.testing.assert_allclose(states, want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_a_model_that_transformers_lacks(tmp_path):
    pq.quantize(ARCHITECTURES / "internlm2", tmp_path / "m.gguf", to="gguf", codec="q8_0")
    with pytest.raises(UnsupportedError, match=r"has model type `internlm2`.*polyquant run and polyquant.load"):
        load(tmp_path / "m.gguf")


# ---------------------------------------------------------------- strict loading

Q4 = LLAMA / "tiny-llama-untied-Q4_K_M.gguf"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight: a tensor required by the model is missing"),
        (lambda t: t.update({"model.extra.weight": np.ones((2, 2), np.float32)}),
         "model.extra.weight: the checkpoint has a tensor that LlamaForCausalLM does not have"),
        (lambda t: t.update({"model.norm.weight": np.ones(3, np.float32)}),
         r"model.norm.weight: a tensor does not fit the model \(expected \[256\], found \[3\]\)"),
    ],
)  # fmt: skip
def test_tensors_must_match(tmp_path, change, message):
    pack, quantization = QUANTIZED["gptq"]
    path = folder(tmp_path / "m", pack, quantization)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(InputError, match=message) as caught:
        load(path)
    assert "nothing was loaded" in str(caught.value)


def test_codes_without_scales_are_refused(tmp_path):
    def codes(name, weight):
        return {f"{name}.weight": np.sign(weight).astype(np.int8)}

    path = folder(tmp_path / "m", codes, None)
    with pytest.raises(UnsupportedError, match="unsupported quantization scheme: integers, I8"):
        load(path)


def test_a_lone_file_of_weights_is_refused():
    with pytest.raises(InputError, match=r"local folder with a config.json"):
        load(LLAMA / "hf" / "model.safetensors")


# ---------------------------------------------------------------- where it runs


def test_auto_says_where_it_runs(caplog):
    with caplog.at_level(logging.WARNING, "polyquant"):
        model = load(Q4, device_map="auto")
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith("device_map='auto': the model runs on the CPU") and "16 packed weights" in line
    assert model.hf_device_map == {"": "cpu"}
    with pytest.raises(UnsupportedError, match=r"packed weights run on the CPU.*found cuda:0"):
        load(Q4, device_map={"": "cuda:0"})


def test_other_devices_are_refused_later_too():
    import torch

    model = load(Q4)
    with pytest.raises(UnsupportedError, match=r"packed weights run on the CPU"):
        packed(model)[0].weight._apply(lambda _: _Elsewhere())
    model.to(torch.bfloat16)
    assert packed(model)[0].weight.weight().codec.name in ("q4_k", "q6_k")


class _Elsewhere:
    """A tensor on another device, as `to("cuda")` returns it."""

    def __init__(self):
        import torch

        self.device, self.dtype = torch.device("cuda"), torch.float32


# ---------------------------------------------------------------- use


def test_generation_and_tokenizer():
    from polyquant.analysis.demo import demo_model
    from polyquant.hf import load_tokenizer

    path = demo_model("llama")
    model, tokenizer = load(path), load_tokenizer(path)
    prompt = tokenizer("the quick brown", return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert out.shape[1] == prompt["input_ids"].shape[1] + 8 and tokenizer.decode(out[0])


def test_a_gguf_file_has_its_tokenizer(tmp_path):
    from polyquant.analysis.demo import demo_model
    from polyquant.hf import load_tokenizer

    pq.convert(demo_model("llama"), tmp_path / "m.gguf", to="gguf", codec="q8_0")
    text = "Packed weights: 3.5 bits?"
    want = pq.load(tmp_path / "m.gguf").tokenizer.encode(text)
    assert load_tokenizer(tmp_path / "m.gguf")(text)["input_ids"] == list(want)


def test_weights_stay_in_the_file():
    model = load(Q4)
    linear = packed(model)[-1]
    stored = pq.open(Q4)["output.weight"]
    assert linear.weight.weight().nbytes == stored.nbytes
    assert sum(p.numel() for p in model.parameters()) < 10_000  # norms
    assert "q6_k" in repr(linear) or "q4_k" in repr(linear)


def test_gradients_of_activations_and_copies():
    import torch

    model = load(Q4)
    embedded = model.get_input_embeddings()(torch.tensor([TOKENS])).requires_grad_()
    model(inputs_embeds=embedded).logits.sum().backward()
    plain = load(Q4, dequantize=True)
    other = embedded.detach().clone().requires_grad_()
    plain(inputs_embeds=other).logits.sum().backward()
    np.testing.assert_allclose(embedded.grad.numpy(), other.grad.numpy(), atol=1e-3 * float(other.grad.abs().max()))
    np.testing.assert_array_equal(logits(copy.deepcopy(model)), logits(model))


def test_dequantized_and_saved(tmp_path):
    import transformers

    plain = load(Q4, dequantize=True)
    np.testing.assert_allclose(logits(plain), logits(load(Q4)), atol=1e-4)
    plain.save_pretrained(tmp_path / "plain")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    np.testing.assert_array_equal(logits(again), logits(plain))
    with pytest.raises(UnsupportedError, match=r"cannot save packed weights.*polyquant convert"):
        load(Q4).save_pretrained(tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_wrong_ids_and_options():
    import torch

    model = load(Q4)
    with pytest.raises(IndexError, match="expected 0 to 511, found 512 to 512"):
        model(torch.tensor([[512]]))
    with pytest.raises(UnsupportedError, match="expected float or int8, found fast"):
        load(Q4, activations="fast")
