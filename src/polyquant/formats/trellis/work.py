"""Search trellis codes: for the least error of the weights, or of the layers' outputs on calibration inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.calibration.hessians import Hessians
from polyquant.codecs.trellis import Trellis
from polyquant.errors import UnsupportedError
from polyquant.formats.protocol import Context
from polyquant.formats.steps import Piece, Step, shared_importance
from polyquant.formats.trellis.config import mse_text
from polyquant.operations import Same
from polyquant.ops.metrics import ErrorSums, error_sums
from polyquant.quantizers.ldlq import quantize_trellis
from polyquant.types import Action

__all__ = ["TrellisWorker"]


class TrellisWorker:
    """A Worker (formats.protocol). text: calibration text for Hessians; None: only the weights matter."""

    def __init__(self, context: Context, text: str | None) -> None:
        self._context, self._text = context, text
        self._hessians: Hessians | None = None

    def order(self, steps: Sequence[Step]) -> list[Step]:
        """The steps; with calibration, in the order in which their inputs become available."""
        wanted = [s.inputs for s in steps if s.searches] if self._text is not None else []
        if self._text is None or not wanted:
            return list(steps)
        self._context.tick(0.0)
        path = self._context.source.path
        stages = self._context.stages(self._text)
        if not any(set(wanted) & set(names) for names in stages.names):
            raise UnsupportedError(
                "calibration reaches none of the weights to be quantized",
                file=path,
                expected=f"inputs of {wanted[0]}",
                hint="use --method trellis_viterbi, which needs no calibration",
            )
        self._hessians = hessians = Hessians(stages, wanted, self._context.tick, self._others())
        return sorted(steps, key=lambda s: hessians.order(s.inputs) if s.searches else -1)

    def _others(self) -> list[str]:
        """The inputs that other processes need if they share this calibration."""
        return [s.inputs for s in self._context.steps if s.searches] if self._context.shared else []

    def takes(self, step: Step) -> bool:
        """True if codes change; copied or unchanged codes need no search."""
        kept = step.action in (Action.COPY, Action.TRANSCODE) and isinstance(step.map.op, Same)
        return isinstance(step.target, Trellis) and not kept

    def pieces(self, step: Step, rows: slice | None, *, measure: bool) -> Iterator[Piece]:
        """Codes of a whole weight. The error is always measured, because the folder states it."""
        target, name = step.target, step.map.target
        assert isinstance(target, Trellis)
        h, note = shared_importance(self._context.importance.get(name)), ""
        if self._hessians is not None:
            h, note = self._hessians.of(step.inputs)
        w = self._context.floats(step)
        result = quantize_trellis(target, w, h)
        parts = target.pack(result.codes)
        notes = "; ".join(f"{name}: {n}" for n in (note, result.note) if n)
        yield Piece(parts, error=error_sums(w, target.dequantize(parts, step.map.shape)), note=notes)

    def stated(self, step: Step, error: ErrorSums) -> Mapping[str, NDArray[Any]]:
        """The mean squared error in quantization_config.json: 14 characters."""
        if not isinstance(step.target, Trellis):
            return {}
        return {"mse": np.frombuffer(mse_text(error.dd / max(1, error.count)), np.uint8)}
