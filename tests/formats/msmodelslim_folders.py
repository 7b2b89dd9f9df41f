"""Copies of the golden msModelSlim folders with one thing changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from folders import safetensors_bytes
from golden import VECTORS
from polyquant.codecs.dtypes import BY_NUMPY, NUMPY
from polyquant.storage import safetensors
from polyquant.storage.source import Source

MSMODELSLIM = VECTORS / "msmodelslim"
FOLDERS = sorted(
    p.relative_to(MSMODELSLIM).as_posix()
    for pattern in ("v[01]/*/*", "chatglm2/msmodelslim_*")
    for p in MSMODELSLIM.glob(pattern)
)
ASIDE = ("run.json", "tool_forward.safetensors", "calib_stats.json")
assert ml_dtypes  # numpy learns bfloat16 by its import


def copy(name: str, target: Path) -> Path:
    """A writable copy of a golden folder, only with files of the tool."""
    return Path(shutil.copytree(MSMODELSLIM / name, target / "model", ignore=shutil.ignore_patterns(*ASIDE)))


def description(folder: Path) -> Path:
    """Its description file."""
    (found,) = folder.glob("quant_model_description*.json")
    return found


def shards(folder: Path) -> list[Path]:
    """Its weight files."""
    return sorted(p for p in folder.glob("quant_model_weight*.safetensors"))


def load(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, read by this file alone."""
    out = {}
    for path in shards(folder):
        raw = path.read_bytes()
        for name, e in safetensors.read_header(Source(path)).entries.items():
            out[name] = np.frombuffer(raw, NUMPY[e.dtype], int(np.prod(e.shape)), e.offset).reshape(e.shape)
    return out


def save(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A file of these tensors."""
    path.write_bytes(
        safetensors_bytes(
            {n: (BY_NUMPY[t.dtype], list(t.shape), np.ascontiguousarray(t).tobytes()) for n, t in tensors.items()}
        )
    )


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    """Change the content of a JSON file in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Change the tensors of a folder of one weight file; the description stays."""
    (path,) = shards(folder)
    tensors = {n: t.copy() for n, t in load(folder).items()}
    change(tensors)
    save(path, tensors)


def edit_tensor(folder: Path, name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> None:
    """Replace one tensor, or drop it (None)."""

    def once(tensors: dict[str, np.ndarray]) -> None:
        changed = change(tensors.pop(name))
        if changed is not None:
            tensors[name] = changed

    edit_tensors(folder, once)
