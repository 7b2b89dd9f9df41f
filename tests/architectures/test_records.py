"""Every registered architecture fulfils the contract; one from another package works like a built-in one."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from outside_architecture import OUTSIDE
from polyquant import registry
from polyquant.architectures.find import by_name, known, of_config
from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.llama import LLAMA, MISTRAL
from polyquant.architectures.parts import Feed
from polyquant.architectures.qwen import QWEN2, QWEN3
from polyquant.architectures.record import Bias
from polyquant.errors import InputError, PolyquantError, UnknownNameError, UnsupportedError
from polyquant.testing.architectures import (
    check_found,
    check_hyper,
    check_model,
    check_names,
    check_record,
    check_wiring,
    tiny_hyper,
    tiny_model,
)
from polyquant.types import Severity

OURS = list(registry.ARCHITECTURES)


def record_of(name: str):
    return registry.architectures()[OURS.index(name)]


RUN = [name for name in OURS if record_of(name).runs]


@dataclass(frozen=True)
class EntryPoint:
    """Imitates importlib.metadata's entry points."""

    name: str
    found: Any

    def load(self) -> Any:
        return self.found


@pytest.fixture
def outside(monkeypatch):
    """The outside record, as if its package were installed."""
    points = {"outside": EntryPoint("outside", OUTSIDE)}
    monkeypatch.setattr(registry, "_entry_points", lambda group: points if group == "polyquant.architectures" else {})
    monkeypatch.setattr(registry, "_mentions", lambda group: True)
    registry.installed_architectures.cache_clear()
    yield OUTSIDE
    registry.installed_architectures.cache_clear()


@pytest.mark.parametrize("name", OURS)
def test_every_record_fulfils_the_contract(name):
    check_record(record_of(name))


@pytest.mark.parametrize("name", RUN)
def test_tiny_models_fulfil_the_contract(name, tmp_path):
    check_model(record_of(name), tmp_path)


def test_an_external_architecture(outside, tmp_path):
    check_record(outside)
    check_model(outside, tmp_path)


def test_an_external_architecture_is_quantized_and_smoothed(outside, tmp_path):
    source = tiny_model(outside, tmp_path / "hf")
    samples = tmp_path / "samples.json"
    samples.write_text(json.dumps(np.random.default_rng(0).integers(0, 40, (4, 32)).tolist()))
    pq.quantize(source, tmp_path / "q8.gguf", to="gguf", codec="q8_0")
    pq.quantize(source, tmp_path / "ms", to="msmodelslim", codec="w8a8", smooth="m4", calibration=samples)
    exact = pq.load(source).logits([1, 2, 3])
    for path in ("q8.gguf", "ms"):
        assert not [f for f in pq.validate(tmp_path / path) if f.severity is Severity.ERROR]
        found = pq.load(tmp_path / path).logits([1, 2, 3])
        assert np.corrcoef(found.ravel(), exact.ravel())[0, 1] > 0.99
    norm = "decoder.blocks.0.ln_1.weight"
    assert not np.array_equal(pq.open(tmp_path / "ms")[norm].dequantize(), pq.open(source)[norm].dequantize())


def test_without_its_package_it_is_unknown(tmp_path):
    source = tiny_model(OUTSIDE, tmp_path / "hf")
    assert by_name("outside") is None and of_config({"model_type": "outside_model"}) is None
    with pytest.raises(PolyquantError, match="is not supported"):
        pq.load(source)
    with pytest.raises(UnknownNameError):
        pq.plan(source, to="gguf", architecture="outside")


def test_built_in_records_take_precedence(outside, monkeypatch):
    impostor = replace(OUTSIDE, name="llama", reads=("llama",))
    monkeypatch.setattr(registry, "_entry_points", lambda group: {"llama": EntryPoint("llama", impostor)})
    monkeypatch.setattr(registry, "_mentions", lambda group: True)
    registry.installed_architectures.cache_clear()
    assert by_name("llama") is LLAMA and of_config({"model_type": "llama"}) is LLAMA


def test_records_are_selected_by_config_and_metadata():
    assert set(known()) == {record.name for record in registry.architectures()}
    assert of_config({"model_type": "mistral"}) is MISTRAL
    assert of_config({"model_type": "llama", "architectures": ["BitnetForCausalLM"]}) is known()["bitnet"]
    assert of_config({"model_type": "chatglm"}) is None  # the first ChatGLM has a different shape
    for strange in ({}, {"model_type": None}, {"model_type": ["llama"]}, {"architectures": [3, {}], "model_type": 7}):
        assert of_config(strange) is None
    assert by_name(None) is None and by_name(["llama"]) is None


def test_which_linears_have_biases():
    assert QWEN2.has_bias({}, "attn_q") and not QWEN2.has_bias({"attention_bias": True}, "attn_output")
    assert not LLAMA.has_bias({}, "attn_q") and LLAMA.has_bias({"attention_bias": True}, "attn_output")
    assert LLAMA.has_bias({"mlp_bias": True}, "ffn_down") and not LLAMA.has_bias({"mlp_bias": True}, "attn_q")


BROKEN = {
    "a stem without a name": (check_names, replace(QWEN3, names=LLAMA.names)),
    "two names for one tensor": (
        check_names,
        replace(LLAMA, names=replace(LLAMA.names, layer={**LLAMA.names.layer, "attn.q": "attn_q"})),
    ),
    "a bias of a norm": (check_wiring, replace(LLAMA, biases=(Bias(("attn_norm",)),))),
    "a change of nothing": (check_wiring, replace(LLAMA, changes={"attn_qkv": LLAMA.changes["attn_q"]})),
    "a row twice": (check_hyper, replace(LLAMA, hyper=replace(USUAL, keys=(*USUAL.keys, USUAL.keys[0])))),
    "a key that is not written": (check_hyper, replace(LLAMA, hyper=USUAL.changed(head_dim={"write": "never"}))),
    "no entry point": (check_found, OUTSIDE),
    "another's model type": (check_found, replace(QWEN3, reads=("qwen2",))),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_record_is_an_error(name):
    check, record = BROKEN[name]
    with pytest.raises(AssertionError):
        check(record)


def test_a_variant_set_in_config_json_is_refused():
    table = known()["chatglm"].hyper
    said = table.to_config(tiny_hyper(known()["chatglm"]))
    assert said["apply_residual_connection_post_layernorm"] is False and said["rope_ratio"] == 2
    for wrong in ({"rmsnorm": False}, {"apply_residual_connection_post_layernorm": 0}):
        with pytest.raises(UnsupportedError):
            table.read_config({**said, **wrong})
    for wrong in ({"rope_ratio": "2"}, {"hidden_size": None}, {"num_layers": 2.5}):
        with pytest.raises(InputError):
            table.read_config({**said, **wrong})


def test_activations_are_known_by_name():
    said = USUAL.to_config(tiny_hyper(LLAMA))
    assert USUAL.read_config({**said, "hidden_act": "gelu"}).activation == "gelu"
    with pytest.raises(InputError, match="hidden_act"):
        USUAL.read_config({**said, "hidden_act": 5})


def test_feed_forward_kinds_of_the_records():
    assert LLAMA.feeds("values", "product") == (
        Feed("attn_v", ("attn_output",), "values"),
        Feed("ffn_up", ("ffn_down",), "product"),
    )
    assert known()["chatglm"].readers_of("ffn_norm") == ("ffn_up",)
    assert known()["bitnet"].readers_of("attn_sub_norm") == ("attn_output",)
    assert LLAMA.readers_of("output_norm") == ()
