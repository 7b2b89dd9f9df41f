"""One side of a comparison of two checkpoints: a tensor made from stored weights, and its rows as floats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polyquant.operations import SAME, Index, Operation
from polyquant.quantizers.absmean import absmean_floats
from polyquant.rows import float_rows, stored_rows, whole_floats
from polyquant.types import F32, U8, Floats, Shape, Ternary, Weight, as_matrix

__all__ = ["Reader", "Side"]


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a tensor: `op` of some weights of its checkpoint.

    columns [K], rows [R]: factors of the values, None for none (smoothing). slack: least bound of the relative error.
    """

    weights: tuple[Weight, ...]
    shape: Shape
    op: Operation = SAME
    ternarize: bool = False
    columns: F32 | None = None
    rows: F32 | None = None
    slack: float = 0.0

    @property
    def codec(self) -> str:
        """Names of all codecs, for display."""
        return ", ".join(dict.fromkeys(str(w.codec) for w in self.weights))

    @property
    def is_ternary(self) -> bool:
        """True if its values are ternary codes."""
        return self.ternarize or all(w.codec.form is Ternary for w in self.weights)

    @property
    def is_float(self) -> bool:
        """True if its values are stored floats."""
        return not self.ternarize and all(w.codec.form is Floats for w in self.weights)

    @property
    def streams(self) -> bool:
        """True if its rows can be read one block after the other; else it is decoded as a whole."""
        shapes = [w.shape for w in self.weights]
        return not self.ternarize and all(w.codec.row_sliced for w in self.weights) and self.op.together(shapes) == 1

    @property
    def origin(self) -> str:
        """The stored tensors, for display."""
        more = f" and {len(self.weights) - 1} more" if len(self.weights) > 1 else ""
        return self.weights[0].name + more


class Reader:
    """Rows of one side as floats. Sources that cannot be read by rows are decoded once."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self._whole = _whole(side)
        self.blocks = _blocks(side) if self._whole is None else None
        """The codec of rows that are stored in blocks, one part, and not changed."""

    def rows(self, part: slice | Index) -> F32:
        """Rows [a, b), or those of an index, as float32 [n, K]."""
        x = float_rows(self.side.weights, self.side.op, part) if self._whole is None else self._whole[part]
        if self.side.columns is not None:
            x = x * self.side.columns
        if self.side.rows is not None:
            x = x * self.side.rows[part, None]
        return x

    def stored(self, part: slice) -> U8:
        """Rows [a, b) in the codec `blocks`, uint8 [b - a, bytes]."""
        rows = stored_rows(self.side.weights, self.side.op, part)["blocks"]
        return np.ascontiguousarray(rows).reshape(part.stop - part.start, -1).view(np.uint8)

    def picked(self, index: list[int]) -> F32:
        """These rows as float32 [n, K]."""
        k = as_matrix(self.side.shape)[1]
        return self.rows(np.asarray(index, np.int64)) if index else np.empty((0, k), np.float32)


def _blocks(side: Side) -> str | None:
    """The codec if rows of the side are stored rows of one part "blocks"."""
    if side.columns is not None or side.rows is not None or not side.op.keeps_rows([w.shape for w in side.weights]):
        return None
    stored = {w.codec.name if list(w.arrays) == ["blocks"] else None for w in side.weights}
    return stored.pop() if len(stored) == 1 else None


def _whole(side: Side) -> F32 | None:
    """The tensor [rows, K] if it cannot be read by rows, else None."""
    if side.streams:
        return None
    if side.ternarize:
        w = side.op.reference([absmean_floats(w).reshape(w.shape) for w in side.weights])
    else:
        w = whole_floats(side.weights, side.op)
    return np.ascontiguousarray(np.asarray(w, np.float32).reshape(as_matrix(side.shape)))
