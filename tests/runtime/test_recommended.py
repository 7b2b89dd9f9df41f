"""The sampling that generation_config.json and general.sampling.* recommend."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import polyquant as pq
from polyquant.analysis.demo import demo_model
from polyquant.architectures.sampling_defaults import to_gguf
from polyquant.errors import InputError
from polyquant.opening import open_checkpoint
from polyquant.runtime.recommended import ALL_TOKENS, recommended, shown
from polyquant.runtime.sampling import Sampling
from polyquant.types import Checkpoint

CASES = {
    "nothing": ({"eos_token_id": 1}, {}),
    "llama": ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
    "without do_sample": ({"temperature": 0.7, "top_k": 20}, {"temperature": 0.7, "top_k": 20}),
    "sampling without a temperature": ({"do_sample": True, "top_k": 50}, {"temperature": 1.0, "top_k": 50}),
    "cuts without a temperature": ({"top_p": 0.9}, {}),
    "greedy": ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}),
    "all": (
        {"do_sample": True, "temperature": 1, "top_k": 64, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05},
        {"temperature": 1, "top_k": 64, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05,
            "repetition_window": ALL_TOKENS},
    ),
    "nulls": ({"do_sample": True, "temperature": None, "top_k": None}, {"temperature": 1.0}),
    "off": ({"temperature": 0.5, "top_k": -1}, {"temperature": 0.5, "top_k": 0}),
}  # fmt: skip


def folder(path, content):
    (path / "generation_config.json").write_text(json.dumps(content))
    return Checkpoint("hf", path, {}, files={"generation_config.json": path / "generation_config.json"})


@pytest.mark.parametrize("case", CASES)
def test_generation_config(case, tmp_path):
    content, values = CASES[case]
    found = recommended(folder(tmp_path, content))
    assert found.values == values and not found.notes
    assert found.origin == ("generation_config.json" if values else "")
    Sampling(**found.values)


BAD = {"temperature": -1, "top_k": -5, "top_p": 7, "min_p": "x", "repetition_penalty": 0}


@pytest.mark.parametrize("name", BAD)
def test_values_that_cannot_be_used_are_ignored_with_a_note(name, tmp_path):
    found = recommended(folder(tmp_path, {"do_sample": True, "temperature": 0.5, name: BAD[name]}))
    assert name not in found.values and len(found.notes) == 1 and name in found.notes[0]


def test_no_file_means_no_recommendation_and_a_broken_one_is_an_error(tmp_path):
    assert recommended(Checkpoint("hf", tmp_path, {})).values == {}
    checkpoint = folder(tmp_path, {})
    (tmp_path / "generation_config.json").write_bytes(b"[]")
    with pytest.raises(InputError):
        recommended(checkpoint)


def test_gguf_metadata(tmp_path):
    keys = {
        "temp": 0.6, "top_k": 40, "top_p": 0.95, "min_p": 0.05,
        "penalty_repeat": 1.1, "penalty_last_n": -1, "mirostat": 2,
    }  # fmt: skip
    metadata = {f"general.sampling.{name}": value for name, value in keys.items()}
    found = recommended(Checkpoint("gguf", tmp_path, {}, metadata=metadata, naming="gguf"))
    assert found.origin == "general.sampling.*" and not found.notes
    assert found.values == {
        "temperature": 0.6, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1,
        "repetition_window": ALL_TOKENS,
    }  # fmt: skip
    assert recommended(Checkpoint("gguf", tmp_path, {}, naming="gguf")).values == {}


CARRIED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    "content", [CARRIED, {"do_sample": False, "temperature": 0.6}, {"do_sample": True}, {}], ids=str
)
def test_conversion_keeps_the_recommended_sampling(content, tmp_path):
    """Folder -> GGUF -> folder: equal options of sampling at every stage."""
    shutil.copytree(demo_model("llama"), tmp_path / "hf")
    (tmp_path / "hf/generation_config.json").write_text(json.dumps({"eos_token_id": 1, **content}))
    pq.convert(tmp_path / "hf", tmp_path / "a.gguf")
    pq.convert(tmp_path / "a.gguf", tmp_path / "b.gguf", codec="q8_0")
    pq.convert(tmp_path / "b.gguf", tmp_path / "back", to="hf", codec="bf16")
    first, *later = (
        recommended(open_checkpoint(tmp_path / name)).values for name in ("hf", "a.gguf", "b.gguf", "back")
    )
    for found in later:
        assert found.keys() == first.keys()
        np.testing.assert_allclose([found[k] for k in first], [first[k] for k in first], rtol=1e-6)
    keys = [k for k in pq.open(tmp_path / "a.gguf").metadata if k.startswith("general.sampling.")]
    assert len(keys) == len(first)
    written = json.loads((tmp_path / "back/generation_config.json").read_text())
    assert written.get("temperature") == first.get("temperature") and ("_from_model_config" in written) == (not first)


def test_values_that_are_not_numbers_are_not_copied(tmp_path):
    content = {"temperature": "hot", "top_p": True, "top_k": 1 << 40, "min_p": None}
    assert to_gguf(folder(tmp_path, content).files) == {}


def test_sampling_is_described():
    assert shown(Sampling()) == "greedy (temperature 0)"
    assert shown(Sampling(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.05)) == (
        "temperature 0.6, top-k 20, top-p 0.95, min-p 0.1, repetition penalty 1.05"
    )
