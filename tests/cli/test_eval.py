"""polyquant eval on the command line."""

from __future__ import annotations

import json

import pytest

from golden import VECTORS
from polyquant.analysis.demo import demo_model
from polyquant.analysis.evaluate import Mean
from polyquant.cli.eval_command import _bar, _mean

UNTIED = VECTORS / "models/tiny-llama-untied"
TEXT = demo_model("llama").parent / "held-out.txt"
COMMON = ("eval", UNTIED / "tiny-llama-untied-Q2_K.gguf", "--text", TEXT, "--tokens", "300", "--context", "64")


@pytest.mark.parametrize("more", [(), ("--stride", "32"), ("--against", UNTIED / "hf"), ("--activations", "float")])
def test_tables_fit_80_columns(more, polyquant):
    outcome = polyquant(*COMMON, *more)
    assert outcome.code == 0 and not outcome.err
    assert all(len(line) <= 80 and line.isprintable() for line in outcome.out.splitlines()), outcome.out
    assert ("sliding by 32" if "--stride" in more else "llama.cpp's perplexity tool") in outcome.out
    assert ("KL divergence" in outcome.out) == ("--against" in more) == ("█" in outcome.out)


def test_json_and_table_agree(polyquant):
    found = json.loads(polyquant(*COMMON, "--against", UNTIED / "hf", "--format", "json").out)
    shown = polyquant(*COMMON, "--against", UNTIED / "hf").out
    assert f"{found['model']['nll']['value']:.4f}" in shown
    assert f"mean {found['divergence']['kl']['value']:.6f}" in shown
    assert f"{found['divergence']['layers'][1]['alone']:.5f}" in shown
    assert found["model"]["tokens"] == 4 * 31 and found["method"] == "halves"


SLIPS = {
    ("--text", "nothing.txt"): "nothing.txt: cannot be opened",
    ("--text", UNTIED / "tiny-llama-untied-Q2_K.gguf"): "not UTF-8",
    ("--text", TEXT, "--context", "100000"): "does not fit the model",
    ("--text", TEXT, "--context", "64", "--stride", "64"): "expected 1 to 63",
    ("--text", TEXT, "--against", demo_model("llama")): "bits per byte",
    ("--text", TEXT, "--against", "nothing.gguf"): "nothing.gguf",
    ("--text", TEXT, "--tokens", "20"): "too short for one window",
    (): "Missing option '--text'",
}


@pytest.mark.parametrize("args", SLIPS, ids=lambda args: " ".join(str(a).rpartition("/")[2] for a in args))
def test_bad_input_is_a_one_line_error(args, polyquant):
    outcome = polyquant("eval", UNTIED / "hf", *args)
    assert outcome.code == 2 and not outcome.out and "Traceback" not in outcome.err
    assert SLIPS[args] in outcome.err
    assert not args or outcome.err.count("\n") == 1


@pytest.mark.parametrize(("share", "length"), [(0, 0), (1e-9, 0), (0.5, 12), (1, 24)])
def test_bars_are_proportional(share, length):
    assert len(_bar(share)) == length


@pytest.mark.parametrize(
    ("mean", "said"),
    [
        (Mean(31.2281, 0.8852), "31.2281 ± 0.8852"),
        (Mean(20000.0, 50.0), "20000.0 ± 50.0"),
        (Mean(float("inf"), 1.0), "inf"),
    ],
)
def test_values_are_shown_with_errors(mean, said):
    assert _mean(mean) == said
