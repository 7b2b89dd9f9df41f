"""Checks and comparisons of headers and small files alone: the data of tensors is not read.

For models at a URL, of which only a few ranges are then fetched, and for a first look at large local ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.analysis.compare import sides
from polyquant.codecs.tl import Tile
from polyquant.errors import PlanError, printable
from polyquant.opening import accepted, detect, look
from polyquant.tables import Row, Table
from polyquant.types import ArraySpec, Checkpoint, StoredArray

__all__ = ["HeaderComparison", "TensorHeaders", "compare_headers", "without_data"]


@dataclass(frozen=True, slots=True)
class _Unread:
    """A part whose data is not read: a types.StoredArray of constants that are valid scales.

    Floats are 1, integers 0. Bytes are 0x3F, since they may be stored floats: 0.75 in float32 and bfloat16.
    """

    spec: ArraySpec

    def view(self) -> NDArray[Any]:
        """Return the whole array, read-only. All rows are one row in memory: an embedding has hundreds of megabytes."""
        integer, is_bytes = np.issubdtype(self.spec.dtype, np.integer), self.spec.dtype == np.uint8
        row = np.full(self.spec.shape[-1:], 0x3F if is_bytes else 0 if integer else 1, self.spec.dtype)
        return np.broadcast_to(row, self.spec.shape)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return entries [start, stop)."""
        return self.view()[start:stop] if self.spec.shape else self.view()


def without_data(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with constants as the data of every tensor."""
    weights = {}
    for weight in checkpoint.values():
        arrays: Mapping[str, StoredArray] = {part: _Unread(array.spec) for part, array in weight.arrays.items()}
        weights[weight.name] = replace(weight, arrays=arrays)
    return replace(checkpoint, weights=weights)


@dataclass(frozen=True, slots=True)
class TensorHeaders:
    """A tensor of both sides: shapes, codecs and stored bytes."""

    name: str
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    a: str
    b: str
    a_bytes: int
    b_bytes: int

    @property
    def fits(self) -> bool:
        """True for equal shapes."""
        return self.a_shape == self.b_shape


@dataclass(frozen=True, slots=True, repr=False)
class HeaderComparison:
    """The common tensors, the names that only one side has, and the metadata keys whose values differ."""

    a: str
    b: str
    tensors: tuple[TensorHeaders, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    metadata: tuple[str, ...] = ()

    @property
    def misfits(self) -> tuple[TensorHeaders, ...]:
        """The tensors whose shapes differ."""
        return tuple(t for t in self.tensors if not t.fits)

    def __repr__(self) -> str:
        counts = f"{len(self.tensors)} tensors, {len(self.misfits)} of different shapes"
        alone = f"{len(self.only_a)} only in the first, {len(self.only_b)} only in the second"
        return f"<HeaderComparison {printable(self.b)} against {printable(self.a)}: {counts}, {alone}>"

    def _repr_html_(self) -> str:
        rows = ((t.name, list(t.a_shape), list(t.b_shape), t.a, t.b, t.a_bytes, t.b_bytes) for t in self.tensors)
        columns = ("tensor", "shape in a", "shape in b", "a", "b", "bytes in a", "bytes in b")
        return Table(repr(self).strip("<>"), columns, rows, len(self.tensors)).html()

    def rows(self) -> list[Row]:
        """One row per common tensor: tensor, a_shape, b_shape, a, b (codecs), a_bytes, b_bytes."""
        return [
            {
                "tensor": t.name, "a_shape": t.a_shape, "b_shape": t.b_shape, "a": t.a, "b": t.b,
                "a_bytes": t.a_bytes, "b_bytes": t.b_bytes,
            }
            for t in self.tensors
        ]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The values as JSON-compatible types."""
        return {
            "a": self.a,
            "b": self.b,
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "metadata": list(self.metadata),
            "tensors": [
                {
                    "name": t.name,
                    "a_shape": list(t.a_shape),
                    "b_shape": list(t.b_shape),
                    "a": t.a,
                    "b": t.b,
                    "a_bytes": t.a_bytes,
                    "b_bytes": t.b_bytes,
                }
                for t in self.tensors
            ],
        }


def compare_headers(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    ternary_layout: str | None = None,
    a_layout: str | None = None,
    tile: Tile | None = None,
) -> HeaderComparison:
    """Compare names, shapes, codecs, sizes and metadata of two checkpoints. Raises InputError, PlanError."""
    left = look(a, ternary_layout=a_layout, **accepted(detect(a)[0], {"tile": tile}))
    right = look(b, ternary_layout=ternary_layout, **accepted(detect(b)[0], {"tile": tile}))
    ours, theirs = sides(left, right)
    common = [name for name in ours if name in theirs]
    if not common:
        raise PlanError(f"no tensor of {right.path} is in {left.path}", hint="are these the same model?")
    tensors = []
    for name in common:
        x, y = ours[name], theirs[name]
        sizes = (sum(w.nbytes for w in side.weights) for side in (x, y))
        tensors.append(TensorHeaders(name, x.shape, y.shape, x.codec, y.codec, *sizes))
    return HeaderComparison(
        str(left.path),
        str(right.path),
        tuple(tensors),
        tuple(n for n in ours if n not in theirs),
        tuple(n for n in theirs if n not in ours),
        _metadata(left, right),
    )


def _metadata(a: Checkpoint, b: Checkpoint) -> tuple[str, ...]:
    """The keys of metadata or config.json whose values differ, of checkpoints with one naming scheme."""
    if a.naming != b.naming:
        return ()
    left, right = (c.metadata if c.naming == "gguf" else c.config for c in (a, b))
    return tuple(
        sorted(key for key in {*left, *right} if key not in left or key not in right or left[key] != right[key])
    )
