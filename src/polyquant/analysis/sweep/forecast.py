"""The expected size and time of a candidate, from its plan and the measured speed of this machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polyquant.analysis.inspect import Inspection
from polyquant.analysis.speed import NEW, PROMPT
from polyquant.analysis.sweep.candidates import Candidate
from polyquant.conversion.convert import plan
from polyquant.conversion.estimate import Workload, forward_seconds
from polyquant.conversion.speed import Speed, measure_speed
from polyquant.conversion.steps import Plan
from polyquant.errors import PolyquantError, UnusedCalibrationError
from polyquant.ops.native import cores
from polyquant.types import Floats

__all__ = ["Forecast", "forecasts", "source_seconds"]

_PROCESS = 4.0
"""Seconds to start the two processes of a candidate, and least time of the speed measurement."""
_BANDWIDTH = 5e9
"""Bytes per second that decoding reads."""
_RUNS = 4
"""Passes over the prompt: three for the speed, and the first load."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected values: bytes of the tensors and of the files, seconds to convert and to measure. refused: the reason if
    the candidate cannot be planned.
    """

    candidate: Candidate
    nbytes: int = 0
    files: int = 0
    convert: float = 0.0
    measure: float = 0.0
    refused: str = ""

    @property
    def seconds(self) -> float:
        """Expected time of the whole candidate."""
        return self.convert + self.measure


def forecasts(
    source: str, candidates: Sequence[Candidate], tokens: int, threads: int | None
) -> tuple[list[Forecast], Speed]:
    """Plan every candidate. tokens: of the evaluation. Returns the forecasts and the speed of this machine."""
    plans = [_planned(source, c) for c in candidates]
    speed = measure_speed([s for _, p in plans if isinstance(p, Plan) for s in p.steps])
    count = min(threads or cores(), cores())
    out = []
    for candidate, made in plans:
        if isinstance(made, str):
            out.append(Forecast(candidate, refused=made))
            continue
        work = sum(load.seconds for load in Workload(made, speed).loads(1))
        nbytes, files = _sizes(made, candidate.options.get("target_bpw"))
        passes = forward_seconds(made.steps, tokens + _RUNS * PROMPT, speed) / count
        out.append(Forecast(candidate, nbytes, files, _PROCESS + work / count, passes + 3 * NEW * nbytes / _BANDWIDTH))
    return out, speed


def source_seconds(source: Inspection, made: Sequence[Forecast], tokens: int) -> float:
    """Expected time to measure the source: like the slowest candidate, with its own bytes."""
    return max((f.measure for f in made), default=0.0) * 2 + 3 * NEW * source.nbytes / _BANDWIDTH + _PROCESS


def _planned(source: str, candidate: Candidate) -> tuple[Candidate, Plan | str]:
    """The plan, at fixed bits in place of a target size, whose plan measures the model; or the reason for none.

    The candidate loses a calibration that it does not use.
    """
    options = dict(candidate.options)
    if (target := options.pop("target_bpw", None)) is not None:
        options["bits"] = min(8, max(2, math.ceil(target)))
    to: Any = options.pop("to")
    try:
        return candidate, plan(source, to, **options)
    except UnusedCalibrationError:
        return _planned(source, candidate.without("calibration"))
    except PolyquantError as problem:
        return candidate, str(problem)


def _sizes(made: Plan, target: float | None) -> tuple[int, int]:
    """Bytes of the tensors and of the files. target: bits per quantized weight, for a plan at fixed bits."""
    tensors = sum(s.nbytes for s in made.steps)
    if target is None:
        return tensors, made.nbytes
    quantized = [s for s in made.steps if s.target.form is not Floats]
    change = int(target * sum(s.weights for s in quantized) / 8) - sum(s.nbytes for s in quantized)
    return tensors + change, made.nbytes + change
