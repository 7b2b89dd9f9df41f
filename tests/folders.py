"""Write layouts to disk for tests: a minimal version of the conversion pipeline."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from polyquant.types import Checkpoint, Layout, TensorSpec


def specs(checkpoint: Checkpoint) -> list[TensorSpec]:
    """The unchanged tensors of a checkpoint."""
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
    """A file from name -> (dtype, shape, data), in the given order, without checks."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    return raw_safetensors(json.dumps(header), b"".join(d for _, _, d in tensors.values()))


def read_safetensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name -> (dtype, shape, data) of all files of a folder, the inverse of safetensors_bytes."""
    out = {}
    for file in sorted(folder.glob("*.safetensors")):
        raw = file.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name != "__metadata__":
                a, b = entry["data_offsets"]
                out[name] = entry["dtype"], tuple(entry["shape"]), raw[start + a : start + b]
    return out


def raw_safetensors(header: str | bytes, data: bytes = b"") -> bytes:
    """A file from the text of its header."""
    raw = header.encode() if isinstance(header, str) else header
    return len(raw).to_bytes(8, "little") + raw + data


INTERESTING = [
    b"\xff" * 8,
    b"\0" * 8,
    b"-1",
    b"1e9",
    b"null",
    b"[]",
    b"{}",
    b'"',
    b"\\",
    b"99999999999999999999",
    b"../",
    b"NaN",
    b"true",
]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Apply one to three mutations of words and integers."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(4):
            case 0:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                out[at : at + rng.randint(1, 8)] = rng.choice(INTERESTING)
            case 2:
                del out[at : at + rng.randint(1, 40)]
            case 3:
                out[at:at] = out[max(0, at - rng.randint(1, 40)) : at]
    return bytes(out)
