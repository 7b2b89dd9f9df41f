"""Run a sweep: plan all candidates, then make and measure one after the other within the budgets.

Each step is recorded in the work folder when it is finished, so that the same call resumes after a kill at any point.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import polyquant
from polyquant.analysis.inspect import Inspection, inspect
from polyquant.analysis.speed import NEW, PROMPT
from polyquant.analysis.sweep.advice import MAX_KL, Limits, worth_keeping
from polyquant.analysis.sweep.candidates import (
    Candidate,
    bits_range,
    file_path,
    informative_order,
    ladder,
    parse_candidate,
)
from polyquant.analysis.sweep.folder import WorkPlace, file_states
from polyquant.analysis.sweep.forecast import Forecast, forecasts, source_seconds
from polyquant.analysis.sweep.process import Answer, run_child
from polyquant.analysis.sweep.results import Sweep
from polyquant.analysis.sweep.scores import Request
from polyquant.analysis.sweep.trials import Measurement, Trial
from polyquant.conversion.report import StepReport
from polyquant.errors import PlanError, UnsupportedError
from polyquant.formats.sizes import memory_bytes
from polyquant.ops import native
from polyquant.ops.native import cores
from polyquant.runtime.text import read_text
from polyquant.storage.folder import CHECKSUMS
from polyquant.storage.locations import is_remote

__all__ = ["Keep", "Outlook", "Watch", "outlook", "run", "sweep"]

Keep = Literal["all", "efficient", "none"]
TOKENS = 8192
"""Default tokens of the evaluation."""
_BYTES_PER_TOKEN = 3.0
"""Estimate before the text is tokenized."""
_FREE = 0.9
"""Share of the free disk space that is the default of max_disk."""


class Watch:
    """Observer of a sweep; every method may be overridden."""

    def progress(self, name: str, what: str, done: int, total: int) -> None:
        """Called during a step."""

    def finished(self, trial: Trial, seconds: float) -> None:
        """Called with the source and each candidate. seconds: since the start of this run."""

    def note(self, text: str) -> None:
        """Called with something the user should know."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """A sweep before it runs: the candidates with their forecasts, in the order of measurement.

    source_seconds: expected time to measure the source; reference: bytes of its stored logits, at most; max_disk: the
    budget in bytes.
    """

    source: str
    text: str
    work: Path
    inspection: Inspection
    made: tuple[Forecast, ...]
    requested: tuple[Candidate, ...]
    source_seconds: float
    reference: int
    keep: Keep
    max_time: float | None
    max_disk: int
    tokens: int | None
    context: int | None
    threads: int | None
    limits: Limits
    restart: bool

    @property
    def seconds(self) -> float:
        """Expected time of everything."""
        return self.source_seconds + sum(f.seconds for f in self.made)

    @property
    def disk(self) -> int:
        """Most bytes in the work folder at once: those kept are known only afterwards, so all of them with `all`."""
        sizes = [f.files for f in self.made]
        kept = sum(sizes) if self.keep == "all" else max(sizes, default=0)
        return kept + self.reference

    def to_json(self) -> dict[str, Any]:
        """The values as JSON-compatible types."""
        return {
            "source": self.source,
            "text": self.text,
            "work": str(self.work),
            "seconds": self.seconds,
            "source_seconds": self.source_seconds,
            "disk": self.disk,
            "candidates": [
                {
                    "candidate": f.candidate.name, "bytes": f.nbytes, "files": f.files, "convert_seconds": f.convert,
                    "measure_seconds": f.measure, "refused": f.refused, "options": dict(f.candidate.options),
                }
                for f in self.made
            ],
        }  # fmt: skip


def sweep(
    src: str | os.PathLike[str],
    *,
    text: str | os.PathLike[str],
    work: str | os.PathLike[str],
    recipes: Sequence[str] = (),
    bpw: str | None = None,
    bpw_step: float = 0.5,
    keep: Keep = "efficient",
    max_time: float | None = None,
    max_disk: int | str | None = None,
    tokens: int | None = TOKENS,
    context: int | None = None,
    calibration: str | os.PathLike[str] | None = None,
    importance: str | os.PathLike[str] | None = None,
    requantize: bool = False,
    threads: int | None = None,
    max_kl: float = MAX_KL,
    max_size: int | str | None = None,
    min_speed: float | None = None,
    restart: bool = False,
    watch: Watch | None = None,
) -> Sweep:
    """Quantize the model at `src` in many ways, and measure size, perplexity, divergence from `src`, speed on this
    machine and memory of each.

    text: a UTF-8 file for the evaluation; work: the folder of the candidates and the journal, from which an equal call
    resumes. recipes: candidates by short names ("q4_k_m", "trellis:3", "w8a16"; default: a ladder for the model's
    size); bpw, bpw_step: also target sizes "2.5..5" in bits per weight. keep: which candidates to keep. max_time: in
    seconds; max_disk: bytes of the work folder. calibration, importance: files for the candidates that use them.
    max_kl, max_size, min_speed: limits of the recommendation. restart: discard earlier results.
    Raises InputError, PlanError, UnknownNameError, OSError.
    """
    return run(
        outlook(
            src, text=text, work=work, recipes=recipes, bpw=bpw, bpw_step=bpw_step, keep=keep, max_time=max_time,
            max_disk=max_disk, tokens=tokens, context=context, calibration=calibration, importance=importance,
            requantize=requantize, threads=threads, max_kl=max_kl, max_size=max_size, min_speed=min_speed,
            restart=restart,
        ),
        watch,
    )  # fmt: skip


def outlook(
    src: str | os.PathLike[str], *, text: str | os.PathLike[str], work: str | os.PathLike[str],
    recipes: Sequence[str] = (), bpw: str | None = None, bpw_step: float = 0.5, keep: Keep = "efficient",
    max_time: float | None = None, max_disk: int | str | None = None, tokens: int | None = TOKENS,
    context: int | None = None, calibration: str | os.PathLike[str] | None = None,
    importance: str | os.PathLike[str] | None = None, requantize: bool = False, threads: int | None = None,
    max_kl: float = MAX_KL, max_size: int | str | None = None, min_speed: float | None = None, restart: bool = False,
) -> Outlook:  # fmt: skip
    """Plan a sweep without writing anything; see `sweep`. Raises PlanError if not even one candidate is possible."""
    if is_remote(src):
        raise UnsupportedError("a sweep reads its source many times", file=src, hint="download it first")
    if keep not in ("all", "efficient", "none"):
        raise PlanError("unknown value of keep", expected="all, efficient or none", found=keep)
    words = read_text(text)
    seen = inspect(src)
    files = {"calibration": file_path(calibration), "importance": file_path(importance)}
    wanted = [*recipes, *(bits_range(bpw, bpw_step) if bpw is not None else ())] or ladder(seen)
    requested = tuple(_distinct(parse_candidate(name, **files, requantize=requantize) for name in wanted))
    source = os.fspath(src)
    count = min(tokens or 1 << 40, int(len(words.encode()) / _BYTES_PER_TOKEN) + 1)
    made, _ = forecasts(source, requested, count, threads)
    requested = tuple(f.candidate for f in made)  # without a calibration that they do not use
    possible = [f for f in made if not f.refused]
    if not possible:
        first = made[0]
        raise PlanError(f"no candidate is possible; {first.candidate.name}: {first.refused}", file=src)
    order = informative_order([f.nbytes for f in possible])
    ordered = [possible[i] for i in order] + [f for f in made if f.refused]
    place = Path(work).absolute()
    free = shutil.disk_usage(next(p for p in (place, *place.parents) if p.is_dir())).free
    result = Outlook(
        source, os.fspath(text), Path(work), seen, tuple(ordered), requested,
        source_seconds(seen, possible, count), _logits_bytes(seen, count), keep, max_time,
        memory_bytes(max_disk) if max_disk is not None else int(free * _FREE), tokens, context, threads,
        Limits(max_kl, memory_bytes(max_size) if max_size is not None else None, min_speed), restart,
    )  # fmt: skip
    _refuse_small_budget(result, possible)
    return result


def _distinct(candidates: Any) -> list[Candidate]:
    found: dict[str, Candidate] = {}
    for c in candidates:
        found.setdefault(c.key, c)
    names = [c.file_name for c in found.values()]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise PlanError("two candidates would have the same file", found=twice, hint="write one of them differently")
    return list(found.values())


def _logits_bytes(source: Inspection, tokens: int) -> int:
    """Bytes of the logits of the scored half of the tokens."""
    rows = [w.shape[0] for w in source.tensors if len(w.shape) == 2]
    return 2 * tokens * max(rows, default=0)


def _refuse_small_budget(made: Outlook, possible: Sequence[Forecast]) -> None:
    """Raise PlanError if the budget does not hold even one candidate."""
    smallest = min(f.files for f in possible)
    if smallest > made.max_disk:
        raise PlanError(
            "the disk budget does not hold even one candidate", expected=f"at least {smallest:,} bytes",
            found=f"{made.max_disk:,}", hint=f"--max-disk {-(-smallest // 10**6)}MB",
        )  # fmt: skip
    least = made.source_seconds + min(f.seconds for f in possible)
    if made.max_time is not None and least > made.max_time:
        raise PlanError(
            "the time budget does not hold even one candidate", expected=f"about {least:.0f} s at least",
            found=f"{made.max_time:.0f} s", hint="more --max-time, or fewer --tokens",
        )  # fmt: skip


def run(made: Outlook, watch: Watch | None = None, clock: Callable[[], float] = time.monotonic) -> Sweep:
    """Run a planned sweep; see `sweep`. clock: seconds, for the time budget."""
    folder = WorkPlace.open(made.work)
    try:
        if made.restart:
            for name in folder.restart():
                (watch or Watch()).note(f"kept, because it changed since the sweep wrote it: {name}")
        folder.begin(_identity(made))
        return _Run(made, folder, watch or Watch(), clock).all()
    finally:
        folder.close()


def _identity(made: Outlook) -> dict[str, str]:
    """Digests of everything that changes the figures, except the candidates."""
    root = Path(made.source)
    files = sorted(p for p in (root.rglob("*") if root.is_dir() else [root]) if p.is_file() and p.name != CHECKSUMS)
    states = [(str(p.relative_to(root)), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    settings = {"tokens": made.tokens, "context": made.context, "threads": made.threads, "speed": [PROMPT, NEW]}
    return {
        "source": hashlib.sha256(json.dumps(states).encode()).hexdigest(),
        "text": hashlib.sha256(Path(made.text).read_bytes()).hexdigest(),
        "version": polyquant.__version__,
        **{key: json.dumps(value) for key, value in settings.items()},
    }


def machine() -> str:
    """Processor, threads and engine: the speeds hold for these only."""
    if native.lib() is None:
        return f"{platform.machine()}, {cores()} cores, numpy"
    return f"{platform.machine()}, {native.threads()} threads, {native.instruction_set()}"


class _Run:
    """The state of a running sweep."""

    def __init__(self, made: Outlook, folder: WorkPlace, watch: Watch, clock: Callable[[], float]) -> None:
        self.made, self.folder, self.watch, self.clock = made, folder, watch, clock
        self.began = clock()
        self.expected = self.spent = 0.0
        self.trials: dict[str, Trial] = {}
        self.request = Request(made.text, made.tokens, made.context)

    # ---------------------------------------------------------------- time

    def _elapsed(self) -> float:
        return self.clock() - self.began

    def _left(self) -> float | None:
        """Seconds until the time is up; None without a limit."""
        return None if self.made.max_time is None else self.made.max_time - self._elapsed()

    def _pace(self) -> float:
        """Ratio of time spent to time expected so far."""
        return self.spent / self.expected if self.expected > 1 else 1.0

    def _child(self, name: str, task: str, **request: Any) -> Answer:
        left = self._left()
        if left is not None and left <= 0:
            return Answer(late=True, error="the time was up")

        def tell(what: str, done: int, total: int) -> None:
            self.watch.progress(name, what, done, total)

        return run_child(task, {**request, "threads": self.made.threads}, seconds=left, tell=tell)

    # ---------------------------------------------------------------- steps

    def all(self) -> Sweep:
        """Measure the source, then the candidates."""
        reference = self._reference()
        self.watch.finished(reference, self._elapsed())
        for forecast in self.made.made:
            began = self.clock()
            new = not self._recorded(forecast.candidate)
            trial = self._trial(forecast)
            if new and trial.status == "measured":
                self.expected += forecast.seconds
                self.spent += self.clock() - began
            self.trials[forecast.candidate.key] = trial
            self.watch.finished(trial, self._elapsed())
            self._tidy()
        trials = tuple(self._placed(self.trials[c.key], c) for c in self.made.requested)
        return Sweep(
            self.made.source, self.made.text, str(self.made.work), machine(), reference, trials, self.made.limits,
            self._elapsed(),
        )  # fmt: skip

    def _reference(self) -> Trial:
        """Evaluate the source and measure its speed. Raises PlanError if that fails or takes too long."""
        name = "source"
        if self.folder.source is None:
            largest = max(f.files for f in self.made.made)
            room = max(0, (self.made.max_disk - self.folder.used() - largest) // 2)
            answer = self._child(
                name, "source", path=self.made.source, request=asdict(self.request),
                folder=str(self.folder.reference), room=room,
            )  # fmt: skip
            if answer.result is None:
                hint = "more --max-time, or fewer --tokens" if answer.late else None
                raise PlanError(f"the source was not measured: {answer.error}", file=self.made.source, hint=hint)
            self.folder.record("source", **answer.result)
        assert self.folder.source is not None
        found = Measurement.from_json(self.folder.source["measurement"])
        return Trial(name, "measured", nbytes=found.evaluation.model.nbytes, path=self.made.source, measurement=found)

    def _recorded(self, candidate: Candidate) -> bool:
        return bool({"measured", "failed"} & self.folder.entries.get(candidate.key, {}).keys())

    def _trial(self, forecast: Forecast) -> Trial:
        candidate = forecast.candidate
        trial = Trial(
            candidate.name, "skipped", nbytes=forecast.nbytes or None, command=candidate.command(self.made.source)
        )
        entries = self.folder.entries.get(candidate.key, {})
        if "measured" in entries:
            return self._known(trial, entries)
        refused = forecast.refused or (entries["failed"]["reason"] if "failed" in entries else "")
        if refused:
            return replace(trial, status="failed", reason=refused)
        if (reason := self._no_room(forecast)) is not None:
            return replace(trial, reason=reason)
        answer = self._measure(candidate)
        return (
            self._ended(trial, candidate, answer)
            if answer.result is None
            else self._known(trial, self.folder.entries[candidate.key])
        )

    def _measure(self, candidate: Candidate) -> Answer:
        """Convert a candidate unless that is done, and measure it."""
        if self.folder.intact(candidate.key) is None:
            answer = self._convert(candidate)
            if answer.result is None:
                return answer
        path = self.folder.intact(candidate.key)
        if path is None:
            return Answer(error="its files changed after the conversion")
        assert self.folder.source is not None
        answer = self._child(
            candidate.name, "measure", path=str(path), source=self.made.source, request=asdict(self.request),
            stored=self.folder.source["stored"], folder=str(self.folder.reference),
        )  # fmt: skip
        if answer.result is not None:
            self.folder.record("measured", key=candidate.key, **answer.result)
        return answer

    def _convert(self, candidate: Candidate) -> Answer:
        """Convert a candidate, unless its target is another file."""
        path = self.folder.path / candidate.file_name
        ours = "started" in self.folder.entries.get(candidate.key, {})
        if not ours and os.path.lexists(path):
            return Answer(error=f"{path.name} exists in the work folder and is not of this sweep")
        if not ours:
            self.folder.record("started", key=candidate.key, name=candidate.name)
        shared = self.folder.damage.get(candidate.family) if candidate.shares_plan else None
        answer = self._child(
            candidate.name, "convert", source=self.made.source, path=str(path),
            options=dict(candidate.options), overwrite=ours, damage=shared,
        )  # fmt: skip
        if answer.result is not None:
            result = dict(answer.result)
            damage = result.pop("damage")
            if candidate.shares_plan and shared is None:
                self.folder.record("damage", family=candidate.family, measured=damage)
            self.folder.record("converted", key=candidate.key, path=path.name, files=file_states(path), **result)
        return answer

    def _ended(self, trial: Trial, candidate: Candidate, answer: Answer) -> Trial:
        """The trial of a step without a result; an error that would come again is recorded."""
        if answer.late:
            return replace(trial, reason="interrupted by --max-time; the same command resumes it")
        if answer.final:
            self.folder.record("failed", key=candidate.key, reason=answer.error)
            self.folder.remove(candidate.key)
        return replace(trial, status="failed", reason=answer.error)

    def _no_room(self, forecast: Forecast) -> str | None:
        """The budget that does not hold a candidate; None if both do."""
        left, need = self._left(), forecast.seconds * self._pace()
        if left is not None and need > left:
            return f"needs about {need:.0f} s of --max-time, {max(0.0, left):.0f} s are left"
        if self.folder.intact(forecast.candidate.key) is None:
            free = self.made.max_disk - self.folder.used()
            if forecast.files > free:
                return f"needs {forecast.files:,} bytes of --max-disk, {max(0, free):,} are free"
        return None

    # ---------------------------------------------------------------- results

    def _known(self, trial: Trial, entries: Mapping[str, Any]) -> Trial:
        """The trial of the recorded entries."""
        assert self.folder.source is not None
        found = Measurement.from_json(entries["measured"]["measurement"])
        reference = Measurement.from_json(self.folder.source["measurement"]).evaluation.model
        found = replace(found, evaluation=replace(found.evaluation, reference=reference))
        converted = entries["converted"]
        return replace(
            trial, status="measured", nbytes=found.evaluation.model.nbytes, seconds=converted["seconds"],
            measurement=found, steps=tuple(StepReport.from_json(s) for s in converted["steps"]),
        )  # fmt: skip

    def _placed(self, trial: Trial, candidate: Candidate) -> Trial:
        """The trial with the path of its output, if that still exists."""
        path = self.folder.intact(candidate.key) if trial.status == "measured" else None
        return trial if path is None else replace(trial, path=str(path))

    def _tidy(self) -> None:
        """Remove the candidates that are not kept."""
        if self.made.keep == "all":
            return
        known = list(self.trials.values())
        kept = worth_keeping(known, self.made.limits) if self.made.keep == "efficient" else frozenset()
        for key, trial in self.trials.items():
            if trial.status == "measured" and trial.name not in kept:
                for name in self.folder.remove(key):
                    self.watch.note(f"kept, because it changed since the sweep wrote it: {name}")
