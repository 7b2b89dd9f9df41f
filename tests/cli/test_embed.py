"""`polyquant embed`: stdout has only vectors, in the requested format."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import polyquant as pq
from architectures.golden_models import Golden
from polyquant.analysis.demo import demo_model

TEXTS = ["the word", "of the lord"]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("embed") / "bert.gguf"
    pq.convert(Golden("bert").folder, path, to="gguf", codec="f32")
    return path


@pytest.fixture(scope="module")
def wanted(gguf):
    return pq.load(gguf).embed(TEXTS)


def test_one_line_per_input(gguf, wanted, polyquant):
    outcome = polyquant("embed", gguf, *TEXTS)
    assert outcome.code == 0 and outcome.err == ""
    found = np.array([line.split(" ") for line in outcome.out.splitlines()], np.float32)
    np.testing.assert_array_equal(found, wanted)


def test_json_contains_the_settings(gguf, wanted, polyquant, tmp_path):
    said = json.loads(polyquant("embed", gguf, *TEXTS, "--format", "json").out)
    assert (said["pooling"], said["normalized"], said["dimensions"]) == ("mean", True, 64)
    assert [e["text"] for e in said["embeddings"]] == TEXTS
    assert [e["tokens"] for e in said["embeddings"]] == [len(pq.load(gguf).tokenizer.encode(t)) for t in TEXTS]
    np.testing.assert_array_equal(np.array([e["embedding"] for e in said["embeddings"]], np.float32), wanted)
    assert polyquant("embed", gguf, *TEXTS, "--format", "json", "--output", tmp_path / "x.json").out == ""
    assert json.loads((tmp_path / "x.json").read_text()) == said


def test_inputs_from_a_file_and_output_as_an_array(gguf, wanted, polyquant, tmp_path):
    (tmp_path / "lines.txt").write_bytes("\r\n".join(TEXTS).encode() + b"\n")
    out = tmp_path / "out.npy"
    outcome = polyquant("embed", gguf, "--file", tmp_path / "lines.txt", "--format", "npy", "--output", out)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
    found = np.load(out)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, wanted)
    assert "--overwrite" in polyquant("embed", gguf, "a", "--output", out).line
    np.testing.assert_array_equal(np.load(out), wanted)
    assert polyquant("embed", gguf, *TEXTS, "--output", out, "--overwrite").code == 0
    np.testing.assert_array_equal(np.loadtxt(out, np.float32), wanted)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lines.txt", "out.npy"]


def test_pooling_and_normalize_options(gguf, polyquant):
    model = pq.load(gguf)
    outcome = polyquant("embed", gguf, "the word", "--pooling", "cls", "--no-normalize")
    wanted = model.embed("the word", pooling="cls", normalize=False)
    np.testing.assert_array_equal(np.array([outcome.out.split()], np.float32), wanted)


SLIPS = [
    ((), "give either TEXT"),
    (("a", "--file", "LINES"), "give either TEXT"),
    (("a", "--format", "npy"), "needs --output"),
    (("a", "--pooling", "max"), "'max' is not one of"),
    (("--file", "LINES"), "line 2 is empty"),
    (("--file", "nothing.txt"), "nothing.txt"),
    (("word " * 200,), "at most 128 tokens"),
    (("a", "--context", "1000"), "1 to 128 tokens"),
]


@pytest.mark.parametrize(("args", "said"), SLIPS)
def test_bad_input_is_a_one_line_error(args, said, gguf, polyquant, tmp_path):
    lines = tmp_path / "lines.txt"
    lines.write_text("a\n\nb\n")
    outcome = polyquant("embed", gguf, *(lines if a == "LINES" else a for a in args))
    assert outcome.code == 2 and outcome.out == "" and said in outcome.err and "Traceback" not in outcome.err


def test_a_model_without_pooling_and_empty_input(gguf, polyquant, tmp_path):
    assert "choose one: --pooling mean, cls, last" in polyquant("embed", demo_model("llama"), "a").line
    assert polyquant("embed", demo_model("llama"), "a", "--pooling", "last").out.count("\n") == 1
    shutil.copytree(Golden("bert").folder, tmp_path / "bert")
    (tmp_path / "bert/tokenizer.json").unlink()
    assert polyquant("embed", tmp_path / "bert", "a").code == 2
    assert "polyquant embed" in polyquant("run", gguf, "-p", "a").line
