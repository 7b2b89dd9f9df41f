"""The repr of a value is one short line, and as bounded, escaped tables in a notebook."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np
import pytest

import polyquant as pq
from polyquant.analysis.demo import demo_model
from polyquant.registry import known_codecs
from polyquant.tables import ROWS

EVIL = '<img src=x onerror="alert(1)">&\x1b[31m\u202e\n'


class Tags(HTMLParser):
    """Collects the tags of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not attrs or (tag in ("th", "td") and attrs == [("style", "text-align:left")])


def tags(page: str) -> list[str]:
    found = Tags()
    found.feed(page)
    return found.tags


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A file with more tensors than a table shows, whose names are markup and terminal controls."""
    path = tmp_path_factory.mktemp("hostile") / "evil.safetensors"
    pq.save({f"{EVIL}{i}": np.ones((2, 32), np.float32) for i in range(ROWS + 25)}, path)
    return path


def values(path, folder):
    plan = pq.plan(path, "hf", codec="bf16")
    yield pq.open(path)
    yield plan
    yield pq.convert(plan, folder / "out")
    yield pq.compare(path, folder / "out")
    yield pq.certify(path, folder / "out", logits=False)
    yield pq.inspect(path)
    yield pq.Findings(pq.Finding("TEN001", pq.Severity.ERROR, EVIL, EVIL, EVIL) for _ in range(ROWS + 25))


def test_tables_escape_names_and_are_bounded(hostile, tmp_path):
    for value in values(hostile, tmp_path):
        page = value._repr_html_()
        found = tags(page)
        assert set(found) <= {"div", "strong", "table", "thead", "tbody", "tr", "th", "td"}, type(value)
        assert found.count("tr") <= ROWS + 1
        assert "\x1b" not in page and "\u202e" not in page and "\\x1b" in page
        if not isinstance(value, pq.Inspection):  # groups
            assert "... and 25 more" in page, type(value)
        assert len(page) < 40_000


def test_reprs_are_short_and_print_nothing_raw(hostile, tmp_path):
    for value in values(hostile, tmp_path):
        text = repr(value)
        assert len(text) < (15_000 if isinstance(value, pq.Findings) else 400), type(value)
        assert "\x1b" not in text and "\u202e" not in text
        if not isinstance(value, pq.Findings):
            assert text.startswith(f"<{type(value).__name__} ") and "\n" not in text


def test_repr_of_a_weight_and_of_a_finding_is_escaped(hostile):
    weight = next(iter(pq.open(hostile).values()))
    assert "\x1b" not in repr(weight) and "\n" not in repr(weight)
    assert repr(pq.Finding("GGUF012", pq.Severity.ERROR, "broken", EVIL)).startswith("<Finding GGUF012 error ")


def test_plan_of_a_model():
    plan = pq.plan(demo_model("llama"), "gguf", recipe="q4_k_m")
    assert len(repr(plan)) < 2000
    assert "quantize" in repr(plan) and "bits per weight" in repr(plan)


@pytest.mark.parametrize("name", known_codecs())
def test_repr_of_a_codec_is_short(name):
    assert len(repr(pq.codec(name))) < 200


def test_model_and_reports_of_single_files(tmp_path):
    model = pq.load(demo_model("llama"))
    assert repr(model).startswith("<Model llama ") and len(repr(model)) < 400


def test_lists_are_tables():
    assert repr(pq.codecs()).splitlines()[1].split()[0] == "codec"
    assert tags(pq.formats()._repr_html_()).count("tr") == len(pq.formats()) + 1
    assert repr(pq.Findings()) == "0 findings"
    assert tags(pq.Findings()._repr_html_()) == ["div", "strong"]


def test_columns_of_numbers_are_aligned_to_the_right():
    page = pq.codecs()._repr_html_()
    assert '<th style="text-align:left">codec</th><th>bits per weight</th><th style="text-align:left">form</th>' in page
    assert '<td style="text-align:left">q4_k</td><td>4.5</td>' in page


def test_the_title_of_one_entry_is_singular():
    finding = pq.Finding("TEN004", pq.Severity.WARNING, "every weight is zero", "a.weight")
    assert repr(pq.Findings([finding])).splitlines()[0] == "1 finding"
    assert repr(pq.Findings([finding, finding])).splitlines()[0] == "2 findings"
