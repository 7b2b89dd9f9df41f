"""`polyquant.report`: its rows and figures are those of the page, and a figure is complete without the page."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest

import polyquant as pq
from golden import VECTORS
from polyquant.analysis.report import charts
from polyquant.errors import PlanError, UnknownNameError

pytest.importorskip("vl_convert", reason="vl-convert-python is not installed")

SOURCE = VECTORS / "models/tiny-llama-untied/hf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    for codec in ("q8_0", "q2_k"):
        pq.quantize(SOURCE, folder / f"tiny-{codec}.gguf", codec=codec)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 90)
    return folder


@pytest.fixture(scope="module")
def report(folder):
    return pq.report(sorted(folder.glob("*.gguf")), against=SOURCE, text=folder / "text.txt", tokens=300)


def test_rows_are_those_of_compare_and_evaluate(report, folder):
    reference, q2, q8 = report.rows()
    comparison = pq.compare(SOURCE, folder / "tiny-q2_k.gguf")
    evaluation = pq.evaluate(folder / "tiny-q2_k.gguf", text=folder / "text.txt", against=SOURCE, tokens=300)
    assert (q2["snr_db"], q2["rrmse"]) == (comparison.error.snr, comparison.error.rrmse)
    assert q2["kl"] == evaluation.divergence.kl.value
    assert reference["perplexity"] == evaluation.reference.perplexity.value
    assert (reference["snr_db"], reference["kl"], reference["efficient"]) == (None, None, None)
    assert q8["efficient"] and q2["efficient"] and q8["model"] == "tiny-q8_0.gguf"
    assert all(row.keys() == reference.keys() for row in report.rows())


def test_figures_stand_alone(report):
    names = [(f.name, f.model) for f in report.figures]
    assert names[0] == ("size_against_error", "") and len(names) == len(set(names))
    kinds = {"type_map", "error_map", "divergence", "histograms"}
    assert {name for name, model in names if model == "tiny-q2_k.gguf"} == kinds
    for figure in report.figures:
        shown = figure._repr_mimebundle_()
        assert json.loads(json.dumps(shown)) == shown
        assert "var(--" not in json.dumps(shown), figure
        picture = ElementTree.fromstring(shown["image/svg+xml"])
        assert int(picture.get("width")) > 100 and int(picture.get("height")) > 50
        assert shown["application/vnd.vegalite.v5+json"]["$schema"].endswith("/v5.json")
        assert shown["text/plain"] == repr(figure) and len(repr(figure)) < 100


def test_values_of_a_figure(report, folder):
    comparison = pq.compare(SOURCE, folder / "tiny-q2_k.gguf")
    cells = report.figure("error_map", "tiny-q2_k.gguf").spec["data"]["values"]
    drawn = {(cell["layer"], cell["kind"]): cell["snr"] for cell in cells}
    assert drawn[0, "ffn_down"] == next(t.error.snr for t in comparison.tensors if t.name == "blk.0.ffn_down.weight")


def test_names_of_figures(report):
    with pytest.raises(UnknownNameError, match="type_map"):
        report.figure("typemap")
    with pytest.raises(PlanError, match=r"several models.*tiny-q2_k\.gguf"):
        report.figure("error_map")
    with pytest.raises(UnknownNameError, match=r"tiny-q8_0\.gguf"):
        report.figure("error_map", "tiny-q8")


def test_shown_in_a_notebook(report):
    for value in (report, report.overview, *report.overview.candidates, *report.figures):
        assert repr(value).startswith(f"<{type(value).__name__} ") and len(repr(value)) < 200
    shown = report._repr_html_()
    assert shown.count("<tr>") == 4 and "KL divergence" in shown


def test_saved_page_is_that_of_the_command(report, tmp_path):
    path = report.save(tmp_path / "report.html")
    text = path.read_text()
    assert "tiny-q2_k.gguf" in text and text.startswith("<!DOCTYPE html>")
    with pytest.raises(PlanError, match="target exists"):
        report.save(path)
    assert report.save(path, overwrite=True) == path


def test_the_first_path_is_the_reference(folder):
    paths = sorted(folder.glob("*.gguf"))
    events: list[pq.Progress] = []
    alone = pq.report(paths[0])
    assert [f.name for f in alone.figures] == ["type_map"] and alone.figure("type_map").model == paths[0].name
    pair = pq.report(paths, histograms=0, on_progress=events.append)
    assert [row["snr_db"] is None for row in pair.rows()] == [True, False]
    assert events[-1].done == events[-1].total
    with pytest.raises(PlanError, match="at least one model"):
        pq.report([])


def test_progress_covers_the_evaluation(folder):
    events: list[pq.Progress] = []
    path = folder / "tiny-q8_0.gguf"
    pq.report(path, against=SOURCE, text=folder / "text.txt", tokens=300, histograms=0, on_progress=events.append)
    shares = [event.done / event.total for event in events]
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert 0.5 in shares  # between comparing and evaluating


def test_without_the_package_the_specification_is_shown(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    figure = report.figure("size_against_error")
    assert figure._repr_mimebundle_().keys() == {"application/vnd.vegalite.v5+json", "text/plain"}
    with pytest.raises(pq.UnsupportedError, match=re.escape("polyquant[report]")):
        figure.svg()


@pytest.mark.parametrize(
    "points",
    [
        {"q8_0": (600, 20)},
        {"q4_k_m": (100, 200), "q4_k_s": (104, 196), "q5_k_m": (125, 190), "iq4_xs": (98, 188), "mxfp4": (104, 214)},
        {"a-long-name-of-a-model": (30, 300), "another-long-name": (610, 18), "b": (612, 40), "c": (24, 310)},
    ],
    ids=lambda points: f"{len(points)} points",
)
def test_labels_cover_no_point_no_label_and_no_edge(points):
    x, y = zip(*points.values(), strict=True)
    sides = charts._label_sides(list(points), x, y, 320)
    boxes = [charts._label_box(n, *points[n], charts._SIDES[side]) for n, side in zip(points, sides, strict=True)]
    boxes += [(a, b, a, b) for a, b in points.values()]
    assert not any(charts._overlap(a, b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(left >= 0 and right <= 640 and low >= 0 and high <= 320 for left, low, right, high in boxes)


def test_labels_of_a_falling_line_are_beside_it():
    assert charts._label_sides(["a", "b", "c"], [100, 300, 500], [300, 200, 100], 320) == ["above right"] * 3
