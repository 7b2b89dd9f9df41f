"""Print docs/architectures.md: the accuracy of each architecture on the golden models in tests/vectors/architectures.

    PYTHONPATH=src python scripts/architecture_table.py > docs/architectures.md

For each model: tensors and metadata keys of the converted GGUF that equal llama.cpp's, and the relative RMS error of
the float logits against transformers, from the Hugging Face folder and from the GGUF file.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from polyquant.analysis.architectures import known_architectures
from polyquant.architectures.find import of_config
from polyquant.runtime.load import load

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

HEAD = """# Architectures

Each architecture is one record in `src/polyquant/architectures/`; `polyquant architectures` prints the list. All of
them convert between Hugging Face folders and GGUF in both directions. `scripts/architecture_table.py` generates the
table from random-weight models written by transformers 5.23.0 and llama.cpp's converter of October 2026: *equal* counts
the tensors (name, shape, type and bytes) and metadata keys that equal llama.cpp's; the last two columns are the
relative error of the float logits (embedding models: hidden states) against transformers, from the folder and from the
GGUF file.

For multimodal models (Gemma 3 and 4, Llama 4, Qwen3.5, Mistral 3: config.json has a `text_config`) only the language
model converts to GGUF and runs; its towers and projectors are left out, with a note.

| Hugging Face class | GGUF | traits | equal tensors | equal keys | folder | GGUF |
|---|---|---|---|---|---|---|"""


def measured(name: str) -> dict[str, Any]:
    """Return the table cells of one golden model."""
    from architectures.golden_models import Golden, differences

    golden = Golden(name)
    record = of_config(golden.config)
    assert record is not None
    with tempfile.TemporaryDirectory() as folder:
        gguf = golden.to_gguf(Path(folder) / "model.gguf")
        compared = differences(golden, gguf)
        tensors, keys = len(golden.said["tensors"]), len(golden.said["metadata"])
        wrong_keys = sum(f.split(":")[0] in golden.said["metadata"] for f in compared)
        wrong = len(compared) - wrong_keys
        exact = golden.to_gguf(Path(folder) / "exact.gguf", exact=True)  # llama.cpp's converter rounded OLMo 2's to F16
        errors = [_error(golden, path) for path in (golden.folder, exact)] if record.runs else ["-", "-"]
    return {"equal": f"{tensors - wrong} of {tensors}", "keys": f"{keys - wrong_keys} of {keys}", "errors": errors}


def _error(golden: Any, path: Path) -> str:
    wanted = golden.logits()
    model = load(path, activations="float")
    encoder = "hf_hidden" in wanted
    output = model.states(wanted["tokens"]) if encoder else model.logits(wanted["tokens"].tolist())
    expected = wanted["hf_hidden" if encoder else "hf_torch"]
    return f"{np.sqrt(np.mean((output - expected) ** 2) / np.mean(expected**2)):.0e}"


def main() -> None:
    """Print the page to stdout."""
    from architectures.golden_models import NAMES, Golden

    golden = {}
    for name in NAMES:
        if (record := of_config(Golden(name).config)) is not None:
            golden.setdefault((record.class_name, record.name), name)
    print(HEAD)
    for known in known_architectures():
        cells = ["-", "-", "-", "-"]
        if (at := (known.class_name, known.name)) in golden:
            found = measured(golden[at])
            cells = [found["equal"], found["keys"], *found["errors"]]
        runs = "" if known.runs else " (converted only)"
        print(f"| {known.class_name} | {known.name}{runs} | {', '.join(known.traits)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
