"""Rotary positions by their definitions, and parameters that cannot be right."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest

import polyquant as pq
from golden import VECTORS, arrays
from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.rope import scaling_metadata
from polyquant.errors import InputError, PolyquantError
from polyquant.ops.decoder import rotate
from polyquant.runtime.load import load
from polyquant.runtime.rotary import Rotary, rotaries, rotary

MODELS = VECTORS / "runtime"
CONFIG = {
    "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
METADATA = {
    "a.embedding_length": 32, "a.attention.head_count": 2, "a.block_count": 1, "a.feed_forward_length": 8,
    "a.context_length": 64,
}  # fmt: skip


def turns(**config):
    return rotary(USUAL.read_config({**CONFIG, **config}, vocab=4), interleaved=False)


def scaled(**rope):
    return turns(rope_parameters={"rope_theta": 100.0, **rope})


def test_growing_amplitude():
    """Llama 4's queries of layers without positions: transformers' floor((p + 1) / floor_scale)."""
    found = Rotary(np.zeros(3), 1.0, True, growth=0.5, floor=4)
    cos, sin = found.angles(2, 7)
    np.testing.assert_allclose(cos[:, 0], [1 + 0.5 * math.log1p((p + 1) // 4) for p in range(2, 9)], rtol=1e-6)
    np.testing.assert_array_equal(cos, cos[:, :1].repeat(3, 1))
    assert not sin.any()


def test_plain_frequencies():
    np.testing.assert_allclose(turns(rope_theta=100.0).frequencies, [100 ** (-i / 8) for i in range(8)], rtol=1e-12)


def test_linear_stretches_every_position():
    np.testing.assert_array_equal(
        scaled(rope_type="linear", factor=4.0).frequencies, scaled(rope_type="default").frequencies / 4
    )


def test_yarn_keeps_high_and_stretches_low_frequencies():
    plain = scaled(rope_type="default").frequencies
    yarn = scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=5.0)
    ratio = plain / yarn.frequencies
    assert ratio[0] == 1 and math.isclose(ratio[-1], 4) and (np.diff(ratio) >= -1e-12).all()
    assert math.isclose(yarn.amplitude, 0.1 * math.log(4) + 1)
    assert scaled(rope_type="yarn", factor=4.0, attention_factor=1.5).amplitude == 1.5


def test_half_a_head_rotates_in_pairs():
    hyper = USUAL.read_config({**CONFIG, "partial_rotary_factor": 0.5}, vocab=4)
    cos, sin = rotary(hyper, interleaved=True).angles(3, 1)
    assert cos.shape == (1, 4)
    x = np.arange(16, dtype=np.float32).reshape(1, 1, 16)
    y = rotate(x, cos, sin, interleaved=True)
    np.testing.assert_array_equal(y[..., 8:], x[..., 8:])
    np.testing.assert_allclose(y[0, 0, 2], 2 * cos[0, 1] - 3 * sin[0, 1], rtol=1e-6)
    np.testing.assert_allclose(y[0, 0, 3], 2 * sin[0, 1] + 3 * cos[0, 1], rtol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_gguf_agrees(kind):
    said = {"a.rope.scaling.type": kind, "a.rope.scaling.factor": 4.0, "a.rope.freq_base": 100.0}
    if kind == "yarn":
        said |= {"a.rope.scaling.original_context_length": 16, "a.rope.scaling.yarn_beta_slow": 0.5}
    hyper = USUAL.read_metadata({**METADATA, **said}, "a", vocab=4, tied=True)
    more = {"original_max_position_embeddings": 16, "beta_slow": 0.5} if kind == "yarn" else {}
    expected = scaled(rope_type=kind, factor=4.0, **more)
    found = rotary(hyper, interleaved=False)
    np.testing.assert_array_equal(found.frequencies, expected.frequencies)
    assert found.amplitude == expected.amplitude


def test_old_gguf_files_store_linear_scaling_in_one_key():
    hyper = USUAL.read_metadata(
        {**METADATA, "a.rope.scale_linear": 4.0, "a.rope.freq_base": 100.0}, "a", vocab=4, tied=True
    )
    expected = scaled(rope_type="linear", factor=4.0).frequencies
    np.testing.assert_array_equal(rotary(hyper, interleaved=False).frequencies, expected)


@pytest.mark.parametrize(
    "name, old", [("llama-linear", "linear"), ("llama-llama3-tied", "llama3"), ("llama-yarn", "yarn")]
)
def test_config_keys_before_transformers_5(name, old, tmp_path):
    shutil.copytree(MODELS / name, tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    rope = config.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    assert rope.pop("rope_type") == old
    (tmp_path / "m/config.json").write_text(
        json.dumps({**config, "rope_theta": theta, "rope_scaling": {**rope, "type": old}})
    )
    z = arrays(f"runtime/{name}/logits.npz")
    np.testing.assert_allclose(pq.load(tmp_path / "m").logits(z["tokens"]), z["logits"], rtol=0, atol=1e-4)


BAD = {
    "theta zero": {"rope_theta": 0},
    "theta negative": {"rope_theta": -1.0},
    "theta NaN": {"rope_theta": math.nan},
    "theta text": {"rope_theta": "10000"},
    "factor missing": {"rope_scaling": {"rope_type": "linear"}},
    "factor zero": {"rope_scaling": {"rope_type": "linear", "factor": 0}},
    "factor negative": {"rope_scaling": {"rope_type": "yarn", "factor": -2}},
    "factor text": {"rope_scaling": {"rope_type": "yarn", "factor": "2"}},
    "factor true": {"rope_scaling": {"rope_type": "linear", "factor": True}},
    "yarn on nothing": {"rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 0}},
    "yarn with theta 1": {"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 2}},
    "yarn betas": {"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": "x"}},
    "llama3 upside down": {"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4,
            "high_freq_factor": 1}},
    "unknown kind": {"rope_scaling": {"rope_type": "longrope", "factor": 2}},
    "kind no text": {"rope_scaling": {"rope_type": 3}},
    "share of a head": {"partial_rotary_factor": 7},
    "no share of a head": {"partial_rotary_factor": 0},
    "odd share": {"partial_rotary_factor": 0.2},
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_invalid_parameters(name):
    with pytest.raises(PolyquantError) as e:
        turns(**BAD[name])
    assert "\n" not in str(e.value)


def test_invalid_divisors():
    hyper = USUAL.read_config(CONFIG, vocab=4)
    for bad in (0.0, math.nan, -1.0):
        with pytest.raises(InputError):
            rotary(hyper, interleaved=False, divisors=np.full(8, bad, np.float32))


def test_the_keys_of_yarn_that_gguf_lacks_are_named():
    def said(**more):
        rope = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, **more}
        return scaling_metadata(USUAL.read_config({**CONFIG, "rope_parameters": rope}, vocab=4))

    keys, warning = said(mscale=0.7, truncate=False)
    assert keys["rope.scaling.factor"].value == 4.0
    assert warning is not None and "mscale, truncate" in warning
    assert said()[1] is None


LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5] * 4,
    "long_factor": [2.0, 3.0] * 4,
    "original_max_position_embeddings": 16,
}


def test_longrope_equals_its_definition():
    found = turns(max_position_embeddings=64, rope_scaling=LONG)
    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(found.of(16).frequencies, plain / ([1.0, 1.5] * 4))
    np.testing.assert_allclose(found.of(17).frequencies, plain / ([2.0, 3.0] * 4))
    assert found.of(17).amplitude == found.amplitude == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))
    for wrong in ({"short_factor": None}, {"long_factor": [1.0] * 7}, {"long_factor": [0.0] * 8}):
        with pytest.raises(InputError):
            turns(max_position_embeddings=64, rope_scaling={**LONG, **wrong})


def test_windows_may_have_a_separate_rope_base():
    hyper = replace(
        USUAL.read_config(CONFIG, vocab=4), rope={"rope_type": "linear", "factor": 8.0}, more={"rope_theta_swa": 500.0}
    )
    full, local = rotaries(hyper, interleaved=False)
    np.testing.assert_allclose(full.frequencies, 10000.0 ** (-np.arange(0, 16, 2) / 16) / 8)
    np.testing.assert_allclose(local.frequencies, 500.0 ** (-np.arange(0, 16, 2) / 16))


def test_a_prompt_that_grows_past_the_original_context(tmp_path):
    """Equal to a prompt given at once, and again after truncation."""
    folder = shutil.copytree(VECTORS / "architectures/phi3", tmp_path / "phi3")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"original_max_position_embeddings": 16, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = load(folder, activations="float")
    tokens = np.random.default_rng(0).integers(0, model.vocab, 24).tolist()
    session = model.session()
    for t in range(24):
        np.testing.assert_allclose(session.feed([tokens[t]]), model.session().feed(tokens[: t + 1]), rtol=0, atol=1e-4)
    session.rewind(5)
    np.testing.assert_allclose(session.feed(tokens[5:8]), model.session().feed(tokens[:8]), rtol=0, atol=1e-4)
    assert np.abs(model.logits(tokens)[7] - model.logits(tokens[:8])[7]).max() > 1e-3
