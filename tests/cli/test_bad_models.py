"""Models that cannot run, on the command line: one line and exit 2; no traceback, bounded time and memory."""

from __future__ import annotations

import json

import numpy as np
import pytest

import polyquant as pq
from cli.bad_inputs import ODD, SOUND, model
from cli.bad_models import UNRUNNABLE
from golden import VECTORS
from polyquant.errors import PolyquantError


@pytest.mark.parametrize("name", UNRUNNABLE)
def test_a_model_that_cannot_run_is_a_one_line_error(name, polyquant, tmp_path):
    (tmp_path / "in").mkdir()
    path = UNRUNNABLE[name](tmp_path / "in")
    outcome = polyquant("run", path, "-p", "x", "-n", "1")
    assert outcome.code == 2 and not outcome.out, outcome
    assert outcome.line.startswith("polyquant: ") and len(outcome.line) < 900
    assert outcome.cpu < 5 and outcome.rss < 170e6, outcome


@pytest.mark.parametrize("key", json.loads((SOUND / "config.json").read_text()))
def test_any_config_value_runs_or_gives_one_error(key, tmp_path):
    folder = model("config.json", lambda body: body)(tmp_path)
    body = json.loads((folder / "config.json").read_text())
    for value in ODD:
        (folder / "config.json").write_text(json.dumps({**body, key: value}))
        try:
            found = pq.load(folder).logits([1, 2])
        except PolyquantError as e:
            assert "\n" not in str(e)
        else:
            assert found.shape == (2, 512)


def test_a_convert_only_architecture_converts(polyquant, tmp_path):
    folder = UNRUNNABLE["architecture unknown"](tmp_path)
    line = polyquant("run", folder, "-p", "x").line
    assert "mpt" in line and "polyquant convert" in line
    refused = polyquant("convert", folder, tmp_path / "x.gguf")
    assert refused.code == 2 and "architecture 'mpt' is unknown" in refused.line and "--allow-unknown" in refused.line
    written = polyquant("convert", folder, tmp_path / "x.gguf", "--allow-unknown")
    assert written.code == 0 and "warning: architecture 'mpt' is unknown" in written.out


@pytest.mark.parametrize("name", ["tiny-llama-tied/tiny-llama-tied-Q4_0.gguf", "tiny-llama-untied/hf"])
def test_invalid_options(name):
    path = VECTORS / "models" / name
    for wrong in ({"activations": "int4"}, {"cache": "q4_0"}, {"context": 0}, {"context": 10**9}):
        with pytest.raises(PolyquantError):
            pq.load(path, **wrong)
    for tokens in ([], [[1]], [512], [-1], [1.5], np.zeros(257, int), ["a"]):
        with pytest.raises(PolyquantError):
            pq.load(path).logits(tokens)
