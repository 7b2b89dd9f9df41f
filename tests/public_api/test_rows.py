"""Results as rows: plain values, the same columns in every row, and the figures of the result."""

from __future__ import annotations

import math

import numpy as np
import pytest

import polyquant as pq
from golden import VECTORS
from polyquant.analysis.headers import compare_headers

SOURCE = VECTORS / "models/tiny-llama-untied/hf"
TENSOR = {"tensor", "shape", "weights", "bytes", "bpw"}
ERROR = {"snr_db", "rrmse", "cosine", "max_error"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Every kind of result about a model and its quantized copy."""
    folder = tmp_path_factory.mktemp("rows")
    plan = pq.plan(SOURCE, "gguf", codec="q4_0")
    report = pq.convert(plan, folder / "q4.gguf")
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 30)
    return {
        "checkpoint": pq.open(SOURCE),
        "inspection": pq.inspect(SOURCE),
        "plan": plan,
        "report": report,
        "comparison": pq.compare(SOURCE, report.path),
        "headers": compare_headers(SOURCE, report.path),
        "certificate": pq.certify(SOURCE, report.path, logits=False),
        "checksums": pq.checksum(report.path),
        "findings": pq.validate(SOURCE, against=report.path),
        "evaluation": pq.evaluate(report.path, text=text, against=SOURCE, context=32, tokens=100),
        "codecs": pq.codecs(),
        "recipes": pq.recipes(),
        "formats": pq.formats(),
    }


def plain(value: object) -> bool:
    return value is None or type(value) in (str, int, float, bool) or (type(value) is tuple and all(map(plain, value)))


def test_rows_are_plain_and_complete(made):
    for name, result in made.items():
        rows = result.rows()
        assert rows or name == "findings"
        assert all(row.keys() == rows[0].keys() for row in rows), name
        wrong = {k: type(v) for row in rows for k, v in row.items() if not plain(v)}
        assert not wrong, name


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("checkpoint", TENSOR | {"codec"}),
        ("inspection", TENSOR | {"codec"}),
        ("plan", TENSOR | {"action", "source", "target", "why"}),
        ("report", TENSOR | ERROR | {"action", "source", "target", "note"}),
        ("comparison", TENSOR | ERROR | {"a", "b", "equal_codes"}),
    ],
)
def test_columns_of_tensors(made, name, columns):
    assert made[name].rows()[0].keys() == columns


def test_figures_are_those_of_the_result(made):
    comparison = made["comparison"]
    rows = comparison.rows()
    assert [r["snr_db"] for r in rows] == [t.error.snr for t in comparison.tensors]
    assert sum(r["bytes"] for r in rows) * 8 / sum(r["weights"] for r in rows) == pytest.approx(comparison.bpw)
    assert [r["bytes"] for r in made["plan"].rows()] == [s.nbytes for s in made["plan"].steps]
    assert {r["snr_db"] for r in rows if r["b"] == "f32"} == {math.inf}


def test_an_evaluation_has_a_row_for_each_model(made):
    evaluation = made["evaluation"]
    model, reference = evaluation.rows()
    assert model["perplexity"] == evaluation.model.perplexity.value
    assert model["kl"] == evaluation.divergence.kl.value and reference["kl"] is None
    assert [r["part"] for r in evaluation.divergence.rows()][0::3] == ["embedding", "head"]
    page = evaluation._repr_html_()
    assert page.count("<tr>") == 3 and "KL divergence" in page
    assert repr(evaluation.divergence).startswith("<Divergence KL divergence ")


def test_findings_have_their_severity_as_text():
    finding = pq.Finding("TEN004", pq.Severity.WARNING, "every weight is zero", "a.weight")
    assert pq.Findings([finding]).rows() == [
        {
            "code": "TEN004", "severity": "warning", "message": "every weight is zero", "tensor": "a.weight",
            "file": None,
        }
    ]  # fmt: skip


def test_pandas_takes_them(made):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    for name, result in made.items():
        frame = pandas.DataFrame(result.rows())
        assert len(frame) == len(result.rows()), name
    frame = pandas.DataFrame(made["comparison"].rows())
    assert frame["snr_db"].dtype == np.float64 and frame["bytes"].dtype == np.int64
    assert frame.groupby("b")["bytes"].sum().sum() == frame["bytes"].sum()
