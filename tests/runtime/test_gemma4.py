"""Gemma 4 against transformers in variants without a golden model.

Per-layer inputs, shared keys and values, wide feed-forward parts.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

import polyquant
from architectures.golden_models import Golden
from polyquant.calibration.sensitivity import Probe
from polyquant.calibration.stages import DecoderStages, calibration_stages
from polyquant.errors import InputError, UnsupportedError
from polyquant.opening import open_checkpoint
from polyquant.runtime.load import load

LOCAL, FULL = "sliding_attention", "full_attention"
SIZES = {
    "vocab_size": 96, "vocab_size_per_layer_input": 96, "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "max_position_embeddings": 512,
    "sliding_window": 6,
    "num_hidden_layers": 6, "layer_types": [LOCAL, FULL, LOCAL, LOCAL, LOCAL, FULL], "hidden_size_per_layer_input": 0,
    "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
SHARED = {"num_kv_shared_layers": 3, "use_double_wide_mlp": True}
VARIANTS = {
    "inputs of each layer": {"hidden_size_per_layer_input": 8},
    "shared keys and values": SHARED,
    "as E2B": {"hidden_size_per_layer_input": 8, **SHARED, "final_logit_softcapping": 30.0},
    "values are keys": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "experts and inputs": {
        "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32,
        "hidden_size_per_layer_input": 8,
    },
    "no experts, one kind": {"layer_types": [FULL] * 6, "global_head_dim": 32},
}  # fmt: skip
TOKENS = [3 + (17 * i * i + 29 * i) % 93 for i in range(40)]


def _relative(found, wanted):
    return float(np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2)))


@pytest.fixture(params=VARIANTS, ids=lambda name: name.replace(" ", "-"))
def made(request, tmp_path):
    """(folder, logits of transformers): random numbers in every tensor."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("transformers is too old")
    torch.set_num_threads(1)
    config = transformers.Gemma4TextConfig(**{**SIZES, **VARIANTS[request.param]})
    rng = np.random.default_rng(5)
    model = transformers.Gemma4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, values in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("inv_freq", "embed_scale")):
                continue
            spread = torch.from_numpy(rng.standard_normal(tuple(values.shape), np.float32))
            vector = values.ndim == 1 or name.endswith("norm.weight")
            values.copy_(1 + 0.2 * spread if vector else 0.15 * spread)
        logits = model(torch.tensor([TOKENS]), output_hidden_states=True).logits[0].numpy()
    model.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf", logits


@pytest.mark.slow
def test_every_variant_equals_transformers(made, tmp_path):
    folder, wanted = made
    gguf, back = tmp_path / "model.gguf", tmp_path / "back"
    polyquant.convert(folder, gguf, to="gguf", codec="f32")
    polyquant.convert(gguf, back, to="hf", codec="f32")
    assert set(open_checkpoint(back)) == set(open_checkpoint(folder))
    for path in (folder, gguf, back):
        model = load(path, activations="float")
        assert not [n for n in model.checkpoint.notes if "not use" in n]
        assert _relative(model.logits(TOKENS), wanted) < 1e-4, path.name
        session = model.session()
        session.feed(TOKENS[:13])
        stepped = [session.feed([t]) for t in TOKENS[13:]]
        assert session.cache.step is not None or not _native()
        assert _relative(np.array(stepped), wanted[13:]) < 1e-4, path.name


@pytest.mark.slow
def test_int8_caches_give_equal_results_token_by_token(made, engine):
    folder, wanted = made
    model = load(folder, activations="float", cache="int8")
    together = model.logits(TOKENS)
    session = model.session()
    apart = np.array([session.feed([t]) for t in TOKENS])
    assert _relative(apart, together) < 1e-3  # a different order of summation rounds some values differently
    assert _relative(together, wanted) < 0.1


@pytest.mark.slow
def test_single_layers_equal_the_whole_model(made, tmp_path):
    """Calibration computes layer after layer, each with an empty cache."""
    model = load(made[0], activations="float")
    (tmp_path / "samples.json").write_text(json.dumps([TOKENS, TOKENS[::-1]]), encoding="utf-8")
    stages = calibration_stages(made[0], tmp_path / "samples.json")
    for index, names in enumerate(stages.names):
        assert set(stages.run(index, frozenset(names), lambda _: None)) == set(names)
    probe = Probe(model, [np.asarray(TOKENS)])
    for index in range(len(model.decoder.layers)):
        assert probe.divergence(index) < 1e-6
        probe.advance(index)
    whole = model.states(TOKENS)
    np.testing.assert_allclose(model.decoder.norm(probe.states[0]), whole, rtol=0, atol=1e-4)
    assert isinstance(stages, DecoderStages)


def _native():
    from polyquant.ops import native

    return native.lib() is not None


def test_a_layer_with_shared_keys_and_values_stores_one():
    layers = load(Golden("gemma4").folder, activations="float").decoder.layers
    assert [len(layer.attention.qkv.weights) for layer in layers] == [3, 3, 3, 3, 3, 2]
    assert [layer.state_spec.rows for layer in layers] == [(2, 16)] * 5 + [(1, 32)]


def test_a_different_model_is_refused(tmp_path):
    golden = Golden("gemma4")
    for entry, error in (({"use_bidirectional_attention": "all"}, UnsupportedError),
        ({"num_kv_shared_layers": 6}, InputError)):  # fmt: skip
        folder = tmp_path / next(iter(entry))
        folder.mkdir()
        for path in golden.folder.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        (folder / "config.json").write_text(json.dumps({**golden.config, **entry}), encoding="utf-8")
        with pytest.raises(error):
            load(folder)
