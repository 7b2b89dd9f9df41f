"""Copies of the golden Trellis folders with one thing changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from golden import VECTORS

TRELLIS = VECTORS / "trellis"
INDEX = "model.safetensors.index.json"


def copy(name: str, target: Path) -> Path:
    """A writable copy of a golden folder."""
    return Path(shutil.copytree(TRELLIS / name, target / name))


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    """Change the content of a JSON file in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Change tensors in any shard; names and sizes in the index are updated."""
    homes, total = {}, 0
    for path in sorted(folder.rglob("*.safetensors")):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
        total += sum(t.nbytes for t in tensors.values())
        homes |= dict.fromkeys(tensors, path.name)
    if (folder / INDEX).exists():

        def follow(index: Any) -> None:
            index["weight_map"] = homes
            index["metadata"]["total_size"] = total

        edit_json(folder / INDEX, follow)


def edit_tensor(folder: Path, name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> None:
    """Replace one tensor, or drop it (None)."""
    met = []

    def once(tensors: dict[str, np.ndarray]) -> None:
        if name in tensors:
            met.append(name)
            changed = change(tensors.pop(name).copy())
            if changed is not None:
                tensors[name] = changed

    edit_tensors(folder, once)
    assert met == [name]
