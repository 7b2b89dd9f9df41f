"""The report in Python: `polyquant.report` gives its figures, its table and the page itself."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from polyquant.analysis.report import charts, drawing
from polyquant.analysis.report.gather import Candidate, Overview, gather
from polyquant.analysis.report.page import page, refuse_existing
from polyquant.errors import PlanError, UnknownNameError, UnsupportedError, printable
from polyquant.formats.progress import shows_progress
from polyquant.formats.steps import Progress
from polyquant.storage.one_file import write_file
from polyquant.tables import Row, Table, decibel, size

__all__ = ["Figure", "ReportPage", "report"]

_MIME = "application/vnd.vegalite.v5+json"
_VARIABLE = re.compile(r"var\((--\w+)\)")


@dataclass(frozen=True, slots=True, repr=False)
class Figure:
    """A chart of a report, which notebooks display.

    name: "size_against_error", "type_map", "error_map", "histograms" or "divergence"; model: the label of the model
    that it shows, "" for all; spec: the Vega-Lite specification, with its data.
    """

    name: str
    model: str
    spec: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"<Figure {self.name}{' of ' if self.model else ''}{printable(self.model)}>"

    def svg(self) -> str:
        """The chart as SVG. Raises UnsupportedError without the package vl-convert-python."""
        return drawing.svg(dict(self.spec))

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        shown = {_MIME: self.spec, "text/plain": repr(self)}
        with suppress(UnsupportedError):  # Jupyter draws the specification itself
            shown["image/svg+xml"] = self.svg()
        return shown


@dataclass(frozen=True, slots=True, repr=False)
class ReportPage:
    """Models side by side, as `polyquant report` shows them. overview: the comparisons, evaluations and findings."""

    overview: Overview

    def __repr__(self) -> str:
        return f"<ReportPage {printable(self.overview.reference.label)}: {len(self.overview.candidates)} compared>"

    def _repr_html_(self) -> str:
        shown = [
            (
                row["model"], size(candidate.inspection.nbytes), f"{candidate.inspection.bpw:.3f}",
                "" if candidate.comparison is None else decibel(candidate.comparison.error.snr),
                _number(row["perplexity"], ".4g"), _number(row["kl"], ".3g"),
                "yes" if row["efficient"] else "", row["findings"],
            )
            for row, candidate in zip(self.rows(), self._models, strict=True)
        ]  # fmt: skip
        columns = ("model", "size", "bits per weight", "SNR", "perplexity", "KL divergence", "efficient", "findings")
        used = [i for i in range(len(columns)) if any(row[i] != "" for row in shown)]
        cells = [[row[i] for i in used] for row in shown]
        return Table(repr(self).strip("<>"), [columns[i] for i in used], cells, len(shown)).html()

    @property
    def _models(self) -> tuple[Candidate, ...]:
        """The reference, then the models compared with it."""
        return self.overview.reference, *self.overview.candidates

    def rows(self) -> list[Row]:
        """One row per model, the reference first: model (its label), path, format, bytes, weights, bpw; snr_db, rrmse,
        cosine, max_error against the reference; perplexity, perplexity_error, kl, kl_99, top_1 if measured; efficient
        (no other model is smaller and better), findings (their number), problem (why it was not evaluated).
        """
        return [_row(candidate, self.overview) for candidate in self._models]

    @property
    def figures(self) -> tuple[Figure, ...]:
        """All charts, in the order of the page."""
        return tuple(_figures(self.overview, self._models))

    def figure(self, name: str, model: str | None = None) -> Figure:
        """One chart. model: the label of a model (`rows()` has them); needed if several have that chart. Raises
        UnknownNameError, PlanError.
        """
        found = [f for f in self.figures if f.name == name]
        if not found:
            raise UnknownNameError("figure", name, list(dict.fromkeys(f.name for f in self.figures)))
        if model is None:
            if len(found) > 1:
                raise PlanError(f"several models have the figure '{name}'", expected=", ".join(f.model for f in found))
            return found[0]
        for figure in found:
            if figure.model == model:
                return figure
        raise UnknownNameError(f"model with the figure '{name}'", model, [f.model for f in found])

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the page, as `polyquant report` does, and return its path. Raises PlanError for an existing file, with
        `overwrite` only if it is not a report; UnsupportedError without the packages of the extra `report`.
        """
        target = Path(path)
        refuse_existing(target, overwrite=overwrite)
        write_file(target, page(self.overview).encode(), overwrite=overwrite)
        return target


@shows_progress("report")
def report(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    against: str | os.PathLike[str] | None = None,
    text: str | os.PathLike[str] | None = None,
    tokens: int | None = None,
    histograms: int = 4,
    progress: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> ReportPage:
    """Compare the models at `paths` with the reference `against`, by default the first of them.

    text: also evaluate all of them on this UTF-8 file, with at most `tokens` tokens; histograms: matrices of each model
    whose weights are counted, the worst first. Raises InputError, PlanError, UnsupportedError.
    """
    chosen = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if against is not None:
        chosen.insert(0, against)
    if not chosen:
        raise PlanError("a report needs at least one model")

    def tick(done: int, total: int, what: str) -> None:
        if on_progress is not None:
            on_progress(Progress(done, total, what, 0.0))

    return ReportPage(gather(chosen[0], chosen[1:], text=text, tokens=tokens, histograms=histograms, tick=tick))


def _row(candidate: Candidate, overview: Overview) -> Row:
    inspection, evaluation = candidate.inspection, candidate.evaluation
    error = None if candidate.comparison is None else candidate.comparison.error
    score = None if evaluation is None else evaluation.model
    divergence = None if evaluation is None else evaluation.divergence
    if candidate is overview.reference and score is None:
        score = next((c.evaluation.reference for c in overview.candidates if c.evaluation is not None), None)
    return {
        "model": candidate.label, "path": inspection.path, "format": inspection.format, "bytes": inspection.nbytes,
        "weights": inspection.weights, "bpw": inspection.bpw,
        "snr_db": None if error is None else error.snr, "rrmse": None if error is None else error.rrmse,
        "cosine": None if error is None else error.cosine, "max_error": None if error is None else error.worst,
        "perplexity": None if score is None else score.perplexity.value,
        "perplexity_error": None if score is None else score.perplexity.error,
        "kl": None if divergence is None else divergence.kl.value,
        "kl_99": None if divergence is None else divergence.kl_99,
        "top_1": None if divergence is None else divergence.top_1.value,
        "efficient": None if candidate is overview.reference else candidate.label in overview.efficient,
        "findings": len(candidate.findings), "problem": candidate.problem,
    }  # fmt: skip


def _figures(overview: Overview, models: Sequence[Candidate]) -> Iterator[Figure]:
    """Every chart that is not empty."""
    if overview.candidates:
        yield Figure("size_against_error", "", _standalone(charts.size_against_error(overview)))
    for candidate in models:
        specs = {
            "type_map": charts.type_map(candidate),
            "error_map": charts.error_map(candidate) if candidate.comparison is not None else {},
            "divergence": charts.divergence_bars(candidate),
            "histograms": charts.histogram_bars(candidate.histograms),
        }
        for name, spec in specs.items():
            if spec:
                yield Figure(name, candidate.label, _standalone(spec))


def _standalone(spec: drawing.Spec) -> drawing.Spec:
    """The chart with the colors of the light theme instead of the page's variables, on white."""
    style = (files(__package__) / "page.css").read_text(encoding="utf-8")
    light = dict(re.findall(r"(--\w+): (#\w+)", style[: style.index("}")]))

    def resolved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: resolved(item) for key, item in value.items()}
        if isinstance(value, list):
            return [resolved(item) for item in value]
        return _VARIABLE.sub(lambda match: light[match[1]], value) if isinstance(value, str) else value

    out: drawing.Spec = resolved(spec)
    return {**out, "config": {**out["config"], "background": "white", "font": "sans-serif"}}


def _number(value: Any, style: str) -> str:
    return "" if value is None else format(value, style)
