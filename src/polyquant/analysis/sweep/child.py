"""One step of a sweep in a separate process: convert, evaluate the source, or measure a model.

The request is one line of JSON on stdin; stdout gets lines of JSON: progress, then the result or the error. The process
ends when stdin is closed, so that it never survives the sweep that started it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, TextIO

from polyquant.errors import PolyquantError

if TYPE_CHECKING:
    from polyquant.conversion.report import Report, StepReport
    from polyquant.ops.metrics import ErrorSums
    from polyquant.types import Weight

__all__ = ["main"]

_EVERY = 0.2
"""Seconds between lines of progress."""
_BLOCK = 1 << 22
"""Weights that are decoded at once."""


class _Speaker:
    """Writes lines of JSON to the sweep."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._next = out, 0.0

    def say(self, **values: Any) -> None:
        """Write one line."""
        self._out.write(json.dumps(values) + "\n")
        self._out.flush()

    def tell(self, what: str) -> Callable[..., None]:
        """A progress callback with (done, total)."""

        def tell(done: int, total: int, *_: object) -> None:
            if monotonic() >= self._next:
                self._next = monotonic() + _EVERY
                self.say(progress=[what, done, total])

        return tell


def _convert(request: Mapping[str, Any], speaker: _Speaker) -> dict[str, Any]:
    from polyquant.conversion.convert import convert, plan
    from polyquant.formats.steps import Progress

    options = dict(request["options"])
    start = perf_counter()
    made = plan(
        request["source"], options.pop("to"), on_tensor=speaker.tell("measuring"), measured=request["damage"], **options
    )
    converting = speaker.tell("converting")

    def watch(progress: Progress) -> None:
        converting(progress.done, progress.total)

    report = convert(
        made, request["path"], overwrite=request["overwrite"], threads=request["threads"], on_progress=watch
    )
    return {
        "seconds": perf_counter() - start,
        "damage": dict(made.measured),
        "nbytes": sum(s.nbytes for s in report.steps),
        "steps": [s.to_json() for s in _with_copied(report)],
    }


def _with_copied(report: Report) -> list[StepReport]:
    """The steps with the sums of copied tensors too: a relative error is over all weights, as in `compare`."""
    from polyquant.opening import open_checkpoint

    made = open_checkpoint(report.path)
    return [
        replace(s, error=_sums(made[s.tensor])) if s.error is None and s.tensor in made else s for s in report.steps
    ]


def _sums(weight: Weight) -> ErrorSums:
    """Error sums of a tensor against itself."""
    from polyquant.ops.metrics import ErrorSums, error_sums
    from polyquant.types import as_matrix

    rows, k = as_matrix(weight.shape)
    step = max(1, _BLOCK // max(1, k)) if weight.codec.row_sliced and len(weight.shape) > 1 else max(1, rows)
    total = ErrorSums()
    for start in range(0, rows, step):
        part = slice(start, min(rows, start + step)) if step < rows else None
        floats = weight.dequantize(rows=part)
        total += error_sums(floats, floats)
    return total


def _source(request: Mapping[str, Any], speaker: _Speaker) -> dict[str, Any]:
    from polyquant.analysis.speed import measure_speed
    from polyquant.analysis.sweep.scores import Request, evaluate_source

    text = Request(**request["request"])
    speed = measure_speed(request["path"], text.text, request["threads"])
    evaluation, stored = evaluate_source(
        request["path"], text, Path(request["folder"]), request["room"], request["threads"], speaker.tell("evaluating")
    )
    return {"measurement": _measured(request["path"], evaluation, speed), "stored": stored.to_json()}


def _measure(request: Mapping[str, Any], speaker: _Speaker) -> dict[str, Any]:
    from polyquant.analysis.speed import measure_speed
    from polyquant.analysis.sweep.scores import Request, Stored, evaluate_against

    text = Request(**request["request"])
    speed = measure_speed(request["path"], text.text, request["threads"])
    evaluation = evaluate_against(
        request["path"], request["source"], text, Stored.from_json(request["stored"]), Path(request["folder"]),
        request["threads"], speaker.tell("evaluating"),
    )  # fmt: skip
    return {"measurement": _measured(request["path"], evaluation, speed)}


def _measured(path: str, evaluation: Any, speed: Any) -> dict[str, Any]:
    from polyquant.analysis.inspect import inspect
    from polyquant.analysis.sweep.trials import Measurement
    from polyquant.analysis.validate import validate

    seen = inspect(path)
    findings = validate(path, headers=True)
    return Measurement(seen.format, seen.architecture, seen.weights, evaluation, speed, findings).to_json()


_TASKS = {"convert": _convert, "source": _source, "measure": _measure}


def _end_with_parent() -> None:
    """End this process when stdin is closed."""
    while os.read(sys.stdin.fileno(), 1 << 12):
        pass
    os._exit(1)


def main() -> None:
    """Read the request, do the task, write the result."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a script
    request = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    speaker = _Speaker(sys.stdout)
    sys.stdout = sys.stderr  # a library that prints must not disturb the protocol
    try:
        result = _TASKS[request["task"]](request, speaker)
    except PolyquantError as problem:
        speaker.say(error=str(problem), final=True)
    except OSError as problem:
        speaker.say(error=f"{problem.strerror or problem}", final=False)
    else:
        speaker.say(result=result)


if __name__ == "__main__":
    main()
