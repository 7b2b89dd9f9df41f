"""The sampling that generation_config.json and general.sampling.* recommend."""

from __future__ import annotations

import json

import pytest

from polyquant.errors import InputError
from polyquant.runtime.recommended import WHOLE_TEXT, recommended, shown
from polyquant.runtime.sampling import Sampling
from polyquant.types import Checkpoint, Kind, Meta

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
            "repetition_window": WHOLE_TEXT},
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


def test_no_file_recommends_nothing_and_a_broken_one_is_an_error(tmp_path):
    assert recommended(Checkpoint("hf", tmp_path, {})).values == {}
    checkpoint = folder(tmp_path, {})
    (tmp_path / "generation_config.json").write_bytes(b"[]")
    with pytest.raises(InputError):
        recommended(checkpoint)


def test_gguf_metadata(tmp_path):
    keys = {
        "temp": Meta(Kind.FLOAT32, 0.6), "top_k": Meta(Kind.INT32, 40), "top_p": Meta(Kind.FLOAT32, 0.95),
        "min_p": Meta(Kind.FLOAT32, 0.05),
        "penalty_repeat": Meta(Kind.FLOAT32, 1.1), "penalty_last_n": Meta(Kind.INT32, -1),
        "mirostat": Meta(Kind.INT32, 2),
    }  # fmt: skip
    metadata = {f"general.sampling.{name}": value for name, value in keys.items()}
    found = recommended(Checkpoint("gguf", tmp_path, {}, metadata=metadata, naming="gguf"))
    assert found.origin == "general.sampling.*" and not found.notes
    assert found.values == {
        "temperature": 0.6, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1,
        "repetition_window": WHOLE_TEXT,
    }  # fmt: skip
    assert recommended(Checkpoint("gguf", tmp_path, {}, naming="gguf")).values == {}


def test_words():
    assert shown(Sampling()) == "greedy (temperature 0)"
    assert shown(Sampling(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.05)) == (
        "temperature 0.6, top-k 20, top-p 0.95, min-p 0.1, repetition penalty 1.05"
    )
