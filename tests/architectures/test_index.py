"""Loading a model imports the records of its names only, and finds those that a search of all records finds."""

from __future__ import annotations

import subprocess
import sys

import pytest

import make_architecture_index
from polyquant import registry
from polyquant.analysis.demo import demo_model
from polyquant.architectures import find

LOADED = """
import sys
from polyquant.runtime.load import load
load(sys.argv[1])
print(*(name for name in sys.modules if name.startswith("polyquant.")))
"""


def test_the_index_lists_the_names_of_all_records():
    assert make_architecture_index.PAGE.read_text(encoding="utf-8") == make_architecture_index.text(), (
        "run: PYTHONPATH=src python scripts/make_architecture_index.py"
    )


@pytest.mark.parametrize("config", [
    {"model_type": "llama"}, {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
    {"architectures": ["LlamaForCausalLM", "Unknown"], "model_type": "mistral"}, {"model_type": "no such type"}, {},
    {"architectures": "LlamaForCausalLM", "model_type": ["llama"]}, {"architectures": [["x"], 3], "model_type": "bert"},
])  # fmt: skip
def test_the_index_changes_no_result(config):
    assert find.of_config(config) == find._of_config(registry.architectures(), config)


def test_names_of_gguf_files():
    for name in ("llama", "qwen3moe", "no such name", 7, None):
        assert find.by_name(name) == (find.known().get(name) if isinstance(name, str) else None)
    mixture = {"general.architecture": "llama", "llama.expert_count": 8}
    dense = {"general.architecture": "llama", "llama.expert_count": 0}
    assert find.of_metadata(mixture) != find.of_metadata(dense) == find.by_name("llama")


def test_a_small_model_loads_without_other_architectures_and_formats():
    done = subprocess.run(
        [sys.executable, "-c", LOADED, demo_model("llama")], capture_output=True, text=True, check=True
    )
    names = set(done.stdout.split())
    assert "polyquant.architectures.llama" in names
    for other in ("architectures.gemma4", "architectures.bert", "formats.msmodelslim.open", "formats.trellis.open"):
        assert f"polyquant.{other}" not in names, other
