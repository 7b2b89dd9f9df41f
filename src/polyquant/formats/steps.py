"""One tensor of a conversion: the planned `Step`, and the `Piece`s it produces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from polyquant.capabilities import CutsParts, DecodesRows, PacksRows, claims
from polyquant.errors import UnsupportedError
from polyquant.operations import Matrix, Same, Stack
from polyquant.ops.metrics import ErrorSums
from polyquant.rows import matrix_name, parted
from polyquant.types import F32, Action, Codec, Floats, Parts, Shape, TensorMap, TensorSpec, TrellisCodes, as_matrix

__all__ = [
    "BLOCK_WEIGHTS", "TILE_WEIGHTS", "Piece", "Progress", "Step", "by_blocks", "cuts_parts", "importance_shapes",
    "shared_importance", "stacks_parts",
]  # fmt: skip

BLOCK_WEIGHTS = 1 << 20
"""Weights per row block: large enough to amortize Python's overhead, small enough to stay in cache."""
TILE_WEIGHTS = 1 << 24
"""Weights that are in memory at once, packed, of a weight that cannot be cut by rows in the file."""


@dataclass(frozen=True, slots=True)
class Step:
    """One tensor of a plan.

    source: codec of all sources, or of the first if they differ; None for a constant and for tensors that a calibration
    computes. sources: all source tensors. cut: whether row blocks of the target can be made separately, even if not
    read separately; None: if its codec is row_sliced. instead_of: the requested codec if its blocks do not fit. exact:
    codes are kept and every weight stays equal, so that no error needs to be measured.
    """

    map: TensorMap
    source: Codec | None
    target: Codec
    action: Action
    why: str
    nbytes: int
    cut: bool | None = None
    sources: tuple[TensorSpec, ...] = ()
    instead_of: str = ""
    exact: bool = False

    @property
    def spec(self) -> TensorSpec:
        """The tensor to be written."""
        return TensorSpec(self.map.target, self.map.shape, self.target)

    @property
    def weights(self) -> int:
        """Number of weights."""
        return math.prod(self.map.shape)

    @property
    def inputs(self) -> str:
        """The source tensor with the same inputs, for calibration; for one matrix of a stack "name[3]".

        Raises UnsupportedError if the columns change, and for rows of several matrices of a stack.
        """
        shapes = [s.shape for s in self.sources]
        if shapes and not self.map.op.keeps_rows(shapes):
            raise UnsupportedError(
                "has other columns than its source, so their inputs cannot be calibrated",
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
                "consists of rows of several matrices of a stack, which have different inputs",
                tensor=self.map.target,
                found=f"{len(matrices)} matrices of {source}",
            )
        return matrix_name(source, int(matrices[0]))

    @property
    def streams(self) -> bool:
        """True if the step can run row block by row block. A stack can if its sources are read completely, one after
        the other.
        """
        cut = self.target.row_sliced if self.cut is None else self.cut
        if self.source is None or not cut:
            return False
        if self._by_rows:
            one_codec = len({s.codec.name for s in self.sources}) <= 1
            return one_codec or self.target.form is Floats or self.action not in (Action.COPY, Action.TRANSCODE)
        return isinstance(self.map.op, Stack) and self.action not in (Action.COPY, Action.TRANSCODE)

    @property
    def _by_rows(self) -> bool:
        """True if every source can be read by rows."""
        return self.source is not None and all(c.row_sliced for c in (self.source, *(s.codec for s in self.sources)))

    @property
    def quantizes(self) -> bool:
        """True if codes are made from floats, those of the source or decoded ones."""
        return self.action in (Action.QUANTIZE, Action.REQUANTIZE)

    @property
    def searches(self) -> bool:
        """True for a trellis search, which takes hours where other steps take minutes."""
        return self.target.form is TrellisCodes and self.quantizes

    @property
    def alone(self) -> bool:
        """True if only one such step may run at a time, because it holds a tensor as floats."""
        source = self.source
        return self.cut is False or TrellisCodes in (self.target.form, source.form if source is not None else None)

    @property
    def block_rows(self) -> int:
        """Rows per block of a streaming step."""
        lines = math.lcm(self.target.granule[0], self._together)
        kept = self.action is Action.TRANSCODE and self.target.form is not Floats  # without float32: twice as large
        weights = 2 * BLOCK_WEIGHTS if kept else BLOCK_WEIGHTS
        return max(1, weights // max(1, as_matrix(self.map.shape)[1] * lines)) * lines

    @property
    def _together(self) -> int:
        """Number of target rows that must be read together."""
        if not self.sources:
            return 1
        shapes = [s.shape for s in self.sources]
        return self.map.op.together(shapes) if self._by_rows or by_blocks(self) else max(1, as_matrix(shapes[0])[0])


def by_blocks(step: Step) -> bool:
    """True for a step that cannot be cut in the files, but takes row blocks out of complete parts, or fills them."""
    same = isinstance(step.map.op, Same) and len(step.sources) == 1 and len(step.map.shape) == 2
    if not same or step.streams or step.map.ternarize or step.cut is not None:
        return False
    source = step.sources[0].codec
    readable = source.row_sliced or claims(source, PacksRows)  # type: ignore[type-abstract]
    if not readable and step.action not in (Action.COPY, Action.TRANSCODE):
        readable = claims(source, DecodesRows) and source.decodes_rows  # type: ignore[type-abstract]
    return readable and (step.target.row_sliced or claims(step.target, PacksRows))  # type: ignore[type-abstract]


def cuts_parts(step: Step) -> bool:
    """True for a step that reads or writes blocks of rows of parts that have one entry for several rows, or for all."""
    op = step.map.op
    single = len(step.sources) == 1 and (isinstance(op, Same) or (isinstance(op, Matrix) and _apart(step.sources[0])))
    if not single or step.streams or step.map.ternarize or step.cut is not None:
        return False
    ends = (step.sources[0].codec, step.target)
    return any(not c.row_sliced for c in ends) and all(
        c.row_sliced or claims(c, CutsParts)  # type: ignore[type-abstract]
        for c in ends
    )


def _apart(stack: TensorSpec) -> bool:
    """True for a stack whose matrices can be read separately."""
    return len(stack.shape) == 3 and (stack.codec.row_sliced or parted(stack.codec, stack.shape))


def stacks_parts(step: Step) -> bool:
    """True for a step that makes a stack of small floats, each matrix with separate scales, of matrices."""
    if not isinstance(step.map.op, Stack) or step.streams or step.map.ternarize or step.cut is not None:
        return False
    readable = all(s.codec.row_sliced or claims(s.codec, CutsParts) for s in step.sources)  # type: ignore[type-abstract]
    return readable and parted(step.target, step.map.shape) and all(len(s.shape) == 2 for s in step.sources)


def importance_shapes(shape: Shape) -> tuple[Shape, ...]:
    """The possible shapes of a tensor's importance: [K], and [experts, K] for a stack."""
    rows, k = as_matrix(shape)
    return ((k,), (rows // max(1, shape[-2]), k)) if len(shape) > 2 else ((k,),)


@dataclass(frozen=True, slots=True)
class Piece:
    """Parts of rows [start, start + rows) of the target.

    error: None if nothing was lost or it was not measured; note: about changed scales. offsets: bytes before each part,
    instead of start and rows, where parts are pieces of other spans.
    """

    parts: Parts
    start: int = 0
    rows: int = 1
    error: ErrorSums | None = None
    note: str = ""
    offsets: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a long call: units done and in total (weights, bytes or tokens; next to a trellis search, other
    weights count little). tensor: the tensor in work, or the status.
    """

    done: int
    total: int
    tensor: str
    seconds: float


def shared_importance(importance: F32 | None) -> F32 | None:
    """Reduce importance [experts, K] to the mean [K], for codes that mix the rows of all experts."""
    return importance if importance is None or importance.ndim == 1 else importance.mean(axis=0)
