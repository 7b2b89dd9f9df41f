"""Quantize linear layers of a Hugging Face folder with the least error on calibration inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from polyquant.calibration.hessians import Hessians
from polyquant.capabilities import FitsInputs, claims
from polyquant.errors import UnsupportedError
from polyquant.formats.protocol import Context
from polyquant.formats.steps import Piece, Step
from polyquant.ops.metrics import ErrorSums, error_sums
from polyquant.types import Action

__all__ = ["SchemeWorker", "fitted"]


def fitted(step: Step) -> bool:
    """True for a matrix whose codes are searched with the inputs of its layer."""
    return (
        step.action in (Action.QUANTIZE, Action.REQUANTIZE)
        and len(step.map.shape) == 2
        and claims(step.target, FitsInputs)  # type: ignore[type-abstract]
    )


class SchemeWorker:
    """A Worker (formats.protocol). text: the calibration text."""

    def __init__(self, context: Context, text: str) -> None:
        self._context, self._text = context, text
        self._hessians: Hessians | None = None

    def order(self, steps: Sequence[Step]) -> list[Step]:
        """The steps in the order in which their inputs become available."""
        wanted = [s.inputs for s in steps if fitted(s)]
        if not wanted:
            return list(steps)
        self._context.tick(0.0)
        stages = self._context.stages(self._text)
        if not any(set(wanted) & set(names) for names in stages.names):
            raise UnsupportedError(
                "calibration reaches none of the weights to be quantized",
                file=self._context.source.path,
                expected=f"inputs of {wanted[0]}",
                hint="omit --calibration",
            )
        others = [s.inputs for s in self._context.steps if fitted(s)] if self._context.shared else []
        self._hessians = hessians = Hessians(stages, wanted, self._context.tick, others)
        return sorted(steps, key=lambda s: hessians.order(s.inputs) if fitted(s) else -1)

    def takes(self, step: Step) -> bool:
        """True for searched matrices."""
        return fitted(step)

    def pieces(self, step: Step, rows: slice | None, *, measure: bool) -> Iterator[Piece]:
        """Codes of a whole weight. Raises CodecError."""
        assert self._hessians is not None
        target = step.target
        assert isinstance(target, FitsInputs)
        hessian, note = self._hessians.of(step.inputs)
        w = self._context.floats(step)
        parts = target.pack(target.quantize(w) if hessian is None else target.quantize_for(w, hessian))
        error = error_sums(w, target.dequantize(parts, step.map.shape)) if measure else None
        yield Piece(parts, error=error, note=f"{step.map.target}: {note}" if note else "")

    def stated(self, step: Step, error: ErrorSums) -> Mapping[str, NDArray[Any]]:
        """No part: the folder does not state errors."""
        return {}
