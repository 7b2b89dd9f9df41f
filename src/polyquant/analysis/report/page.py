"""Write the report as one HTML page: no request leaves it, and without scripts everything can still be read."""

from __future__ import annotations

import math
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

from polyquant.analysis.report import charts
from polyquant.analysis.report.drawing import ChartProcess, Spec, draw, require_packages
from polyquant.analysis.report.gather import Candidate, Overview, action_of
from polyquant.errors import PlanError, escaped
from polyquant.storage.targets import refuse_present
from polyquant.tables import decibel, size

__all__ = ["begin_charts", "page", "refuse_existing"]

_MADE = '<meta name="generator" content="polyquant">'
_ROWS, _ALL_ROWS, _LEAST_ROWS = 400, 1200, 20
"""Most tensors in a table, the worst ones; in all tables together; least of each table."""
MAPS = 10
"""Most candidates that all have maps of their layers; with more, only the efficient ones have them."""
_MAP_CHARTS = ("type_map", "error_map")
_ACTIONS = {
    "copied": "same codec, same values",
    "transcoded": "another codec, same values or codes",
    "quantized": "values changed",
}


def refuse_existing(target: Path, *, overwrite: bool) -> None:
    """Raise PlanError if the target exists; with `overwrite`, if it is not a report."""
    refuse_present(target, overwrite=overwrite, check=_refuse_other)


def _refuse_other(target: Path) -> None:
    """Raise PlanError if a file is not a report."""
    if target.is_symlink() or not target.is_file() or _MADE not in _start(target):
        raise PlanError(
            "target is not a report and is not overwritten", file=target, hint="choose another name, or remove it"
        )


def _start(target: Path) -> str:
    with target.open(encoding="utf-8", errors="replace") as file:
        return file.read(2000)


def begin_charts(candidate: Candidate, process: ChartProcess) -> None:
    """Start to draw what the page shows of a candidate, as far as it is known."""
    for spec in (*_charts_of(candidate).values(), *_histograms_of(candidate)):
        process.begin(spec)


def page(report: Overview, process: ChartProcess | None = None) -> str:
    """Return the page. process: draws the charts, by default this process does. Raises UnsupportedError without the
    packages of the extra `report`.
    """
    require_packages()
    size_chart = charts.size_against_error(report) if len(report.candidates) > 1 else {}
    if process is not None:
        process.begin(size_chart)
    from jinja2 import Environment, StrictUndefined

    from polyquant import __version__

    parts = files(__package__)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((parts / "page.html").read_text(encoding="utf-8"))
    out: str = template.render(
        style=(parts / "page.css").read_text(encoding="utf-8"),
        script=(parts / "page.js").read_text(encoding="utf-8"),
        made=_MADE,
        version=__version__,
        text=escaped(report.text),
        reference=_shown(report.reference, report, process),
        candidates=[_shown(c, report, process) for c in report.candidates],
        overview=draw(size_chart, process),
        speeds=draw(charts.speed_against_size(report), process) if report.candidates else "",
        timed=any(c.speed is not None for c in report.candidates),
        advice=escaped(report.advice),
        machine=escaped(report.machine),
        warning=escaped(report.warning),
        left_out=[[escaped(word) for word in row] for row in report.left_out],
        measured=any(c.evaluation is not None for c in (report.reference, *report.candidates)),
        actions=_ACTIONS,
    )
    return out


def _charts_of(candidate: Candidate) -> dict[str, Spec]:
    """The charts of a checkpoint, by the names that the template uses."""
    return {
        "type_map": charts.type_map(candidate),
        "error_map": charts.error_map(candidate) if candidate.comparison is not None else {},
        "layers": charts.divergence_bars(candidate),
    }


def _histograms_of(candidate: Candidate) -> list[Spec]:
    """A chart per histogram, because each is known at another time."""
    return [charts.histogram_bars([histogram]) for histogram in candidate.histograms]


def _drawn(candidate: Candidate, report: Overview, process: ChartProcess | None) -> dict[str, Any]:
    """The charts of a checkpoint as SVG; none for the reference, if the page has no section about it."""
    shown = candidate is not report.reference or not report.candidates
    mapped = len(report.candidates) <= MAPS or candidate.label in report.efficient
    drawn: dict[str, Any] = {
        name: draw(spec, process) if shown and (mapped or name not in _MAP_CHARTS) else ""
        for name, spec in _charts_of(candidate).items()
    }
    names = [escaped(histogram.tensor) for histogram in candidate.histograms]
    return {**drawn, "histograms": list(zip(names, (draw(h, process) for h in _histograms_of(candidate)), strict=True))}


def _shown(candidate: Candidate, report: Overview, process: ChartProcess | None) -> dict[str, Any]:
    """Text, numbers and charts of a checkpoint, for the template."""
    of, comparison = candidate.inspection, candidate.comparison
    most = max(_LEAST_ROWS, min(_ROWS, _ALL_ROWS // max(1, len(report.candidates))))
    from polyquant.analysis.explain import all_codes

    codes = all_codes()
    return {
        "label": escaped(candidate.label),
        "path": escaped(of.path),
        "format": of.format,
        "architecture": escaped(of.architecture),
        "bytes": of.nbytes,
        "size": size(of.nbytes),
        "bpw": of.bpw,
        "weights": of.weights,
        "tensors": len(of.tensors),
        "codecs": ", ".join(
            f"{n / max(1, of.weights):.1%} {name}" for name, n in sorted(of.codecs.items(), key=lambda c: -c[1])
        ),
        "efficient": candidate.label in report.efficient,
        "error": candidate.error,
        "snr": None if comparison is None else comparison.error.snr,
        "snr_text": "" if comparison is None else decibel(comparison.error.snr),
        "cosine": None if comparison is None else comparison.error.cosine,
        "notes": [escaped(note) for note in of.notes],
        "problem": escaped(candidate.problem),
        **_drawn(candidate, report, process),
        "rows": _rows(candidate, most),
        "hidden": 0 if comparison is None else max(0, len(comparison.tensors) - most),
        "alone": []
        if comparison is None
        else [
            *((escaped(name), "reference") for name in comparison.only_a),
            *((escaped(name), "this model") for name in comparison.only_b),
        ],
        "actions": Counter(action_of(t) for t in comparison.tensors) if comparison is not None else {},
        "findings": [
            {
                "code": f.code, "severity": f.severity.value, "message": escaped(f.message),
                "where": escaped(str(f.tensor or f.file or "")), "why": codes.get(f.code, ""),
            }
            for f in candidate.findings
        ],
        "evaluation": _evaluated(candidate),
        "speed": _timed(candidate),
    }  # fmt: skip


def _rows(candidate: Candidate, most: int) -> list[dict[str, Any]]:
    """The tensors with the largest errors."""
    if candidate.comparison is None:
        return []
    worst = sorted(candidate.comparison.tensors, key=lambda t: t.error.snr)[:most]
    return [
        {
            "name": escaped(t.name), "shape": "×".join(map(str, t.shape)), "a": t.a, "b": t.b, "action": action_of(t),
            "snr": 9999 if math.isinf(t.error.snr) else t.error.snr, "snr_text": decibel(t.error.snr),
            "rrmse": t.error.rrmse, "worst": t.error.worst, "bytes": t.b_bytes, "size": size(t.b_bytes),
        }
        for t in worst
    ]  # fmt: skip


def _evaluated(candidate: Candidate) -> dict[str, Any] | None:
    found = candidate.evaluation
    if found is None:
        return None
    divergence = found.divergence
    return {
        "perplexity": found.model.perplexity.value,
        "perplexity_error": found.model.perplexity.error,
        "reference": None if found.reference is None else found.reference.perplexity.value,
        "tokens": found.model.tokens,
        "kl": None if divergence is None else divergence.kl.value,
        "kl_99": None if divergence is None else divergence.kl_99,
        "top_1": None if divergence is None else divergence.top_1.value,
    }


def _timed(candidate: Candidate) -> dict[str, Any] | None:
    found = candidate.speed
    if found is None:
        return None
    return {
        "decode": found.decode, "prompt": found.prompt, "memory": found.memory, "memory_text": size(found.memory),
        "load": found.load,
    }  # fmt: skip
