"""Quantize linear layers of a Hugging Face folder on calibration inputs: least error, scales of static inputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.calibration.hessians import GatheringStages, Hessians, Tick, part_of
from polyquant.calibration.statistics import Extremes, InputSizes
from polyquant.capabilities import FitsInputs, ScalesInputs, claims
from polyquant.codecs.affine_codec import AffineCodec
from polyquant.errors import InputError, UnsupportedError
from polyquant.formats.huggingface.scaling import Scaling
from polyquant.formats.protocol import Context
from polyquant.formats.smoothing import links as smoothed_links
from polyquant.formats.steps import Piece, Step
from polyquant.ops.metrics import ErrorSums, error_sums
from polyquant.types import F32, Floats, as_matrix

__all__ = ["SchemeWorker", "calibrated", "fitted", "measured"]

_NUMBER = re.compile(r"(?<=\.experts\.)\d+(?=\.)|(?<=\[)\d+(?=\]$)")
"""The number of an expert in the name of its matrix, which is a tensor, or a part of a stack (rows.matrix_name)."""


def fitted(step: Step) -> bool:
    """True for a matrix whose codes are searched with the inputs of its layer."""
    return step.quantizes and len(step.map.shape) == 2 and claims(step.target, FitsInputs)  # type: ignore[type-abstract]


def measured(step: Step) -> bool:
    """True for a matrix whose inputs are quantized with a scale that is measured on a text."""
    target = step.target
    return step.quantizes and claims(target, ScalesInputs) and target.scales_inputs  # type: ignore[type-abstract]


def calibrated(step: Step) -> bool:
    """True for a matrix that is quantized with the inputs of its layer."""
    return fitted(step) or measured(step)


class SchemeWorker:
    """A Worker (formats.protocol). text: the calibration text."""

    def __init__(self, context: Context, text: str) -> None:
        self._context, self._text = context, text
        self._hessians: Hessians | None = None
        self._scaling: Scaling | None = None
        self._values: dict[str, F32] = {}
        self._ranges: dict[str, tuple[F32, F32]] = {}

    def order(self, steps: Sequence[Step]) -> list[Step]:
        """The steps in the order in which their inputs become available. Scaling and ranges are computed here."""
        wanted = [s.inputs for s in steps if fitted(s)]
        static = frozenset(s.inputs for s in self._context.steps if measured(s))
        if not wanted and not static and self._context.options.effort != "max":
            return list(steps)
        self._context.tick(0.0)
        stages = self._context.stages(self._text)
        if not any((static | set(wanted)) & set(names) for names in stages.names):
            raise UnsupportedError(
                "calibration reaches none of the weights to be quantized",
                file=self._context.source.path,
                expected=f"inputs of {[*wanted, *sorted(static)][0]}",
                hint="omit --calibration",
            )
        scaled = self._context.options.effort == "max"
        runs, tick = scaled + bool(static) + bool(wanted), self._context.tick  # of the float model on the text
        if scaled:
            self._scaling = self._scale(stages, part_of(tick, 0, runs))
            self._values = self._changed_vectors(self._scaling)
        if static:
            self._ranges = self._measure(stages, static, part_of(tick, scaled, runs))
        if not wanted:
            return list(steps)
        others = [s.inputs for s in self._context.steps if fitted(s)] if self._context.shared else []
        self._hessians = hessians = Hessians(stages, wanted, part_of(tick, runs - 1, runs), others)
        return sorted(steps, key=lambda s: hessians.order(s.inputs) if fitted(s) else -1)

    def _scale(self, stages: GatheringStages, tick: Tick) -> Scaling:
        """Run the float model on the text and choose the scales of all layers, in their order."""
        context = self._context
        codecs = {s.map.source: s.target for s in context.steps if fitted(s) and isinstance(s.target, AffineCodec)}
        scaling = Scaling(context.source, "awq", codecs=codecs)
        links = smoothed_links(context.source, "awq")
        wanted = frozenset(link.readers[0] for link in links)
        last = max((i for i, names in enumerate(stages.names) if wanted & set(names)), default=-1)
        for i in range(last + 1):
            gathered = stages.gather(i, wanted, part_of(tick, i, last + 1), InputSizes)
            for link in links:
                if link.readers[0] in gathered:
                    scaling.add(link, gathered)
        return scaling

    @staticmethod
    def _measure(stages: GatheringStages, static: frozenset[str], tick: Tick) -> dict[str, tuple[F32, F32]]:
        """Run the float model on the text: minimum and maximum of every channel, by the tensor that reads them."""
        found: dict[str, Extremes] = {}
        last = max(i for i, names in enumerate(stages.names) if static & set(names))
        for i in range(last + 1):
            found |= stages.gather(i, static, part_of(tick, i, last + 1), Extremes)
        return {name: (e.low, e.high) for name, e in found.items() if e.low is not None and e.high is not None}

    def _range(self, name: str) -> tuple[float, float]:
        """Minimum and maximum of a layer's inputs. An expert that the text does not reach has the range of the others
        of its layer. Raises InputError if nothing reaches it, or the inputs are not finite.
        """
        names = [name]
        if name not in self._ranges:
            alike = _NUMBER.sub("", name)
            names = [n for n in self._ranges if _NUMBER.sub("", n) == alike]
        if not names:
            hint = "give a longer text, or keep it float: --rule"
            raise InputError("no inputs seen to measure their scale", tensor=name, hint=f"{hint} '{name}=bf16'")
        low, high = (f([self._ranges[n][i] for n in names], axis=0) for i, f in enumerate((np.min, np.max)))
        scale = None if self._scaling is None else self._scaling.columns.get(name)
        if scale is not None:
            low, high = low / scale, high / scale
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise InputError("inputs of the float model are not finite on the calibration text", tensor=name)
        return float(low.min()), float(high.max())

    def _changed_vectors(self, scaling: Scaling) -> dict[str, F32]:
        """Norms and biases after scaling, by name."""
        out = dict(scaling.norms)
        for name in scaling.rows:
            bias = self._context.source.weights.get(f"{name.removesuffix('.weight')}.bias")
            if bias is not None:
                changed = scaling.bias(name, bias.codec.dequantize(bias.read(), bias.shape))
                out[bias.name] = np.asarray(changed, np.float32)
        return out

    def takes(self, step: Step) -> bool:
        """True for searched matrices, those with scales of the inputs, and tensors that scaling changes."""
        if calibrated(step):
            return True
        scaling, names = self._scaling, step.map.sources
        return scaling is not None and any(
            n in self._values or n in scaling.columns or n in scaling.rows for n in names
        )

    def pieces(self, step: Step, rows: slice | None, *, measure: bool) -> Iterator[Piece]:
        """Codes of a whole weight, or the changed floats. Raises CodecError."""
        target, scaling = step.target, self._scaling
        if not calibrated(step):
            yield self._changed(step, rows)
            return
        hessian, note = None, ""
        if fitted(step):
            assert self._hessians is not None
            hessian, note = self._hessians.of(step.inputs)
        w = self._context.floats(step)
        if scaling is not None:
            w = scaling.weight(step.map.source, w, slice(0, len(w)))
            scale = scaling.columns.get(step.inputs)
            if hessian is not None and scale is not None:
                hessian = np.asarray(hessian / scale[:, None] / scale, np.float32)
        if hessian is None:
            codes = target.quantize(w)
        else:
            assert isinstance(target, FitsInputs)
            codes = target.quantize_for(w, hessian)
        if measured(step):
            assert isinstance(target, ScalesInputs)
            codes = target.with_inputs(codes, *self._range(step.inputs))
        parts = target.pack(codes)
        error = error_sums(w, target.dequantize(parts, step.map.shape)) if measure else None
        yield Piece(parts, error=error, note=f"{step.map.target}: {note}" if note else "")

    def _changed(self, step: Step, rows: slice | None) -> Piece:
        """A vector or an unquantized matrix that scaling changes, or rows [a, b) of it."""
        assert self._scaling is not None
        values = self._values.get(step.map.source)
        if values is not None:
            return Piece(step.target.pack(Floats(values.reshape(as_matrix(step.map.shape)))))
        w = self._context.floats(step)
        w = self._scaling.weight(step.map.source, w, slice(0, len(w)))
        start, stop = (0, len(w)) if rows is None else (rows.start, rows.stop)
        return Piece(step.target.pack(Floats(w[start:stop])), start, stop - start)

    def stated(self, step: Step, error: ErrorSums) -> Mapping[str, NDArray[Any]]:
        """No part: the folder does not state errors."""
        return {}
