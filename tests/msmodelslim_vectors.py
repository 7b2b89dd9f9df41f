"""The golden folders of msModelSlim: a list, and a copy of one that can run."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

import polyquant
from golden import VECTORS

ROOT = VECTORS / "msmodelslim"
FOLDERS = sorted(str(p.parent.relative_to(ROOT)) for p in ROOT.glob("v[01]/*/*/quant_model_description*.json"))
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")


def source_of(folder: str) -> Path:
    """The float model that a folder was made from."""
    return ROOT / "models" / ("qwen3_bf16" if folder.startswith("v1") else f"qwen2_{folder.split('/')[1]}")


def runnable(folder: str, tmp_path: Path) -> Path:
    """A copy with the config.json of its source: the older tool writes none."""
    made = tmp_path / "model"
    shutil.copytree(ROOT / folder, made)
    if not (made / "config.json").exists():
        shutil.copy(source_of(folder) / "config.json", made)
    return made


def forward(folder: str) -> dict[str, np.ndarray]:
    """Results of the tool's modules, float32 and integers; empty if not recorded."""
    path = ROOT / folder / "tool_forward.safetensors"
    if not path.exists():
        return {}
    out = {}
    for name, weight in polyquant.open(path).items():
        codes = weight.codec.unpack(weight.read(), weight.shape).values.reshape(weight.shape)
        out[name] = codes if codes.dtype.kind == "i" else codes.astype(np.float32)
    return out


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """|a - b| / |b|."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
