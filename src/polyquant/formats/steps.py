"""One tensor of a conversion: what becomes of it (`Step`), and the bytes that come out (`Piece`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from polyquant.errors import UnsupportedError
from polyquant.operations import Stack
from polyquant.ops.metrics import ErrorSums
from polyquant.rows import matrix_name
from polyquant.types import F32, Action, Codec, Floats, Parts, Shape, TensorMap, TensorSpec, TrellisCodes, as_matrix

__all__ = ["BLOCK_WEIGHTS", "Piece", "Progress", "Step", "importance_shapes", "shared_importance"]

BLOCK_WEIGHTS = 1 << 20
"""Weights per row block: large enough to make Python's share small, small enough to stay in cache."""


@dataclass(frozen=True, slots=True)
class Step:
    """One tensor. `source` is None for a constant that the translation brings, and for what a calibration finds.

    It is the codec of all sources, of the first where they differ; `sources` says each one's.
    cut: whether row blocks of the target can be made apart, though maybe not read apart; None: as its codec says.
    """

    map: TensorMap
    source: Codec | None
    target: Codec
    action: Action
    why: str
    nbytes: int
    cut: bool | None = None
    sources: tuple[TensorSpec, ...] = ()

    @property
    def spec(self) -> TensorSpec:
        """What is written."""
        return TensorSpec(self.map.target, self.map.shape, self.target)

    @property
    def weights(self) -> int:
        """Number of weights."""
        return math.prod(self.map.shape)

    @property
    def inputs(self) -> str:
        """The source tensor whose inputs are the target's, as calibration asks for them: of a stack the one matrix that is taken, "name[3]".

        Raises UnsupportedError where columns become others, and for rows of several matrices of a stack.
        """
        shapes = [s.shape for s in self.sources]
        if shapes and not self.map.op.keeps_rows(shapes):
            raise UnsupportedError(
                "is made of other columns than its source has: no calibration tells what they read",
                tensor=self.map.target,
                found=self.map.origin,
            )
        source = self.map.source
        if not shapes or len(shapes[0]) < 3 or len(self.map.shape) > 2:
            return source
        (rows,) = self.map.op.needs(np.arange(as_matrix(self.map.shape)[0]), shapes)
        matrices = np.unique(rows // shapes[0][-2])
        if len(matrices) != 1:
            raise UnsupportedError(
                "is made of rows of several matrices of a stack, which read different inputs",
                tensor=self.map.target,
                found=f"{len(matrices)} matrices of {source}",
            )
        return matrix_name(source, int(matrices[0]))

    @property
    def streams(self) -> bool:
        """True if the step can go row block by row block. A stack can where its sources are read whole, one after the other."""
        cut = self.target.row_sliced if self.cut is None else self.cut
        if self.source is None or not cut:
            return False
        if self._by_rows:
            alike = len({s.codec.name for s in self.sources}) <= 1
            return alike or self.target.form is Floats or self.action not in (Action.COPY, Action.TRANSCODE)
        return isinstance(self.map.op, Stack) and self.action not in (Action.COPY, Action.TRANSCODE)

    @property
    def _by_rows(self) -> bool:
        """True if every source is read by rows."""
        return self.source is not None and all(c.row_sliced for c in (self.source, *(s.codec for s in self.sources)))

    @property
    def searches(self) -> bool:
        """True if codes of a trellis are searched: hours of work where other steps take minutes."""
        return self.target.form is TrellisCodes and self.action in (Action.QUANTIZE, Action.REQUANTIZE)

    @property
    def alone(self) -> bool:
        """True if only one step of its kind may be in work: it holds a tensor as floats."""
        source = self.source
        return self.cut is False or TrellisCodes in (self.target.form, source.form if source is not None else None)

    @property
    def block_rows(self) -> int:
        """Rows per block of a streaming step."""
        lines = math.lcm(self.target.granule[0], self._together)
        return max(1, BLOCK_WEIGHTS // max(1, as_matrix(self.map.shape)[1] * lines)) * lines

    @property
    def _together(self) -> int:
        """Target rows that are read together."""
        if not self.sources:
            return 1
        shapes = [s.shape for s in self.sources]
        return self.map.op.together(shapes) if self._by_rows else max(1, as_matrix(shapes[0])[0])


def importance_shapes(shape: Shape) -> tuple[Shape, ...]:
    """The shapes that the importance of a tensor may have: [K], and [experts, K] of a stack."""
    rows, k = as_matrix(shape)
    return ((k,), (rows // max(1, shape[-2]), k)) if len(shape) > 2 else ((k,),)


@dataclass(frozen=True, slots=True)
class Piece:
    """parts: of rows [start, start + rows) of the target. error: None where nothing was lost or it was not measured; note: what the scale did."""

    parts: Parts
    start: int = 0
    rows: int = 1
    error: ErrorSums | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """Told after every row block: weights done and in all (beside a search for trellis codes the others count little), and where we are."""

    done: int
    total: int
    tensor: str
    seconds: float


def shared_importance(importance: F32 | None) -> F32 | None:
    """[K] of [K], or of a stack's [experts, K]: codes that mix the rows of all experts weigh them alike."""
    return importance if importance is None or importance.ndim == 1 else importance.mean(axis=0)
