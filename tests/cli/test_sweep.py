"""polyquant sweep: the plan, the table, JSON and CSV with the same figures, the page."""

from __future__ import annotations

import csv
import io
import json

import pytest

from golden import VECTORS

SOURCE = VECTORS / "models/tiny-llama-untied/hf"


@pytest.fixture(scope="module")
def swept(polyquant, tmp_path_factory):
    """A finished sweep: its command and output."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    command = ("sweep", SOURCE, "--text", folder / "text.txt", "--work", folder / "work", "--recipes", "q8_0,i2_s")
    return (*command, "--tokens", 600), polyquant(*command, "--tokens", 600)


def test_the_output(swept):
    _, done = swept
    assert done.code == 0 and not done.err, done
    lines = done.out.splitlines()
    assert any(line.startswith("[0/2] source: ") for line in lines) and any("tokens/s" in line for line in lines)
    row = next(line.split() for line in lines if line.startswith("q8_0 *"))
    assert len(row) == 11  # name, mark, size, unit, bpw, perplexity, KL, two speeds, memory, unit
    assert any(line.startswith("failed: i2_s: ") and "needs ternary weights" in line for line in lines)
    assert any(line.startswith("recommended: q8_0 is the only candidate within") for line in lines)
    assert lines[-1].strip().endswith("work/q8_0.gguf")
    told = ("sweep of", "failed: ", "warning: ", "recommended: ", "  /", "[", "* ")
    assert all(len(line) <= 80 or line.startswith(told) for line in lines)


def test_formats_have_the_same_figures(polyquant, swept):
    command, human = swept
    as_json, as_csv = polyquant(*command, "--format", "json"), polyquant(*command, "--format", "csv")
    found = json.loads(as_json.out)
    rows = list(csv.DictReader(io.StringIO(as_csv.out)))
    assert [r["candidate"] for r in rows] == ["source", "q8_0", "i2_s"] == [r["candidate"] for r in found["rows"]]
    for row, value in zip(rows, found["rows"], strict=True):
        assert row == {k: "" if v is None else str(v) for k, v in value.items()}
    q8 = found["rows"][1]
    table = next(line for line in human.out.splitlines() if line.startswith("q8_0 *"))
    for text in (f"{q8['kl']:.5f}", f"{q8['perplexity']:.4g}", f"{q8['tokens_per_second']:.1f}", f"{q8['bpw']:.3f}"):
        assert text in table
    assert found["recommended"] == "q8_0" and found["advice"] in human.out
    assert all(o.err.startswith("[0/2] source") for o in (as_json, as_csv))


def test_a_dry_run_writes_nothing(polyquant, swept, tmp_path):
    command, _ = swept
    for style in ("human", "json"):
        shown = polyquant(*command, "--work", tmp_path / "new", "--dry-run", "--format", style)
        assert shown.code == 0 and "q8_0" in shown.out and "i2_s" in shown.out
    assert [c["candidate"] for c in json.loads(shown.out)["candidates"]] == ["q8_0", "i2_s"]
    assert not list(tmp_path.iterdir())


def test_the_page(polyquant, swept, tmp_path):
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed")
    command, _ = swept
    done = polyquant(*command, "-o", tmp_path / "report.html")
    assert done.code == 0 and "report.html" in done.out.splitlines()[-1].replace("\n", "")
    assert "tokens/s" in (tmp_path / "report.html").read_text()
    assert polyquant(*command, "-o", tmp_path / "report.html").code == 0  # the same command replaces its page
    (tmp_path / "report.html").write_text("notes")
    assert polyquant(*command, "-o", tmp_path / "report.html").code == 2
    assert (tmp_path / "report.html").read_text() == "notes"


def test_without_the_packages_of_the_page_the_table_comes(monkeypatch, capsys, swept, tmp_path):
    from polyquant.analysis.report import drawing
    from polyquant.cli import main

    monkeypatch.setattr(drawing, "find_spec", lambda name: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.excepthook", None)
    main([str(word) for word in (*swept[0], "-o", tmp_path / "report.html")])
    out, err = capsys.readouterr()
    assert "no page will be written" in err and "pip install 'polyquant[report]'" in err and "q8_0 *" in out
    assert not list(tmp_path.iterdir())


WRONG = {
    ("--recipes", "q8"): "q8",
    ("--recipes", "i2_s"): "needs ternary weights",
    ("--bpw", "9..1"): "2.5..5",
    ("--max-time", "soon"): "2h",
    ("--max-time", "1s"): "the time budget does not hold even one candidate",
    ("--max-disk", "1KB"): "the disk budget does not hold even one candidate",
    ("--max-size", "big"): "not a memory size",
    ("--keep", "some"): "'some' is not one of",
    ("--calibration", "nothing.txt"): "nothing.txt",
    ("--text", "nothing.txt"): "nothing.txt",
    ("--context", "4000000"): "context",
    ("-o", "no/such/page.html"): "does not exist",
}


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_wrong_options_are_one_line(words, polyquant, swept, tmp_path):
    command = (*swept[0], "--work", tmp_path / "work", "--recipes", "q8_0", *words)
    if words[0] == "--recipes":
        command = (*[w for w in swept[0] if w not in ("--recipes", "q8_0,i2_s")], "--work", tmp_path / "work", *words)
    done = polyquant(*command)
    assert done.code == 2 and "Traceback" not in done.err and WRONG[words] in done.err, done
