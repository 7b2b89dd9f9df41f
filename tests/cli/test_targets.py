"""The target of a command: its folder must exist before the work starts; options select its format."""

from __future__ import annotations

from pathlib import Path

import pytest

import polyquant as package
from golden import VECTORS

DEMO = Path(package.__file__).parent / "demo/llama"


@pytest.mark.parametrize(
    "arguments",
    [
        ("convert", "MODEL", "OUT.gguf"),
        ("report", "MODEL", "-o", "OUT.html"),
        ("embed", "MODEL", "a", "--output", "OUT.txt"),
        ("checksum", "MODEL", "-o", "OUT.json"),
        ("certify", "MODEL", "MODEL", "-o", "OUT.json"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_refuse_missing_folders_before_they_work(polyquant, tmp_path, arguments):
    model = VECTORS / "models/tiny-llama-untied/hf"
    outcome = polyquant(
        *(model if a == "MODEL" else tmp_path / "missing" / a if a.startswith("OUT") else a for a in arguments)
    )
    assert outcome.code == 2 and "the target's folder does not exist" in outcome.err


@pytest.mark.parametrize(
    ("codec", "form"),
    [("compressed.p4.g64", "hf"), ("gptq.4.g64", "hf"), ("w8a8", "msmodelslim"), ("trellis.3", "trellis-v3")],
)
def test_calibration_implies_a_format_that_stores_the_codec(polyquant, tmp_path, codec, form):
    text = tmp_path / "text.txt"
    text.write_text("a text of a few words")
    arguments = (DEMO, tmp_path / "out", "--codec", codec, "--calibration", text, "--dry-run")
    outcome = polyquant("quantize", *arguments)
    assert outcome.code == 0 and f"plan: {form}, {codec};" in outcome.out
