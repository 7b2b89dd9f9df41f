"""Conversions of golden models on disk that can be changed in place, to inject faults."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import polyquant
from golden import VECTORS
from polyquant.opening import open_checkpoint
from polyquant.types import Kind, Meta, as_matrix

ARCHITECTURES, MODELS = VECTORS / "architectures", VECTORS / "models"


def source_of(model: str) -> Path:
    """The Hugging Face folder of a golden model."""
    return MODELS / model / "hf" if (MODELS / model).is_dir() else ARCHITECTURES / model


class Target:
    """A conversion on disk whose values, metadata and files can be changed in place."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getitem__(self, name: str) -> np.ndarray:
        """The floats of a tensor."""
        return np.array(open_checkpoint(self.path)[name].dequantize())

    def __setitem__(self, name: str, values: np.ndarray) -> None:
        """Store floats in the tensor's codec."""
        weight = open_checkpoint(self.path)[name]
        x = np.ascontiguousarray(values, np.float32).reshape(as_matrix(weight.shape))
        for part, array in weight.codec.pack(weight.codec.quantize(x)).items():
            self.write(name, part, array)

    def write(self, name: str, part: str, array: np.ndarray) -> None:
        """Overwrite the bytes of a part."""
        stored = open_checkpoint(self.path)[name].arrays[part]
        data = np.ascontiguousarray(array).tobytes()
        assert len(data) == stored.spec.nbytes
        with stored.source.path.open("r+b") as f:
            f.seek(stored.offset)
            f.write(data)

    def stored(self, name: str, part: str) -> np.ndarray:
        """The bytes of a part."""
        return np.array(open_checkpoint(self.path)[name].parts[part])

    def matrix(self, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
        """Change the floats of a tensor."""
        self[name] = change(self[name])

    def exchange(self, a: str, b: str) -> None:
        self[a], self[b] = self[b], self[a]

    def key(self, name: str, value: object) -> None:
        """Set GGUF metadata `*.name` to a value of the same type."""
        found = open_checkpoint(self.path).metadata
        full = next(k for k in found if k == name or k.endswith(f".{name}"))
        polyquant.edit(self.path, set={full: value})

    def listed(self, name: str, change: Callable[[list], object]) -> None:
        """Change an array of GGUF metadata."""
        full = f"tokenizer.ggml.{name}"
        for key, meta in open_checkpoint(self.path).metadata.items_typed():
            if key == full:
                values = list(meta.value) if meta.item is Kind.STRING else np.asarray(meta.value).tolist()
                change(values)
                polyquant.edit(self.path, set={full: Meta(Kind.ARRAY, values, meta.item)})

    def json(self, name: str, change: Callable[[dict], object]) -> None:
        """Change a JSON file of a folder."""
        path = self.path / name
        body = json.loads(path.read_text(encoding="utf-8"))
        change(body)
        path.write_text(json.dumps(body), encoding="utf-8")


@dataclass(frozen=True)
class Fault:
    """inject: the change. code: of the finding that names it. text: a part of the finding.

    model: the source; to: "gguf", in that codec, or "hf". also: codes of other findings that follow from the fault.
    """

    name: str
    model: str
    code: str
    inject: Callable[[Target], object]
    text: str = ""
    to: str = "gguf"
    codec: str = "bf16"
    also: tuple[str, ...] = ()


def converted(model: str, to: str, codec: str, folder: Path) -> Path:
    """A genuine conversion, made once."""
    source = source_of(model)
    path = folder / f"{model}-{codec}{'.gguf' if to == 'gguf' else '-hf'}"
    if not path.exists():
        if to == "hf":
            shutil.copytree(source, path)
        else:
            polyquant.convert(source, path, to="gguf", codec=codec, requantize=True)
    return path


def broken(fault: Fault, folder: Path, where: Path) -> Path:
    """A copy of a conversion with the fault."""
    good = converted(fault.model, fault.to, fault.codec, folder)
    path = where / good.name
    if good.is_dir():
        shutil.copytree(good, path, copy_function=shutil.copyfile)
    else:
        shutil.copyfile(good, path)
    fault.inject(Target(path))
    return path
