"""The examples of the Trellis v3 specification run unchanged, except for the package name."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

VECTORS = Path(__file__).parents[1] / "vectors" / "trellis"

MIGRATION = """
from pathlib import Path
from polyquant.trellis.loader import TrellisModelLoader
from polyquant.trellis.converter import convert_to_v3

# Load v2 model
loader = TrellisModelLoader("models/Model-Trellis-v2")

# Convert and save as v3
convert_to_v3(
    loader,
    output_path="models/Model-Trellis-v3",
    shard_size="2GB",  # or bytes: 2 * 1024**3
)
"""
LOADING = """
from polyquant.trellis.loader import TrellisModelLoader

# Auto-detects v3 format
loader = TrellisModelLoader("models/Model-Trellis-v3")

# Load specific layer
weights = loader.load_layer(0)
"""
TRANSFORMERS = """
from transformers import AutoModelForCausalLM
from polyquant.hf_adapter import load_trellis_model

# Use adapter for native HF loading
model = load_trellis_model(
    "models/Model-Trellis-v3",
    torch_dtype="auto",
    device_map="auto",
)
"""
DIRECT = """
from safetensors import safe_open

# Read index
import json
with open("models/Model-Trellis-v3/model.safetensors.index.json") as f:
    index = json.load(f)

# Load specific tensor from appropriate shard
tensor_name = "model.layers.0.mlp.gate_proj.weight.indices"
shard_file = index["weight_map"][tensor_name]

with safe_open(f"models/Model-Trellis-v3/{shard_file}", framework="FRAMEWORK") as f:
    indices = f.get_tensor(tensor_name)
"""


def run(text, **replaced):
    for old, new in replaced.items():
        text = text.replace(old, new)
    names: dict[str, object] = {}
    exec(text, names)
    return names


@pytest.fixture
def models(tmp_path, monkeypatch):
    shutil.copytree(VECTORS / "v2_cuda", tmp_path / "models" / "Model-Trellis-v2")
    monkeypatch.chdir(tmp_path)
    run(MIGRATION)
    return tmp_path / "models"


def test_migration_loading_and_direct_access(models):
    weights = run(LOADING)["weights"]
    gate = weights["model.layers.0.mlp.gate_proj.weight"]
    indices = run(DIRECT, FRAMEWORK="np")["indices"]
    assert len(weights) == 7 and (indices == gate.indices).all()
    assert indices.shape == (256 // 16, 512 // 16, 256 * gate.bits // 8)


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("torch") is None or find_spec("transformers") is None, reason="needs polyquant[transformers]"
)
def test_transformers_and_direct_access_with_torch(models):
    model = run(TRANSFORMERS)["model"]
    indices = run(DIRECT, FRAMEWORK="pt")["indices"]
    assert (model.model.layers[0].mlp.gate_proj.weight.indices == indices).all()
