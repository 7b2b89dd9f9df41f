"""Summary of a checkpoint: totals, types, layers, and how the format was recognised. Reads headers only."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from polyquant.analysis.layer_table import LayerTable, layer_table
from polyquant.errors import printable
from polyquant.formats.protocol import ReportsLayerTypes
from polyquant.opening import detect, open_as
from polyquant.storage.locations import shown_path
from polyquant.storage.stores.description import description
from polyquant.tables import Row, Table, size, tensor_columns
from polyquant.types import Checkpoint, Weight

__all__ = ["Group", "Inspection", "inspect"]


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of the same role in the same codec, e.g. blk.*.attn_q.weight x 32."""

    pattern: str
    count: int
    shapes: tuple[tuple[int, ...], ...]
    codec: str
    weights: int
    nbytes: int

    @property
    def bpw(self) -> float:
        """Effective bits per weight."""
        return 8 * self.nbytes / max(1, self.weights)


@dataclass(frozen=True, slots=True, repr=False)
class Inspection:
    """The result of `inspect`. layers: for formats that report the type of every layer. store: of a model in a store,
    its name, template, parameters, license and further blobs.
    """

    path: str
    format: str
    why: str
    dialect: str
    architecture: str
    weights: int
    nbytes: int
    codecs: Mapping[str, int]
    groups: tuple[Group, ...]
    tensors: tuple[Weight, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    layers: LayerTable | None = None
    store: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        what = f"{printable(self.architecture, 60)}, " if self.architecture else ""
        figures = f"{len(self.tensors)} tensors, {size(self.nbytes)}, {self.bpw:.3f} bits per weight"
        return f"<Inspection {printable(self.path)} ({self.format}): {what}{figures}>"

    def _repr_html_(self) -> str:
        rows = (
            (g.pattern, g.count, ", ".join(str(list(s)) for s in g.shapes[:4]), g.codec, size(g.nbytes), f"{g.bpw:.3f}")
            for g in self.groups
        )
        columns = ("tensors", "count", "shapes", "codec", "size", "bits per weight")
        return Table(repr(self).strip("<>"), columns, rows, len(self.groups), self.notes).html()

    def rows(self) -> list[Row]:
        """One row per tensor: tensor, shape, weights, bytes, bpw, codec."""
        return [{**tensor_columns(w.name, w.shape, w.nbytes), "codec": str(w.codec)} for w in self.tensors]

    @property
    def bpw(self) -> float:
        """Effective bits per weight: all tensor bytes over all weights."""
        return 8 * self.nbytes / max(1, self.weights)

    def to_json(self) -> dict[str, Any]:
        """The values as JSON-compatible types."""
        return {
            "path": self.path,
            "format": self.format,
            "why": self.why,
            "dialect": self.dialect,
            "architecture": self.architecture,
            "weights": self.weights,
            "bytes": self.nbytes,
            "bpw": self.bpw,
            "codecs": dict(self.codecs),
            "notes": list(self.notes),
            **({"store": dict(self.store)} if self.store else {}),
            **(
                {
                    "layers": [
                        dict(zip(self.layers.columns, words, strict=True)) | {"layers": n}
                        for n, words in self.layers.rows
                    ]
                }
                if self.layers
                else {}
            ),
            "metadata": {k: shown(v) for k, v in self.metadata.items()},
            "tensors": [
                {"name": w.name, "shape": list(w.shape), "codec": str(w.codec), "bytes": w.nbytes, "bpw": w.bpw}
                for w in self.tensors
            ],
        }


def shown(value: Any, limit: int = 8) -> Any:
    """A metadata value for display: long arrays as length and first entries."""
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if isinstance(value, Mapping):
        return f"{len(value)} entries"
    if isinstance(value, Sequence) or hasattr(value, "__len__"):
        n = len(value)
        head = [shown(value[i], 4) for i in range(min(n, limit))]
        return (
            [x.item() if hasattr(x, "item") else x for x in head]
            if n <= limit
            else {"length": n, "first": [x.item() if hasattr(x, "item") else x for x in head]}
        )
    return value.item() if hasattr(value, "item") else str(value)


def inspect(
    path: str | os.PathLike[str], *, tensors: str | None = None, ternary_layout: str | None = None
) -> Inspection:
    """Summarize a checkpoint. tensors: a glob that limits the listed tensors. Raises InputError."""
    form, evidence = detect(path)
    checkpoint = open_as(form, path, {"ternary_layout": ternary_layout})
    chosen = tuple(w for w in checkpoint.values() if tensors is None or fnmatchcase(w.name, tensors))
    codecs: dict[str, int] = {}
    for w in chosen:
        codecs[str(w.codec)] = codecs.get(str(w.codec), 0) + math.prod(w.shape)
    dialect = f"{checkpoint.dialect.name}: {checkpoint.dialect.why}" if checkpoint.dialect else ""
    return Inspection(
        path=shown_path(path),
        format=checkpoint.format,
        why=evidence.why,
        dialect=dialect,
        architecture=architecture_of(checkpoint),
        weights=sum(math.prod(w.shape) for w in chosen),
        nbytes=sum(w.nbytes for w in chosen),
        codecs=dict(sorted(codecs.items(), key=lambda item: -item[1])),
        groups=_groups(chosen),
        tensors=chosen,
        store=description(path),
        metadata=checkpoint.metadata,
        notes=checkpoint.notes,
        layers=layer_table(form.layer_types(checkpoint))
        if tensors is None and isinstance(form, ReportsLayerTypes)
        else None,
    )


def architecture_of(checkpoint: Checkpoint) -> str:
    """The architecture name in the file; "" if there is none."""
    if isinstance(name := checkpoint.metadata.get("general.architecture"), str):
        return name
    architectures = checkpoint.config.get("architectures")
    first = (
        architectures[0] if isinstance(architectures, list) and architectures else checkpoint.config.get("model_type")
    )
    return first if isinstance(first, str) else ""


def _groups(weights: Sequence[Weight]) -> tuple[Group, ...]:
    """Tensors whose names differ only in layer numbers, per codec, in file order."""
    groups: dict[tuple[str, str], list[Weight]] = {}
    for w in weights:
        groups.setdefault((re.sub(r"(?<=\.)\d+(?=\.)", "*", w.name), str(w.codec)), []).append(w)
    return tuple(
        Group(
            pattern,
            len(ws),
            tuple(dict.fromkeys(w.shape for w in ws)),
            codec,
            sum(math.prod(w.shape) for w in ws),
            sum(w.nbytes for w in ws),
        )
        for (pattern, codec), ws in groups.items()
    )
