"""The request of a pack and its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyquant.errors import printable
from polyquant.formats.steps import Progress
from polyquant.storage.stores.blobs import Added
from polyquant.storage.stores.manifests import Descriptor
from polyquant.tables import Row, size

__all__ = ["Contents", "Layer", "Meter", "Packed", "layer_json", "layer_of"]


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything of a model except its weights: as in a Modelfile. Empty values are left out."""

    template: str | None = None
    system: str | None = None
    licenses: Sequence[str] = ()
    parameters: Sequence[tuple[str, str]] = ()
    messages: Sequence[tuple[str, str]] = ()
    adapter: str | None = None
    projector: str | None = None
    renderer: str | None = None
    parser: str | None = None
    requires: str | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """One blob. name: its kind or file; how: "copied", "reused", "linked" or "cloned"."""

    name: str
    media_type: str
    digest: str
    nbytes: int
    how: str


@dataclass(frozen=True, slots=True, repr=False)
class Packed:
    """The result of `pack`. path: the manifest; reference: the argument that names the model to polyquant."""

    path: Path
    store: Path
    name: str
    reference: str
    digest: str
    layers: tuple[Layer, ...]
    notes: tuple[str, ...] = field(default=())

    def __repr__(self) -> str:
        return f"<Packed {printable(self.name)}: {len(self.layers)} layers, {size(self.nbytes)}>"

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def rows(self) -> list[Row]:
        """One row per layer: name, media_type, digest, bytes, how."""
        return [
            {"name": x.name, "media_type": x.media_type, "digest": x.digest, "bytes": x.nbytes, "how": x.how}
            for x in self.layers
        ]

    def to_json(self) -> dict[str, Any]:
        """The values as JSON-compatible types."""
        return {
            "path": str(self.path), "store": str(self.store), "name": self.name, "reference": self.reference,
            "digest": self.digest, "bytes": self.nbytes, "layers": self.rows(), "notes": list(self.notes),
        }  # fmt: skip


class Meter:
    """Reports the bytes done."""

    def __init__(self, total: int, tell: Callable[[Progress], None] | None) -> None:
        self._total, self._tell, self._done, self._name = total, tell, 0, ""
        self._started = time.monotonic()

    def start(self, name: str) -> None:
        """Name the file that is copied next."""
        self._name = name

    def __call__(self, nbytes: int) -> None:
        """Count bytes."""
        self._done += nbytes
        if self._tell is not None:
            done = min(self._done, self._total)
            self._tell(Progress(done, self._total, self._name, time.monotonic() - self._started))


def layer_of(name: str, media_type: str, added: Added) -> Layer:
    """Return the layer of an added blob."""
    return Layer(name, media_type, added.digest, added.nbytes, added.how)


def layer_json(layer: Layer | Descriptor, annotations: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a descriptor as JSON."""
    nbytes = layer.size if isinstance(layer, Descriptor) else layer.nbytes
    out: dict[str, Any] = {"mediaType": layer.media_type, "digest": layer.digest, "size": nbytes}
    return out | ({"annotations": dict(annotations)} if annotations else {})
