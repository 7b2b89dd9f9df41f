"""Layouts put on disk for tests: what the pipeline does at scale, in a dozen lines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from polyquant.types import Checkpoint, Layout, TensorSpec


def specs(checkpoint: Checkpoint) -> list[TensorSpec]:
    """The tensors of a checkpoint as they are."""
    return [TensorSpec(name, w.shape, w.codec) for name, w in checkpoint.items()]


def fill(layout: Layout, folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a layout with the parts of a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    images = {f.name: bytearray(f.size) for f in layout.files}
    for plan in layout.files:
        for offset, data in plan.pieces:
            images[plan.name][offset : offset + len(data)] = data
    for (name, part), slot in layout.slots.items():
        data = np.ascontiguousarray(checkpoint[name].parts[part]).tobytes()
        assert len(data) == slot.spec.nbytes
        images[slot.file][slot.offset : slot.offset + len(data)] = data
    for name, image in images.items():
        (folder / name).write_bytes(image)
    return folder


def safetensors_bytes(
    tensors: dict[str, tuple[str, list[int], bytes]], metadata: dict[str, str] | None = None
) -> bytes:
    """A file from name -> (dtype, shape, data), in the given order, claims unchecked."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    return raw_safetensors(json.dumps(header), b"".join(d for _, _, d in tensors.values()))


def raw_safetensors(header: str | bytes, data: bytes = b"") -> bytes:
    """A file from the text of its header."""
    raw = header.encode() if isinstance(header, str) else header
    return len(raw).to_bytes(8, "little") + raw + data
