"""save_pretrained of a packed model writes a complete Trellis v3 folder: transformers' files, plus the index and
metadata."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import MethodType
from typing import Any

from polyquant.errors import UnsupportedError
from polyquant.formats.sizes import DEFAULT_SHARD_SIZE
from polyquant.formats.trellis.config import FILE as METADATA
from polyquant.formats.trellis.config import WITHOUT_PLUGIN
from polyquant.storage.safetensors import read_header
from polyquant.storage.source import Source

__all__ = ["saves_as_v3"]

INDEX = "model.safetensors.index.json"
_ONE = "model.safetensors"


def saves_as_v3(model: Any, metadata: bytes) -> None:
    """Replace save_pretrained of one model. metadata: its quantization_config.json, which stays valid."""
    model.polyquant_metadata = metadata
    model.save_pretrained = MethodType(_save, model)


def _save(model: Any, save_directory: str | os.PathLike[str], **options: Any) -> None:
    """Run PreTrainedModel.save_pretrained, then complete the folder.

    Raises UnsupportedError before anything is written.
    """
    if options.get("push_to_hub"):
        raise UnsupportedError(
            "the folder is incomplete until transformers has finished", hint="save it, then upload the folder"
        )
    options.setdefault("max_shard_size", DEFAULT_SHARD_SIZE)
    type(model).save_pretrained(model, save_directory, **options)
    if options.get("is_main_process", True):
        _complete(Path(save_directory), model.polyquant_metadata)


def _complete(folder: Path, metadata: bytes) -> None:
    (folder / METADATA).write_bytes(metadata)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    _write(folder / "config.json", config | {"transformers_weights": WITHOUT_PLUGIN})
    if (folder / _ONE).exists():
        (folder / _ONE).replace(folder / "model-00001-of-00001.safetensors")
    weight_map, total = {}, 0
    for path in sorted(folder.glob("model-*-of-*.safetensors")):
        source = Source(path)
        for name, entry in read_header(source).entries.items():
            weight_map[name] = path.name
            total += entry.nbytes
        source.close()
    described = json.loads(metadata)
    common = described.get("global_config", {})
    quantization = {
        "bits_per_weight": common.get("average_bits_per_weight"),
        "method": described.get("quantization_method"),
        "hadamard_transform": common.get("hadamard_transform"),
    }
    content = {
        "metadata": {"total_size": total, "format": "trellis_v3", "quantization": quantization},
        "weight_map": weight_map,
    }
    _write(folder / INDEX, content)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
