"""Folders converted from GGUF load strictly in transformers, with the logits of the original model."""

from __future__ import annotations

import json

import numpy as np
import pytest

import polyquant
from architectures.golden_models import NAMES, Golden
from polyquant.architectures.find import of_config
from polyquant.runtime.load import load

pytestmark = pytest.mark.slow
ON_THE_HUB = ("baichuan", "internlm2", "minicpm")
"""Their code is not in transformers."""
KNOWN = [n for n in NAMES if of_config(Golden(n).config) is not None and n not in ON_THE_HUB]
COMES_BACK_AS = {"mistral": "LlamaForCausalLM"}
"""GGUF has one name for both."""
COMPLAINTS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


@pytest.fixture
def torch():
    found = pytest.importorskip("torch")
    found.set_num_threads(1)
    return found


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("name", KNOWN)
def test_transformers_loads_round_tripped_folders(name, tmp_path, torch, transformers):
    golden, gguf, back = Golden(name), tmp_path / "model.gguf", tmp_path / "back"
    polyquant.convert(golden.folder, gguf, to="gguf", codec="f32")
    polyquant.convert(gguf, back, to="hf", codec="f32")
    wanted = golden.logits()
    encoder = "hf_hidden" in wanted
    kind = transformers.AutoModel if encoder else transformers.AutoModelForCausalLM
    # GGUF has no pooler, and BertModel creates one by default.
    more = {"add_pooling_layer": False} if golden.config["model_type"] == "bert" else {}
    model, info = kind.from_pretrained(
        back, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, local_files_only=True, **more
    )
    assert {k: sorted(map(str, info[k])) for k in COMPLAINTS if info.get(k)} == {}
    assert type(model).__name__ == COMES_BACK_AS.get(name, golden.config["architectures"][0])
    with torch.no_grad():
        out = model.eval()(torch.from_numpy(wanted["tokens"].astype(np.int64))[None])
    found = (out.last_hidden_state if encoder else out.logits)[0].numpy()
    expected = wanted["hf_hidden" if encoder else "hf_torch"]
    error = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
    assert error < 1e-4, error


SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "tie_word_embeddings": False,
}
DELTA = {
    "head_dim": 32, "num_key_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6,
}  # fmt: skip
MAMBA = {"mamba_d_head": 16, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "num_key_value_heads": 2}
OTHERS = {
    "nomic_bert": ("NomicBertModel", {"intermediate_size": 96, "max_position_embeddings": 64}),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", {"intermediate_size": 96, **DELTA}),
    "nemotron_h": (
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "intermediate_size": 96,
            "head_dim": 32, "num_key_value_heads": 2,
            "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16,
        },
    ),
    "nemotron_h, experts after a narrow matrix": (
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "intermediate_size": 96,
            "head_dim": 32, "num_key_value_heads": 2,
            "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16,
            "moe_intermediate_size": 48, "moe_latent_size": 32,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
            "moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 1.5,
        },
    ),
    "granitemoehybrid, rotated": (
        "GraniteMoeHybridForCausalLM",
        {
            "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4, "num_experts_per_tok": 2,
            "shared_intermediate_size": 96, "intermediate_size": 48,
            "position_embedding_type": "rope", **MAMBA,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0, "shared_intermediate_size": 96,
            "intermediate_size": 96,
            "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
            "attention_multiplier": 0.25, **MAMBA,
        },
    ),
    "mamba2": ("Mamba2ForCausalLM",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 4, "use_conv_bias": False}),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        {
            "mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "head_dim": 16,
            "intermediate_size": 96, "key_multiplier": 0.5,
            "ssm_multipliers": [0.5, 2.0, 0.25, 1.5, 1.0], "lm_head_multiplier": 0.125, **MAMBA,
        },
    ),
    "lfm2": ("Lfm2ForCausalLM",
        {"full_attn_idxs": [2], "conv_bias": True, "intermediate_size": 96, "num_key_value_heads": 2,
            "block_multiple_of": 32}),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_models_of_transformers_round_trip(kind, tmp_path, torch, transformers):
    """Variants without a golden folder: random transformers models keep their logits in a round trip."""
    name, said = OTHERS[kind]
    torch.manual_seed(7)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**{**SMALL, **said})).float().eval()
    for weights in model.parameters():
        weights.data.copy_(torch.randn(weights.shape) * 0.2 + (1.0 if weights.ndim == 1 else 0.0))
    model.save_pretrained(tmp_path / "hf")
    if kind == "nemotron_h":  # like checkpoints of models without experts: transformers adds its defaults
        config = json.loads((tmp_path / "hf/config.json").read_text())
        (tmp_path / "hf/config.json").write_text(json.dumps({k: v for k, v in config.items() if "expert" not in k}))
    polyquant.convert(tmp_path / "hf", tmp_path / "model.gguf", to="gguf", codec="f32")
    polyquant.convert(tmp_path / "model.gguf", tmp_path / "back", to="hf", codec="f32")
    back, info = cls.from_pretrained(
        tmp_path / "back", dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    assert {k: sorted(map(str, info[k])) for k in COMPLAINTS if info.get(k)} == {}
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 96, (1, 20)))
    with torch.no_grad():
        wanted, found = model(tokens), back.eval()(tokens)
    wanted, found = (x.last_hidden_state if kind == "nomic_bert" else x.logits for x in (wanted, found))
    error = float(torch.sqrt(torch.mean((found - wanted) ** 2) / torch.mean(wanted**2)))
    assert error < 1e-4, error
    expected = wanted[0].numpy()
    for path in (tmp_path / "hf", tmp_path / "model.gguf") if kind != "nomic_bert" else ():
        ours = load(path, activations="float").logits(tokens[0].tolist())
        error = float(np.sqrt(np.mean((ours - expected) ** 2) / np.mean(expected**2)))
        assert error < 1e-4, (path.name, error)


@pytest.mark.parametrize("gate_last", [True, False])
def test_a_norm_before_the_gate(gate_last, tmp_path, torch, transformers):
    """Falcon-H1's, which GGUF cannot store."""
    torch.manual_seed(11)
    cls, said = transformers.FalconH1ForCausalLM, OTHERS["falcon_h1"][1]
    model = cls(cls.config_class(**{**SMALL, **said, "mamba_norm_before_gate": gate_last})).float().eval()
    for weights in model.parameters():
        weights.data.copy_(torch.randn(weights.shape) * 0.2 + (1.0 if weights.ndim == 1 else 0.0))
    model.save_pretrained(tmp_path / "hf")
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 96, (1, 20)))
    with torch.no_grad():
        wanted = model(tokens).logits[0].numpy()
    found = load(tmp_path / "hf", activations="float").logits(tokens[0].tolist())
    error = np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2))
    assert error < 1e-4, error
