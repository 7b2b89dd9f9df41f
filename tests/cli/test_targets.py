"""Every command that writes a file refuses a missing folder before it starts to work."""

from __future__ import annotations

import pytest

from golden import VECTORS


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
