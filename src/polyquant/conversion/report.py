"""The result of a conversion, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from sys import intern
from typing import Any

from polyquant.errors import printable
from polyquant.ops.metrics import ErrorSums
from polyquant.tables import Row, Table, decibel, size, tensor_columns

__all__ = ["Report", "StepReport", "errors_of", "opened_as"]

_EQUAL = {"snr_db": math.inf, "rrmse": 0.0, "cosine": 1.0, "max_error": 0.0}


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result for one tensor. error: None if nothing was lost or it was not measured. note: about changed scales.
    exact: the codes and scales prove that every weight is equal, so nothing was measured.
    """

    tensor: str
    shape: tuple[int, ...]
    action: str
    source: str
    target: str
    nbytes: int
    error: ErrorSums | None = None
    note: str = ""
    exact: bool = False

    def to_json(self) -> dict[str, Any]:
        """The values as JSON-compatible types."""
        return asdict(self) | (errors_of([self]) or {})

    @staticmethod
    def from_json(entry: dict[str, Any]) -> StepReport:
        """The inverse of `to_json`. Raises KeyError, TypeError for other values."""
        error = entry.get("error")
        texts = {n: entry[n] for n in ("tensor", "action", "source", "target", "note")}
        numbers = (entry["nbytes"], *entry["shape"], *(error.values() if error else ()))
        if not all(isinstance(t, str) for t in texts.values()) or not all(type(n) in (int, float) for n in numbers):
            raise TypeError("not a report")
        words = {n: intern(text) for n, text in texts.items() if n != "tensor"}  # the same for many tensors
        return StepReport(
            entry["tensor"], tuple(entry["shape"]), nbytes=entry["nbytes"],
            error=ErrorSums(**error) if error else None, exact=entry.get("exact") is True, **words,
        )  # fmt: skip


def errors_of(steps: Sequence[StepReport]) -> dict[str, float] | None:
    """The figures of these tensors together: snr_db, rrmse, cosine, max_error; None if one is neither measured nor
    exact, and none is measured.
    """
    measured = [s.error for s in steps if s.error is not None]
    if measured:
        return sum(measured, ErrorSums()).columns()
    return dict(_EQUAL) if steps and all(s.exact for s in steps) else None


def opened_as(target: Path, files: Sequence[str], *, folder: bool) -> Path:
    """The path that opens the output: that of the first file of a split model."""
    return target if folder or len(files) == 1 else target.with_name(files[0])


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """A finished conversion. path: opens the output; of a split model it is the first file."""

    path: Path
    format: str
    nbytes: int
    seconds: float
    steps: tuple[StepReport, ...]
    warnings: tuple[str, ...] = field(default=())
    recipe: str = ""

    def __repr__(self) -> str:
        warned = f", {len(self.warnings)} warning{'' if len(self.warnings) == 1 else 's'}" if self.warnings else ""
        what = f"{len(self.steps)} tensors, {size(self.nbytes)}, SNR {decibel(self.error.snr)}"
        return f"<Report {printable(self.path)} ({self.format}): {what}, {self.seconds:.1f} s{warned}>"

    def _repr_html_(self) -> str:
        rows = (
            (
                s.tensor,
                list(s.shape),
                s.action,
                s.source,
                s.target,
                size(s.nbytes),
                decibel(found["snr_db"]) if (found := errors_of([s])) else "",
                s.note,
            )
            for s in self.steps
        )
        columns = ("tensor", "shape", "action", "from", "to", "size", "SNR", "note")
        return Table(repr(self).strip("<>"), columns, rows, len(self.steps), self.warnings).html()

    def rows(self) -> list[Row]:
        """One row per tensor: tensor, shape, weights, bytes, bpw, action, source, target (codecs), snr_db, rrmse,
        cosine, max_error (None if not measured), note.
        """
        unknown = dict.fromkeys(ErrorSums().columns())
        return [
            {
                **tensor_columns(s.tensor, s.shape, s.nbytes), "action": s.action, "source": s.source,
                "target": s.target, **(errors_of([s]) or unknown), "note": s.note,
            }
            for s in self.steps
        ]  # fmt: skip

    @property
    def error(self) -> ErrorSums:
        """Error sums over all measured tensors."""
        return sum((s.error for s in self.steps if s.error is not None), ErrorSums())

    def to_json(self) -> dict[str, Any]:
        """The values as JSON-compatible types."""
        total = self.error
        return {
            "path": str(self.path),
            "format": self.format,
            "recipe": self.recipe,
            "bytes": self.nbytes,
            "seconds": self.seconds,
            "rrmse": total.rrmse,
            "snr_db": total.snr,
            "warnings": list(self.warnings),
            "tensors": [s.to_json() for s in self.steps],
        }
