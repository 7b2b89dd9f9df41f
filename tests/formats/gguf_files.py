"""GGUF files written by hand for tests: a small valid one, and functions to corrupt it.

Nothing here uses polyquant's writer.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from golden import VECTORS

GGUF_VECTORS = sorted((VECTORS / "gguf").glob("*.gguf"))
SMALL = VECTORS / "gguf" / "meta_v3old_gguf-py-0.4.6.gguf"

_LETTERS = dict(enumerate("BbHhIif?"))
_LETTERS.update({10: "Q", 11: "q", 12: "d"})


def string(text: str | bytes, order: str = "<", wide: bool = True) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack(order + ("Q" if wide else "I"), len(raw)) + raw


def entry(key: str | bytes, kind: int, payload: bytes, order: str = "<") -> bytes:
    return string(key, order) + struct.pack(order + "I", kind) + payload


def u32(key: str, value: int) -> bytes:
    return entry(key, 4, struct.pack("<I", value))


def text(key: str, value: str | bytes) -> bytes:
    return entry(key, 8, string(value))


def array(key: str, item: int, values: list) -> bytes:
    body = b"".join(map(string, values)) if item == 8 else struct.pack(f"<{len(values)}{_LETTERS[item]}", *values)
    return entry(key, 9, struct.pack("<IQ", item, len(values)) + body)


def tensor(name: str | bytes, dims: tuple[int, ...], type_id: int, offset: int) -> bytes:
    """One entry; dims as in the file, fastest first."""
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def file(
    entries: list[bytes],
    tensors: list[bytes] = (),  # type: ignore[assignment]
    data: bytes = b"",
    *,
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    counts = (
        len(tensors) if n_tensors is None else n_tensors,
        len(entries) if n_keys is None else n_keys,
    )
    raw = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join([*entries, *tensors])
    return raw + (bytes(-len(raw) % alignment) + data if tensors else b"")


ARCH = text("general.architecture", "llama")


def sound(**more: object) -> bytes:
    """Two tensors, f32 [2, 4] and q8_0 [3, 32]; 32 + 128 bytes of data."""
    tensors = [tensor("a.weight", (4, 2), 0, 0), tensor("b.weight", (32, 3), 8, 32)]
    return file([ARCH], tensors, bytes(range(160)), **more)  # type: ignore[arg-type]


def mutate(raw: bytes, seed: int) -> bytes:
    """One seeded mutation of a file: flipped bytes, huge numbers, cuts, repeats. For fuzzing any reader."""
    rng = np.random.default_rng(seed)
    out = bytearray(raw)
    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(0, max(1, len(out))))
        match int(rng.integers(0, 6)):
            case 0:
                out[at : at + 1] = bytes([int(rng.integers(0, 256))])
            case 1:
                out[at : at + 8] = struct.pack("<Q", 1 << int(rng.integers(0, 64)))
            case 2:
                out[at : at + 4] = struct.pack("<I", int(rng.choice([0, 1, 8, 9, 13, 36, 39, 1000, 0xFFFFFFFF])))
            case 3:
                del out[at:]
            case 4:
                out[at:at] = out[at : at + int(rng.integers(1, 64))]
            case 5:
                del out[at : at + int(rng.integers(1, 16))]
    return bytes(out)


def saved(folder: Path, raw: bytes, name: str = "x.gguf") -> Path:
    path = folder / name
    path.unlink(missing_ok=True)  # a file that shrinks under the map of an earlier test would kill the process
    path.write_bytes(raw)
    return path
