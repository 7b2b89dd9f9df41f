"""Trellis folders in transformers: packed weights, the same logits, no random ones. Needs torch: `make check-slow`."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import polyquant as pq
from polyquant.errors import InputError, UnsupportedError

VECTORS = Path(__file__).parents[1] / "vectors" / "trellis"
PATHS = os.pathsep.join(str(Path(p).resolve()) for p in sys.path)
needs_torch = pytest.mark.skipif(
    find_spec("torch") is None or find_spec("transformers") is None,
    reason="torch or transformers is not installed: pip install 'polyquant[transformers]'",
)
pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
LAYER = "model.layers.0.mlp.up_proj.weight"


# ---------------------------------------------------------------- without torch


@pytest.mark.parametrize("line", ["import polyquant.hf", "from polyquant.hf_adapter import load_trellis_model"])
def test_without_torch_the_error_names_the_package(tmp_path, line):
    (tmp_path / "torch.py").write_text("raise ImportError('No module named torch')")
    done = subprocess.run(
        [sys.executable, "-c", line],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{PATHS}"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "UnsupportedError" in last and "pip install 'polyquant[transformers]'" in last


# ---------------------------------------------------------------- a tiny model


def make(folder, *, tied=False, dtype="float32", kind="llama", wide=False, codec="trellis.4.mul1.8", rules=()):
    """A quantized random model, and its dequantized floats."""
    import torch
    import transformers

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
    }
    if wide:  # multiples of 128 everywhere
        sizes |= {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4, "num_hidden_layers": 1}
    torch.manual_seed(0)
    if kind == "mixtral":
        config = transformers.MixtralConfig(**sizes, num_local_experts=3)
        model = transformers.MixtralForCausalLM(config)
    elif kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            **sizes, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16
        )
        model = transformers.Qwen3MoeForCausalLM(config)
    else:
        config = transformers.LlamaConfig(**sizes, tie_word_embeddings=tied, attention_bias=True)
        model = transformers.LlamaForCausalLM(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder / "float")
    pq.quantize(folder / "float", folder / "v3", to="trellis-v3", codec=codec, rules=rules)
    pq.convert(folder / "v3", folder / "plain", to="hf", codec="f32")
    return folder / "v3"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def broken(model, tmp_path):
    """A function that rewrites the tensors of a copy."""
    from safetensors.numpy import load_file, save_file

    def rewrite(change):
        folder = shutil.copytree(model, tmp_path / "broken")
        (shard,) = folder.glob("model-*.safetensors")
        tensors = dict(load_file(shard))
        change(tensors)
        save_file(tensors, shard, metadata={"format": "pt"})
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"] = dict.fromkeys(tensors, shard.name)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    return rewrite


def auto(folder, **options):
    import transformers

    import polyquant.hf  # noqa: F401 - registers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def logits(model):
    import torch

    with torch.no_grad():
        return model(torch.arange(1, 20)[None]).logits.float().numpy()


def linear(model):
    return model.get_submodule(LAYER.removesuffix(".weight"))


# ---------------------------------------------------------------- supported


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize(("tied", "dtype"),
    [(False, "float32"), (True, "float32"), (True, "bfloat16"), (False, "float16")])  # fmt: skip
def test_logits_equal_the_dequantized_folder(tmp_path, tied, dtype):
    import torch

    from polyquant.hf import TrellisLinear

    folder = make(tmp_path, tied=tied, dtype=dtype)
    packed = auto(folder)
    assert isinstance(linear(packed), TrellisLinear) and packed.dtype == getattr(torch, dtype)
    assert linear(packed).weight.scales.dtype == torch.float32 and linear(packed).weight.indices.dtype == torch.uint8
    floats = auto(folder.parent / "plain", dtype=getattr(torch, dtype))
    np.testing.assert_allclose(logits(packed), logits(floats), atol=1e-4 if dtype == "float32" else 0.02)


@needs_torch
@pytest.mark.slow
def test_the_demo_model_at_four_bits(tmp_path):
    import torch

    from polyquant.analysis.demo import demo_model
    from polyquant.hf_adapter import load_trellis_model

    pq.quantize(demo_model("llama"), tmp_path / "v3", to="trellis-v3", bits=4, effort="fast")
    pq.convert(tmp_path / "v3", tmp_path / "plain", to="hf", codec="f32")
    packed = load_trellis_model(tmp_path / "v3", torch_dtype=torch.float32, device_map="auto")
    floats = auto(tmp_path / "plain", dtype=torch.float32)
    np.testing.assert_allclose(logits(packed), logits(floats), atol=1e-4)
    prompt = torch.arange(10, 20)[None]
    answers = [m.generate(prompt, max_new_tokens=12, do_sample=False).tolist() for m in (packed, floats)]
    assert answers[0] == answers[1] and len(answers[0][0]) == 22


@needs_torch
@pytest.mark.slow
def test_int8_activations_are_close(model):
    from polyquant.hf import TrellisConfig

    exact, rounded = (logits(auto(model, quantization_config=TrellisConfig(activations=a))) for a in ("float", "int8"))
    assert 0 < np.abs(exact - rounded).max() < 0.05 * np.abs(exact).max()


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("way", ["auto", "adapter"])
def test_dequantized_on_load(model, tmp_path, way):
    import torch

    from polyquant.hf import TrellisConfig, load_trellis_model

    if way == "auto":
        found = auto(model, quantization_config=TrellisConfig(dequantize=True))
    else:
        found = load_trellis_model(model, dequantize=True)
    assert type(linear(found)) is torch.nn.Linear
    want = auto(model.parent / "plain").state_dict()
    assert all(torch.equal(t, want[name]) for name, t in found.state_dict().items())
    found.save_pretrained(tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    np.testing.assert_array_equal(logits(auto(tmp_path / "out")), logits(found))


@needs_torch
@pytest.mark.slow
def test_dequantized_later(model):
    import torch

    packed = auto(model)
    before = logits(packed)
    plain = packed.dequantize()
    assert type(linear(plain)) is torch.nn.Linear
    np.testing.assert_allclose(logits(plain), before, atol=1e-4)


@needs_torch
@pytest.mark.slow
def test_saved_and_loaded_again_byte_for_byte(model, tmp_path):
    from safetensors.numpy import load_file

    first = auto(model)
    first.save_pretrained(tmp_path / "out")
    (a,), (b,) = model.glob("model-*.safetensors"), (tmp_path / "out").glob("model-*.safetensors")
    old, new = load_file(a), load_file(b)
    assert old.keys() == new.keys()
    assert all(old[n].dtype == new[n].dtype and old[n].tobytes() == new[n].tobytes() for n in old)
    assert (tmp_path / "out" / "quantization_config.json").read_bytes() == (
        model / "quantization_config.json"
    ).read_bytes()
    assert {f.severity.value for f in pq.validate(tmp_path / "out")} <= {"note"}
    np.testing.assert_array_equal(logits(auto(tmp_path / "out")), logits(first))
    first.save_pretrained(tmp_path / "out", max_shard_size="50KB")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert {f.severity.value for f in pq.validate(tmp_path / "out")} <= {"note"}
    np.testing.assert_array_equal(logits(auto(tmp_path / "out")), logits(first))
    with pytest.raises(UnsupportedError, match="save it, then upload"):
        first.save_pretrained(tmp_path / "hub", push_to_hub=True)
    assert not (tmp_path / "hub").exists()


@needs_torch
@pytest.mark.slow
def test_memory_is_shared_without_casts(model):
    import torch

    packed = auto(model)
    weight = linear(packed).weight
    assert np.shares_memory(weight.weight().parts["indices"], weight.indices.numpy())
    before = logits(packed)
    np.testing.assert_array_equal(logits(copy.deepcopy(packed)), before)
    packed.to(torch.bfloat16)
    assert weight.scales.dtype == torch.float32 and weight.indices.dtype == torch.uint8
    np.testing.assert_allclose(logits(packed), before, atol=0.05)


@needs_torch
@pytest.mark.slow
def test_gradients_of_activations_equal_the_floats(model):
    import torch

    found = []
    for folder in (model, model.parent / "plain"):
        m = auto(folder)
        m.model.embed_tokens.weight.requires_grad_(True)
        m(torch.arange(1, 9)[None], labels=torch.arange(1, 9)[None]).loss.backward()
        found.append(m.model.embed_tokens.weight.grad.numpy())
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    assert np.abs(found[0]).max() > 1e-3


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("folder", ["v2_cuda", "v3_cuda_consolidated", "v3_migrated", "v3_seed_kn"])
def test_dialects_are_converted_in_memory(folder, tmp_path):
    import torch

    from polyquant.hf import TrellisLinear, load_trellis_model

    packed = load_trellis_model(VECTORS / folder, torch_dtype=torch.float32)
    floats = load_trellis_model(VECTORS / folder, torch_dtype=torch.float32, dequantize=True)
    assert isinstance(linear(packed), TrellisLinear) and type(linear(floats)) is torch.nn.Linear
    np.testing.assert_allclose(logits(packed), logits(floats), atol=1e-4)
    with np.load(VECTORS / "expected_v2_cuda_f16.npz") as want:
        assert np.array_equal(linear(floats).weight.detach().numpy(), want[LAYER].astype(np.float32))
    packed.save_pretrained(tmp_path / "v3")
    assert {f.severity.value for f in pq.validate(tmp_path / "v3")} <= {"note"}
    np.testing.assert_array_equal(logits(auto(tmp_path / "v3")), logits(packed))
    again = load_trellis_model(tmp_path / "v3", torch_dtype=torch.float32, dequantize=True, repair=True)
    np.testing.assert_allclose(logits(again), logits(floats), atol=1e-4)


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_stay_packed_and_separate(tmp_path, kind):
    """Two kinds of names: one that transformers only merges, one that it renames too."""
    from polyquant.hf import load_trellis_model

    folder = make(tmp_path, kind=kind, rules=["*.experts.1.*=trellis.3.mul1.8"])
    want = logits(auto(folder.parent / "plain"))
    packed = auto(folder)
    names = set(packed.state_dict())
    assert any(".experts.1." in n and n.endswith(".indices") for n in names) and not any("gate_up" in n for n in names)
    np.testing.assert_allclose(logits(packed), want, atol=1e-4)
    packed.save_pretrained(tmp_path / "out")
    assert set(pq.open(tmp_path / "out")) == set(pq.open(folder))
    np.testing.assert_array_equal(logits(auto(tmp_path / "out")), logits(packed))
    np.testing.assert_allclose(logits(packed.dequantize()), want, atol=1e-4)
    packed.save_pretrained(tmp_path / "floats")
    assert set(pq.open(tmp_path / "floats")) == set(pq.open(folder))
    np.testing.assert_array_equal(logits(load_trellis_model(folder, dequantize=True)), want)


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (["*.experts.1.*=f32"], "some experts are quantized and some are not"),
        (["*embed_tokens*=trellis.4.mul1.8"], r"only weights of torch\.nn\.Linear stay packed.*found Embedding"),
    ],
)
def test_unpackable_layers_can_be_dequantized(tmp_path, rules, words):
    from polyquant.hf import TrellisConfig

    folder = make(tmp_path, kind="mixtral", rules=rules)
    with pytest.raises(UnsupportedError, match=words + r".*dequantize=True"):
        auto(folder)
    found = auto(folder, quantization_config=TrellisConfig(dequantize=True))
    np.testing.assert_array_equal(logits(found), logits(auto(folder.parent / "plain")))


@needs_torch
@pytest.mark.slow
def test_exl3_folders_are_converted_in_memory(tmp_path):
    import torch
    from safetensors.numpy import load_file, save_file

    from polyquant.hf import TrellisLinear, load_trellis_model

    folder = make(tmp_path, wide=True, codec="trellis.2.mul1.16.exl3")
    (shard,) = folder.glob("model-*.safetensors")
    tensors = load_file(shard)
    even = {n: np.full_like(a, a.mean()) if n.endswith(".scales") else a for n, a in tensors.items()}
    save_file(even, shard, metadata={"format": "pt"})
    pq.convert(folder, tmp_path / "exl3", to="hf", codec="exl3.2.mul1", rules=["*embed*=f32", "lm_head*=f32"])
    packed = load_trellis_model(tmp_path / "exl3", torch_dtype=torch.float32)
    floats = load_trellis_model(tmp_path / "exl3", torch_dtype=torch.float32, dequantize=True)
    assert isinstance(linear(packed), TrellisLinear) and type(linear(floats)) is torch.nn.Linear
    assert not hasattr(floats.config, "quantization_config")
    np.testing.assert_allclose(logits(packed), logits(floats), atol=1e-4)
    packed.save_pretrained(tmp_path / "saved")
    np.testing.assert_array_equal(logits(auto(tmp_path / "saved")), logits(packed))


@needs_torch
@pytest.mark.slow
def test_hub_cache_layout(model, tmp_path):
    """Links to blobs, a name instead of a path, and a file that only the plugin requests."""
    from polyquant.hf import load_trellis_model

    root = tmp_path / "models--org--tiny"
    snapshot = root / "snapshots" / ("0" * 40)
    for folder in (snapshot, root / "blobs", root / "refs"):
        folder.mkdir(parents=True)
    (root / "refs" / "main").write_text(snapshot.name)
    for file in model.iterdir():
        shutil.copy(file, root / "blobs" / file.name)
        (snapshot / file.name).symlink_to(root / "blobs" / file.name)
    options = {"cache_dir": tmp_path, "local_files_only": True}
    want = logits(auto(model))
    np.testing.assert_array_equal(logits(auto("org/tiny", **options)), want)
    np.testing.assert_array_equal(logits(load_trellis_model("org/tiny", **options)), want)
    (snapshot / "quantization_config.json").unlink()
    with pytest.raises(InputError, match=r"without their metadata.*finish the download"):
        auto("org/tiny", **options)


# ---------------------------------------------------------------- refused


@needs_torch
@pytest.mark.slow
def test_without_the_plugin_there_are_no_random_weights(model, tmp_path):
    auto(model).save_pretrained(tmp_path / "saved")
    for folder in (model, tmp_path / "saved"):
        done = subprocess.run(
            [sys.executable, "-c",
                f"import transformers; transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})"],
            env=os.environ | {"PYTHONPATH": PATHS}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1 and "import polyquant.hf first" in done.stderr.splitlines()[-1]
    assert "transformers_weights" not in json.loads((model.parent / "plain" / "config.json").read_text())


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("folder", ["v3_seed_kn", "v3_seed_mm_headers", "v3_cuda_consolidated", "v3_migrated"])
def test_folders_of_other_programs_give_no_random_layers(folder):
    """Their config.json does not declare the quantization, so that the plugin is not called."""
    import transformers

    import polyquant.hf

    with pytest.raises(pq.UnsupportedError, match=r"config\.json does not declare.*load_trellis_model"):
        transformers.AutoModelForCausalLM.from_pretrained(VECTORS / folder)
    assert polyquant.hf.load_trellis_model


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight: a tensor required by the model"),
        (lambda t: t.pop("lm_head.weight"), r"lm_head\.weight: a tensor required by the model"),
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.bias"), r"k_proj\.bias: a tensor required by the model"),
        (lambda t: [t.pop(n) for n in list(t) if n.startswith(LAYER)], r"up_proj.*: a tensor required by the model"),
        (lambda t: t.pop(f"{LAYER}.su"), r"up_proj\.weight"),
        (lambda t: t.update({"model.extra.weight": np.ones(3, np.float32)}), r"model\.extra\.weight: .* does not have"),
        (lambda t: t.update({"model.norm.weight": np.ones(3, np.float32)}), r"expected \[64\], found \[3\]"),
    ],
)  # fmt: skip
def test_missing_unexpected_or_misshapen_parts_raise(broken, change, words, dequantize):
    from polyquant.hf import TrellisConfig, load_trellis_model

    folder = broken(change)
    with pytest.raises(InputError, match=words) as caught:
        auto(folder, quantization_config=TrellisConfig(dequantize=dequantize))
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=words):
        load_trellis_model(folder, dequantize=dequantize)


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("dequantize", [False, True])
def test_scales_that_are_not_finite_are_refused(broken, dequantize):
    from polyquant.hf import TrellisConfig

    folder = broken(lambda t: t.update({f"{LAYER}.scales": np.full_like(t[f"{LAYER}.scales"], np.nan)}))
    with pytest.raises(InputError, match=r"up_proj\.weight: scales contains NaN or infinity"):
        auto(folder, quantization_config=TrellisConfig(dequantize=dequantize))


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "mps", {"": "disk"}, {"model": "cpu", "lm_head": "cuda:0"}])
def test_other_devices_are_refused_in_one_line(model, device):
    from polyquant.hf import load_trellis_model

    with pytest.raises(UnsupportedError, match="packed weights run on the CPU") as caught:
        load_trellis_model(model, device_map=device)
    assert "\n" not in str(caught.value)


@needs_torch
@pytest.mark.slow
@pytest.mark.skipif(find_spec("accelerate") is None, reason="transformers takes device_map only with accelerate")
def test_device_maps_with_accelerate(model):
    import torch

    for device_map in ("auto", "cpu", {"": "cpu"}):
        assert linear(auto(model, device_map=device_map)).weight.device == torch.device("cpu")
    with pytest.raises(UnsupportedError, match="packed weights run on the CPU"):
        auto(model, device_map={"": "cuda:0"})


@needs_torch
@pytest.mark.slow
def test_a_float_model_is_not_treated_as_trellis(model):
    from polyquant.hf import TrellisConfig, load_trellis_model

    with pytest.raises(UnsupportedError, match="does not declare trellis-coded weights"):
        auto(model.parent / "float", quantization_config=TrellisConfig())
    with pytest.raises(UnsupportedError, match="no trellis weights in this folder"):
        load_trellis_model(model.parent / "float")
    with pytest.raises(UnsupportedError, match="unknown activations"):
        TrellisConfig(activations="int4")
