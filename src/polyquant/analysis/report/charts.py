"""Charts as Vega-Lite specifications.

They are drawn when the report is written (drawing.py): the page needs no library, and every mark has its values as a
label, which the page shows on hover and by keyboard, and screen readers read. Colors are CSS variables of the page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from polyquant.analysis.report.drawing import MEASURED, Spec
from polyquant.analysis.report.gather import BINS, Candidate, Histogram, Overview, diverging, layer_and_kind
from polyquant.tables import decibel
from polyquant.types import Shape

__all__ = [
    "divergence_bars",
    "error_map",
    "histogram_bars",
    "size_against_error",
    "speed_against_size",
    "type_map",
]

SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"

_WIDTH = 640
_TEXT = "var(--text)"
_CONFIG = {
    "background": None,
    "font": MEASURED,
    "view": {"stroke": "var(--line)"},
    "axis": {
        "labelColor": _TEXT, "titleColor": _TEXT, "gridColor": "var(--line)", "domainColor": "var(--line)",
        "tickColor": "var(--line)", "labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": "normal",
        "titlePadding": 12,
    },
    "legend": {
        "labelColor": _TEXT, "titleColor": _TEXT, "labelLimit": 220, "titleFontWeight": "normal", "columnPadding": 28,
    },
    "text": {"color": _TEXT},
}  # fmt: skip
_COLORS = ["#2f6fde", "#d9730d", "#2f9e63", "#a24fc4", "#c8435a", "#0f9aa8", "#9a7b1c", "#6b7280", "#e08bb5", "#7fa3e6"]
_KINDS = ["efficient", "beaten by another", "reference"]
_KIND_COLORS = [_COLORS[0], "#8b93a1", _COLORS[1]]
_PALETTE = {"scheme": "viridis"}
_SIDES: dict[str, dict[str, Any]] = {
    "above right": {"dx": 8, "dy": -9, "align": "left"}, "below left": {"dx": -8, "dy": 10, "align": "right"},
    "right": {"dx": 10, "align": "left"}, "left": {"dx": -10, "align": "right"},
    "above": {"dy": -13}, "below": {"dy": 15},
    "above left": {"dx": -8, "dy": -9, "align": "right"}, "below right": {"dx": 8, "dy": 10, "align": "left"},
    "far above": {"dy": -27}, "far below": {"dy": 29},
}  # fmt: skip
"""Offset of a label from its point, the preferred ones first."""
_EXACT = 1e-6
"""Errors and divergences up to this are those of equal weights; they are on the lower edge, not decades below."""
_LABEL, _MARGIN = 180, 24
_TITLE = 44
"""Most characters of a histogram's title."""
_Box = tuple[float, float, float, float]
"""Left, low, right, high."""
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))  # as in the tables


def _chart(spec: Spec) -> Spec:
    """The specification with its schema and the configuration of all charts."""
    margin = {"left": 16, "right": 16, "top": 5, "bottom": 5}  # a wider font than MEASURED needs it
    return {"$schema": SCHEMA, "config": _CONFIG, "padding": margin, **spec}


def size_against_error(report: Overview) -> Spec:
    """Size against error, or against divergence if that was measured: a point for each candidate."""
    measured = diverging(report.candidates)
    names = _short([c.label for c in report.candidates])
    sizes = [c.inspection.nbytes for c in report.candidates]
    scale, unit = _unit_of(sizes)
    found = [(c.divergence if measured else c.error) or 0.0 for c in report.candidates]
    floor = 0.3 * min((v for v in found if v > _EXACT), default=10 * _EXACT)
    values = [max(v, floor) for v in found]
    sides = _label_sides(names, _spread(sizes, _WIDTH), _spread([math.log(v) for v in values], 320), 320)
    rows = [
        {
            "model": name, "side": sides[i], "size": sizes[i] / scale, "y": values[i], "value": found[i],
            "kind": _KINDS[0 if c.label in report.efficient else 1],
        }
        for i, (name, c) in enumerate(zip(names, report.candidates, strict=True))
    ]  # fmt: skip
    title = "KL divergence, nats per token" if measured else "relative error of the weights (RMS)"
    label = f"datum.model + ': ' + format(datum.size, '.4g') + ' {unit}, {title} ' + format(datum.value, '.4g')"
    scale_y = {"type": "log", "padding": 20, "nice": False}
    line: Spec = {
        "transform": [{"filter": "datum.kind == 'efficient'"}],
        "mark": {"type": "line", "color": _COLORS[0], "strokeDash": [4, 4], "aria": False},
        "encoding": {"order": {"field": "size"}},
    }
    return _points(rows, unit, (title, scale_y), label, _KINDS[:2], 320, line)


def speed_against_size(report: Overview) -> Spec:
    """Size against decoded tokens per second on this machine; empty if that was not measured."""
    timed = [c for c in (report.reference, *report.candidates) if c.speed is not None]
    if not any(c.speed is not None for c in report.candidates):
        return {}
    sizes = [c.inspection.nbytes for c in timed]
    scale, unit = _unit_of(sizes)
    rates = [c.speed.decode if c.speed is not None else 0.0 for c in timed]
    top = 1.12 * max(rates)
    labels = [c.label for c in timed]
    sides = _label_sides(labels, _spread(sizes, _WIDTH), [240 * rate / (top or 1.0) for rate in rates], 240)
    rows = [
        {
            "model": c.label, "side": sides[i], "size": sizes[i] / scale, "y": rates[i],
            "prompt": c.speed.prompt if c.speed is not None else 0.0,
            "kind": _KINDS[2 if c is report.reference else 0 if c.label in report.efficient else 1],
        }
        for i, c in enumerate(timed)
    ]  # fmt: skip
    label = (
        f"datum.model + ': ' + format(datum.size, '.4g') + ' {unit}, ' + format(datum.y, '.4g') + ' tokens per second, "
        "prompt ' + format(datum.prompt, '.4g')"
    )
    scale_y = {"domain": [0, top]}
    return _points(rows, unit, ("tokens per second", scale_y), label, _KINDS, 240)


def _points(
    rows: list[dict[str, Any]],
    unit: str,
    y: tuple[str, Spec],
    label: str,
    kinds: Sequence[str],
    height: int,
    *below: Spec,
) -> Spec:
    """Points at (size, y) with their names. y: title and scale; label: expression of a point's label; below: layers."""
    x = {"field": "size", "type": "quantitative", "scale": {"zero": False, "padding": 24}, "title": f"size, {unit}"}
    vertical = {
        "field": "y",
        "type": "quantitative",
        "title": y[0],
        "axis": {"tickCount": 5, "format": "~g" if y[1].get("type") == "log" else ",~r"},
        "scale": y[1],
    }
    color = {
        "field": "kind", "type": "nominal", "title": None,
        "scale": {"domain": list(kinds), "range": _KIND_COLORS[: len(kinds)]}, "legend": {"orient": "top"},
    }  # fmt: skip
    return _chart(
        {
            "width": _WIDTH, "height": height, "data": {"values": rows},
            "transform": [{"calculate": label, "as": "label"}],
            "encoding": {"x": x, "y": vertical, "description": {"field": "label", "type": "nominal"}},
            "layer": [
                *below,
                {"mark": {"type": "point", "filled": True, "size": 110, "opacity": 1}, "encoding": {"color": color}},
                *_labels({row["side"] for row in rows}),
            ],
        }
    )  # fmt: skip


def _unit_of(sizes: Sequence[int]) -> tuple[float, str]:
    """Bytes of the unit for these sizes, and its name."""
    return next((pair for pair in _UNITS if max(sizes) >= pair[0]), (1.0, "bytes"))


def _labels(sides: set[str]) -> list[Spec]:
    """Layers with the labels of points, each at its side."""
    return [
        {
            "transform": [{"filter": f"datum.side == '{side}'"}],
            "mark": where | {"type": "text", "aria": False, "limit": _LABEL},
            "encoding": {"text": {"field": "model"}},
        }
        for side, where in _SIDES.items()
        if side in sides
    ]  # fmt: skip


def _spread(values: Sequence[float], extent: float) -> list[float]:
    """Values as pixels of an axis of this length with a margin at both ends."""
    low, high = min(values), max(values)
    return [_MARGIN + (v - low) / ((high - low) or 1.0) * (extent - 2 * _MARGIN) for v in values]


def _label_sides(names: Sequence[str], x: Sequence[float], y: Sequence[float], height: float) -> list[str]:
    """The place of the label of each point: the first of _SIDES where it covers no point and no other label.

    x, y: pixels from the lower left corner of the plot, _WIDTH by height. The first choice is free of a line that joins
    the points from the upper left to the lower right.
    """
    points = [(a - 6, b - 6, a + 6, b + 6) for a, b in zip(x, y, strict=True)]
    sides, placed = [""] * len(names), list[_Box]()
    for i in sorted(range(len(names)), key=lambda i: (x[i], -y[i])):
        boxes = {side: _label_box(names[i], x[i], y[i], where) for side, where in _SIDES.items()}
        taken = [*placed, *(p for j, p in enumerate(points) if j != i)]

        def faults(side: str, boxes: dict[str, _Box] = boxes, taken: list[_Box] = taken) -> int:
            left, low, right, high = box = boxes[side]
            outside = left < 0 or low < 0 or right > _WIDTH or high > height
            return outside + sum(_overlap(box, other) for other in taken)

        sides[i] = min(_SIDES, key=faults)
        placed.append(boxes[sides[i]])
    return sides


def _label_box(name: str, x: float, y: float, where: dict[str, Any]) -> _Box:
    """The place of a label in pixels, estimated: 6.3 for each character."""
    width, at = min(6.3 * len(name), _LABEL), x + where.get("dx", 0)
    left = at - width * {"left": 0.0, "right": 1.0}.get(where.get("align", ""), 0.5)
    middle = y - where.get("dy", 0)
    return left, middle - 6, left + width, middle + 6


def _overlap(a: _Box, b: _Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _short(labels: Sequence[str]) -> list[str]:
    """Labels without their common first and last words."""
    if len(labels) < 2:
        return list(labels)
    words = [re.split(r"(?<=[-_./ ])|(?=[-_./ ])", label) for label in labels]
    first, least = words[0], min(map(len, words))
    head = next((i for i in range(least) if any(w[i] != first[i] for w in words)), least)
    tail = next((i for i in range(least - head) if any(w[-1 - i] != first[-1 - i] for w in words)), least - head)
    short = ["".join(w[head : len(w) - tail]).strip("-_./ ") for w in words]
    return short if all(short) else list(labels)


def _tensors(candidate: Candidate) -> Sequence[tuple[str, Shape, str]]:
    """Names, shapes and codecs: of the tensors that are compared, or of all."""
    if candidate.comparison is not None:
        return [(t.name, t.shape, t.b) for t in candidate.comparison.tensors]
    return candidate.tensors or [(w.name, w.shape, str(w.codec)) for w in candidate.inspection.tensors]


def _cells(candidate: Candidate) -> tuple[list[dict[str, Any]], list[str]]:
    """The tensors of the layers, and their kinds in the model's order; experts of a kind are one cell."""
    cells: dict[tuple[int, str], dict[str, Any]] = {}
    errors = None if candidate.comparison is None else [t.error for t in candidate.comparison.tensors]
    for i, (name, shape, codec) in enumerate(_tensors(candidate)):
        place = layer_and_kind(name)
        if place is None or len(shape) < 2:
            continue
        cell = cells.setdefault(place, {"layer": place[0], "kind": place[1], "codec": codec, "error": None})
        cell["codec"] = codec if cell["codec"] == codec else "mixed"
        if errors is not None:
            cell["error"] = errors[i] if cell["error"] is None else cell["error"] + errors[i]
    return list(cells.values()), list(dict.fromkeys(kind for _, kind in cells))


def _grid(cells: Sequence[dict[str, Any]], kinds: Sequence[str], color: dict[str, Any]) -> Spec:
    layers = 1 + max(cell["layer"] for cell in cells)
    x = {
        "field": "layer", "type": "ordinal", "title": "layer", "scale": {"domain": list(range(layers))},
        "axis": {"labelAngle": 0, "labelOverlap": True, "ticks": False},
    }  # fmt: skip
    y = {"field": "kind", "type": "nominal", "sort": list(kinds), "title": None, "axis": {"ticks": False}}
    return _chart(
        {
            "width": _WIDTH, "height": {"step": 22}, "data": {"values": list(cells)},
            "mark": {"type": "rect", "stroke": "var(--paper)", "strokeWidth": 1},
            "encoding": {"x": x, "y": y, "color": color, "description": {"field": "label", "type": "nominal"}},
        }
    )  # fmt: skip


def type_map(candidate: Candidate) -> Spec:
    """Layers by kind of matrix, colored by codec; empty if no tensor has a layer number."""
    cells, kinds = _cells(candidate)
    if not cells:
        return {}
    codecs = list(dict.fromkeys(cell["codec"] for cell in cells))
    rows = [
        {
            **{k: cell[k] for k in ("layer", "kind", "codec")},
            "label": f"layer {cell['layer']}, {cell['kind']}: {cell['codec']}",
        }
        for cell in cells
    ]
    colors = [_COLORS[i % len(_COLORS)] for i in range(len(codecs))]
    return _grid(rows, kinds, {
        "field": "codec", "type": "nominal", "scale": {"domain": codecs, "range": colors}, "title": None,
        "legend": {"orient": "top", "columns": 5},
    })  # fmt: skip


def error_map(candidate: Candidate) -> Spec:
    """Layers by kind of matrix, colored by signal-to-noise ratio; empty if nothing in the layers lost anything."""
    cells, kinds = _cells(candidate)
    rows = [
        {
            "layer": cell["layer"], "kind": cell["kind"],
            "snr": None if math.isinf(cell["error"].snr) else cell["error"].snr,
            "label": f"layer {cell['layer']}, {cell['kind']}: {cell['codec']}, {decibel(cell['error'].snr)}",
        }
        for cell in cells
        if cell.get("error") is not None
    ]  # fmt: skip
    if not any(row["snr"] is not None for row in rows):
        return {}
    return _grid(rows, kinds, {
        "field": "snr", "type": "quantitative", "title": "SNR, dB", "scale": {**_PALETTE, "zero": False},
        "legend": {"orient": "top", "gradientLength": 200},
        "condition": {"test": "datum.snr === null", "value": "var(--line)"},
    })  # fmt: skip


def histogram_bars(histograms: Sequence[Histogram]) -> Spec:
    """Weights of the reference as bars, those of the candidate as a line over them, for each tensor; empty for none."""
    if len(histograms) == 1:
        return _chart(_histogram(histograms[0]))
    return _chart({"columns": 2, "spacing": 28, "concat": [_histogram(h) for h in histograms]}) if histograms else {}


def _title(tensor: str) -> str:
    """The name, or its end: the library takes long to find how many characters fit."""
    return tensor if len(tensor) <= _TITLE else "…" + tensor[1 - _TITLE :]


def _histogram(histogram: Histogram) -> dict[str, Any]:
    step = 2 * histogram.edge / BINS
    rows = [
        {
            "from": i * step - histogram.edge, "to": (i + 1) * step - histogram.edge, "reference": a, "candidate": b,
            "label": f"{i * step - histogram.edge:.4g} to {(i + 1) * step - histogram.edge:.4g}: "
            f"{a} weights of the reference, {b} of this model",
        }
        for i, (a, b) in enumerate(zip(histogram.reference, histogram.candidate, strict=True))
    ]  # fmt: skip
    x = {"field": "from", "type": "quantitative", "title": None, "axis": {"tickCount": 5, "grid": False}}
    y = {"type": "quantitative", "title": None, "axis": {"tickCount": 3}}
    codes = "" if histogram.codes is None else "; codes -1, 0, +1: " + ", ".join(map(str, histogram.codes))
    return {
        "title": {
            "text": _title(histogram.tensor), "subtitle": f"{100 * histogram.outliers:.4g} % outliers{codes}",
            "anchor": "start", "color": _TEXT, "subtitleColor": "var(--soft)", "fontSize": 11, "subtitleFontSize": 11,
        },
        "width": 270, "height": 100, "data": {"values": rows},
        "layer": [
            {
                "mark": {"type": "rect", "color": "#9db8ea"},  # drawn three times as fast as bars of binned values
                "encoding": {
                    "x": x, "x2": {"field": "to"}, "y": {**y, "field": "reference"}, "y2": {"datum": 0},
                    "description": {"field": "label", "type": "nominal"},
                },
            },
            {
                "mark": {"type": "line", "color": _COLORS[1], "interpolate": "step-after", "aria": False},
                "encoding": {"x": x, "y": {**y, "field": "candidate"}},
            },
        ],
    }  # fmt: skip


def divergence_bars(candidate: Candidate) -> Spec:
    """The error of each layer's output, on the reference's input; empty if it was not measured."""
    found = None if candidate.evaluation is None else candidate.evaluation.divergence
    if found is None or not found.layers:
        return {}
    rows = [
        {
            "part": layer.name, "error": layer.alone,
            "label": f"{layer.name}: own error {layer.alone:.4g}, with all before it {layer.output:.4g}",
        }
        for layer in found.layers
    ]  # fmt: skip
    x = {
        "field": "part",
        "type": "nominal",
        "sort": None,
        "title": None,
        "axis": {"labelAngle": -60, "labelOverlap": True},
    }
    y = {"field": "error", "type": "quantitative", "title": "relative error of the output"}
    return _chart(
        {
            "width": _WIDTH, "height": 180, "data": {"values": rows}, "mark": {"type": "bar", "color": _COLORS[0]},
            "encoding": {"x": x, "y": y, "description": {"field": "label", "type": "nominal"}},
        }
    )  # fmt: skip
