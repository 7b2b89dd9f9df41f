"""The report: its figures are those of `compare`, and the page is complete, self-contained and safe."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import polyquant as pq
from golden import VECTORS
from polyquant.analysis.report import charts
from polyquant.analysis.report.drawing import ChartProcess, draw, require_packages
from polyquant.analysis.report.gather import BINS, gather, layer_and_kind
from polyquant.analysis.report.page import begin_charts, page, refuse_existing
from polyquant.errors import PlanError, UnsupportedError

pytest.importorskip("vl_convert", reason="vl-convert-python is not installed")

SOURCE = VECTORS / "models/tiny-llama-untied/hf"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    for codec in ("q8_0", "q2_k", "tq2_0"):
        pq.quantize(SOURCE, folder / f"tiny-{codec}.gguf", codec=codec)
    pq.quantize(SOURCE, folder / "tiny-wasteful.gguf", codec="q8_0", rules=["*ffn*=f16", "*attn*=q2_k"])
    return sorted(folder.glob("*.gguf"))


@pytest.fixture(scope="module")
def report(models):
    return gather(SOURCE, models)


class Page(HTMLParser):
    """The elements of a page, and the problems that a browser would hide."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_figures_are_those_of_compare(report, models):
    for candidate, path in zip(report.candidates, models, strict=True):
        expected = pq.compare(SOURCE, path)
        assert candidate.comparison.to_json() == expected.to_json()
        assert candidate.inspection.nbytes == pq.inspect(path).nbytes


def test_a_model_that_another_beats_in_size_and_error_is_not_efficient(report):
    labels = {c.label for c in report.candidates}
    assert labels - report.efficient == {"tiny-wasteful.gguf"}


def test_labels_are_distinct_and_informative(tmp_path):
    for name in ("a/hf", "b/hf"):
        shutil.copytree(SOURCE, tmp_path / name)
    found = gather(tmp_path / "a/hf", [tmp_path / "b/hf"])
    assert (found.reference.label, found.candidates[0].label) == ("a/hf", "b/hf")
    with pytest.raises(PlanError, match="the same path is given twice"):
        gather(tmp_path / "a/hf", [tmp_path / "a/hf"])


def test_histograms_count_the_sampled_weights(report):
    q2 = next(c for c in report.candidates if "q2_k" in c.label)
    assert len(q2.histograms) == 4
    worst = min((t for t in q2.comparison.tensors if len(t.shape) > 1), key=lambda t: t.error.snr)
    first = q2.histograms[0]
    assert first.tensor == worst.name and sum(first.reference) == sum(first.candidate) == np.prod(worst.shape)
    assert len(first.reference) == BINS and first.codes is None and 0 <= first.outliers < 0.01
    ternary = next(c for c in report.candidates if "tq2_0" in c.label)
    assert all(len(h.codes) == 3 and sum(h.codes) > 1000 for h in ternary.histograms)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("blk.3.attn_q.weight", (3, "attn_q")),
        ("model.layers.11.mlp.experts.7.down_proj.weight", (11, "mlp.experts.*.down_proj")),
        ("output.weight", None),
        ("blk.x.attn_q.weight", None),
    ],
)
def test_layer_and_kind(name, place):
    assert layer_and_kind(name) == place


def test_labels_in_the_chart_omit_the_common_part():
    assert charts._short(["m-q4_k.gguf", "m-q8_0.gguf"]) == ["q4_k", "q8_0"]
    assert charts._short(["a/q4.gguf", "b/q4.gguf"]) == ["a", "b"]
    assert charts._short(["x.gguf", "x-2.gguf"]) == ["x.gguf", "x-2.gguf"]
    assert charts._short(["only"]) == ["only"]


def test_the_page(report):
    text = page(report)
    assert len(text) < 2_000_000
    found = Page(text)
    ids = [a["id"] for _, a in found.tags if "id" in a and not a["id"].startswith("clip")]
    assert len(ids) == len(set(ids))
    for tag, attributes in found.tags:
        assert not ({"src", "xlink:href", "data"} & attributes.keys()), (tag, attributes)
        link = attributes.get("href")
        assert link is None or link == "data:," or link[1:] in ids, (tag, link)
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org)", text)
    for path in report.candidates:
        assert path.label in text
    marks = re.findall(r'aria-label="layer \d+, [^"]* dB"', text)
    assert len(marks) == 4 * 2 * 7
    assert "q2_k" in text and "quantized" in text and "None in headers and small files." in text


def test_numbers_on_axes_are_not_cut(report):
    chart = draw(charts.size_against_error(report))
    labels = {float(t) for t in re.findall(r">(\d+\.\d+)</text>", chart)}
    assert len(labels) > 3 and 0.0 not in labels


def test_names_from_files_are_escaped(tmp_path):
    name = "<img src=x onerror=alert(1)>'\"&.gguf"
    target = tmp_path / name
    pq.quantize(SOURCE, target, codec="q4_0")
    text = page(gather(SOURCE, [target]))
    assert "<img" not in text and "&lt;img" in text
    Page(text)


def test_one_model_alone(models):
    text = page(gather(models[0], []))
    assert "Codecs by layer" in text and "Overview" not in text
    Page(text)


def test_an_evaluation(models, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("the quick brown fox jumps over the lazy dog. " * 90)
    found = gather(SOURCE, models[:1], text=book, tokens=400)
    expected = pq.evaluate(models[0], text=book, against=SOURCE, tokens=400)
    assert found.candidates[0].divergence == expected.divergence.kl.value
    text = page(found)
    assert f"{expected.model.perplexity.value:.4f}" in text and "each layer" in text
    Page(text)


def test_existing_files(report, models, tmp_path):
    target = tmp_path / "report.html"
    refuse_existing(target, overwrite=False)
    target.write_text(page(report))
    refuse_existing(target, overwrite=True)
    for bad, overwrite in ((target, False), (models[0], True), (tmp_path, True), (tmp_path / "no/where.html", True)):
        with pytest.raises(PlanError):
            refuse_existing(bad, overwrite=overwrite)


@pytest.mark.parametrize("missing", ["vl_convert", "jinja2"])
def test_missing_packages_are_named_before_any_work(missing, monkeypatch):
    monkeypatch.setattr(
        "polyquant.analysis.report.drawing.find_spec", lambda name: None if name == missing else object()
    )
    with pytest.raises(UnsupportedError, match=r"pip install 'polyquant\[report\]'"):
        require_packages()


def test_a_child_process_draws_the_same_charts(report):
    with ChartProcess() as process:
        process.begin({})
        for candidate in report.candidates:
            begin_charts(candidate, process)
        there, here = page(report, process), page(report)
    numbered = re.compile(r"(?:clip|gradient_)\d+")  # ids are counted in each process
    assert numbered.sub("", there) == numbered.sub("", here)


@pytest.mark.parametrize("program", ["/nonexistent", "/bin/false"])
def test_without_a_child_process_charts_are_drawn_here(report, program, monkeypatch):
    spec = charts.size_against_error(report)
    monkeypatch.setattr("polyquant.analysis.report.drawing.sys.executable", program)
    with ChartProcess() as process:
        process.begin(spec)
        assert draw(spec, process) == draw(spec)
