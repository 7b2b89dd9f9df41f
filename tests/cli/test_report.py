"""polyquant report: a page is written, never over another file."""

from __future__ import annotations

import pytest

from golden import VECTORS

pytest.importorskip("vl_convert", reason="vl-convert-python is not installed")

SOURCE = VECTORS / "models/tiny-llama-untied/hf"


def test_the_command(polyquant, tmp_path):
    target = tmp_path / "report.html"
    models = [tmp_path / f"tiny-{codec}.gguf" for codec in ("q8_0", "q4_0")]
    for model in models:
        assert polyquant("quantize", SOURCE, model, "--codec", model.stem.removeprefix("tiny-")).code == 0
    done = polyquant("report", SOURCE, *models, "-o", target)
    assert done.code == 0, done.err
    assert done.out.splitlines()[0] == "efficient: tiny-q8_0.gguf, tiny-q4_0.gguf"
    assert f"{target}: " in done.out.replace("\n", "") and "<title>" in target.read_text()
    again = polyquant("report", SOURCE, *models, "-o", target)
    assert again.code == 2 and "target exists" in again.err
    assert polyquant("report", SOURCE, models[0], "-o", target, "--overwrite").code == 0
    refused = polyquant("report", SOURCE, models[0], "-o", models[1], "--overwrite")
    assert refused.code == 2 and "target is not a report" in refused.err
