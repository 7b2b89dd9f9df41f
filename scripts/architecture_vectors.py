"""Write golden vectors of an architecture from a Hugging Face folder, llama.cpp's GGUF of it, and logits.

    python scripts/architecture_vectors.py HF_DIR MODEL.gguf LOGITS.npz tests/vectors/architectures/NAME

Output: config.json, model.safetensors, tokenizer.json (and modules.json, 1_Pooling/config.json for embedding models),
logits.npz with `tokens`, `hf_torch` (or `hf_hidden` and `hf_pooled`), and golden.json: the shape, type and SHA-256 of
every tensor of the GGUF, and its metadata without the tokenizer's.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from polyquant.formats.gguf.header import Metadata
from polyquant.opening import open_checkpoint

ARRAYS = ("tokens", "hf_torch", "hf_hidden", "hf_pooled")
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "modules.json", "1_Pooling/config.json")


def described(path: Path) -> dict[str, Any]:
    """Return {"tensors": {name: [shape, codec, sha256]}, "metadata": {key: [type, value]}} of a GGUF file."""
    checkpoint = open_checkpoint(path)
    tensors = {}
    for name, weight in checkpoint.items():
        data = b"".join(np.ascontiguousarray(part).tobytes() for part in weight.read().values())
        tensors[name] = [list(weight.shape), weight.codec.name, hashlib.sha256(data).hexdigest()]
    metadata = {}
    found = checkpoint.metadata
    assert isinstance(found, Metadata)
    for key, meta in found.items_typed():
        if not key.startswith("tokenizer.") and key != "general.name":
            kind = meta.kind.name if meta.item is None else f"{meta.item.name}[]"
            metadata[key] = [kind, meta.value if meta.item is None else list(meta.value.tolist())]
    return {"tensors": tensors, "metadata": metadata}


def _lines(sections: dict[str, dict[str, Any]]) -> str:
    """Format JSON with one entry per line, for readable diffs."""
    parts = []
    for key, entries in sections.items():
        lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items())
        parts.append(f" {json.dumps(key)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write(hf: Path, gguf: Path, logits: Path, target: Path) -> None:
    """Write the folder `target` from a Hugging Face folder, llama.cpp's file and the logits."""
    target.mkdir(parents=True, exist_ok=True)
    for name in (*FILES, *(p.name for p in hf.glob("model*.safetensors*"))):
        if (hf / name).exists():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(hf / name, target / name)
    with np.load(logits) as found:
        np.savez_compressed(target / "logits.npz", **{k: found[k] for k in ARRAYS if k in found})
    (target / "golden.json").write_text(_lines(described(gguf)), encoding="utf-8")


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:]))
