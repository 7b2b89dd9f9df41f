"""`validate`, `run` and `convert` agree: a valid checkpoint runs and converts, one with an error does neither."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import polyquant as pq
from cli.bad_inputs import INCOMPLETE, UNLIKELY, UNTRANSLATABLE, UNUSABLE
from cli.bad_models import UNRUNNABLE
from cli.evil_inputs import EVIL_INPUTS
from polyquant.errors import PlanError, PolyquantError, UnsupportedError
from polyquant.types import Severity

CASES = {**UNUSABLE, **UNTRANSLATABLE, **INCOMPLETE, **UNLIKELY, **UNRUNNABLE, **EVIL_INPUTS}
HUGE = {"GGUF matrix of a terabyte"}
"""Valid sparse files: reading every value takes hours."""
LARGE = {
    "300,000 tokens",
    "300,000 merges",
    "metadata of 14 MB",
    "safetensors many objects",
    "safetensors many tensors",
}
"""Seconds each."""


def error_of(attempt: Callable[[], object]) -> PolyquantError | None:
    try:
        attempt()
    except PolyquantError as problem:
        return problem
    return None


def verdict(path: Path) -> tuple[bool, set[str]]:
    """Return True if `validate` finds no error, and the codes of its warnings and notes."""
    try:
        findings = pq.validate(path)
    except PolyquantError:
        return False, set()
    sound = not any(f.severity is Severity.ERROR for f in findings)
    return sound, {f.code for f in findings if f.severity is not Severity.ERROR}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LARGE else ()) for n in sorted(CASES.keys() - HUGE)]
)
def test_validate_run_and_convert_agree(name, tmp_path):
    (tmp_path / "in").mkdir()
    path = CASES[name](tmp_path / "in")
    sound, remarks = verdict(path)
    run = error_of(lambda: list(pq.load(path).generate("Hello", max_tokens=1)))
    plans = [error_of(lambda to=to: pq.plan(path, to)) for to in ("gguf", "hf")]
    if not sound:
        assert run is not None, "runs, although validate reports an error"
        assert all(plans), "converts, although validate reports an error"
    elif run is not None and not isinstance(run, UnsupportedError):
        assert "no config.json" in run.message or "GGUF036" in remarks, run  # tensors without a model
    if sound and "GGUF027" not in remarks:  # general.architecture is missing
        assert all(p is None or isinstance(p, UnsupportedError | PlanError) for p in plans), plans
