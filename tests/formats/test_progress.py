"""`progress=True`: every long function has it, the bar moves to the end and disappears, with tqdm and without."""

from __future__ import annotations

import inspect
import sys

import pytest

import polyquant as pq
from golden import VECTORS
from polyquant.formats.steps import Progress

SOURCE = VECTORS / "models/tiny-llama-untied/hf"
LONG = (
    "certify", "checksum", "compare", "convert", "evaluate", "importance", "merge", "pack", "plan", "quantize",
    "repair", "report", "save", "validate",
)  # fmt: skip


@pytest.fixture(params=["tqdm", "text"])
def drawing(request, monkeypatch):
    """Both ways to draw."""
    if request.param == "text":
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    else:
        pytest.importorskip("tqdm", reason="tqdm is not installed")
    return request.param


def test_functions_with_a_callback_have_the_option():
    having = {
        name
        for name in pq.__all__
        if name[0].islower() and inspect.signature(getattr(pq, name)).parameters.keys() & {"on_progress", "on_tensor"}
    }
    assert having == set(LONG)
    for name in LONG:
        parameter = inspect.signature(getattr(pq, name)).parameters["progress"]
        assert parameter.default is False and parameter.kind is parameter.KEYWORD_ONLY


def calls(folder):
    """Each function on a small model."""
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    small = folder / "small.gguf"
    yield "quantize", lambda **o: pq.quantize(SOURCE, small, codec="q8_0", **o)
    yield "convert", lambda **o: pq.convert(SOURCE, folder / "w8a16", to="msmodelslim", codec="w8a16", **o)
    yield "compare", lambda **o: pq.compare(SOURCE, small, **o)
    yield "certify", lambda **o: pq.certify(SOURCE, small, logits=False, **o)
    yield "checksum", lambda **o: pq.checksum(small, **o)
    yield "validate", lambda **o: pq.validate(small, **o)
    yield "evaluate", lambda **o: pq.evaluate(small, text=text, context=32, tokens=100, **o)
    yield "importance", lambda **o: pq.importance(SOURCE, folder / "i.gguf", calibration=text, windows=1, **o)
    yield "report", lambda **o: pq.report(small, against=SOURCE, **o)
    yield "repair", lambda **o: pq.repair(folder / "w8a16", folder / "repaired", dialect="ascendv1", **o)
    yield "pack", lambda **o: pq.pack(small, name="small", oci=folder / "oci", **o)
    yield "save", lambda **o: pq.save(dict(pq.open(small)), folder / "copy.gguf", **o)


def test_every_function_draws(drawing, tmp_path, capsys):
    for name, call in calls(tmp_path):
        events: list[Progress] = []
        call(progress=True, on_progress=events.append)
        shown = capsys.readouterr()
        assert name in shown.err and "%" in shown.err and not shown.out, name
        assert events and events[-1].done == events[-1].total, name
        assert not shown.err.rstrip("\r").split("\r")[-1].strip(), "the bar is removed"


def test_without_the_option_nothing_is_drawn(tmp_path, capsys):
    pq.quantize(SOURCE, tmp_path / "a.gguf", codec="q8_0")
    assert capsys.readouterr() == ("", "")


def test_measurements_of_a_plan_are_drawn(drawing, tmp_path, capsys):
    told: list[tuple[int, int, str]] = []
    plan = pq.plan(
        SOURCE, "trellis-v3", target_bpw=4.5, progress=True, on_tensor=lambda *event: told.append(event), smooth=None
    )
    assert plan.steps and told and "plan" in capsys.readouterr().err


def test_parts_are_drawn_while_they_are_copied(drawing, tmp_path, capsys):
    for part in ("1/2", "2/2"):
        (tmp_path / part[0]).mkdir()
        pq.convert(SOURCE, tmp_path / part[0] / "m.gguf", codec="q8_0", part=part)
    pq.merge(tmp_path / "m.gguf", [tmp_path / "1", tmp_path / "2"], progress=True)
    assert "merge" in capsys.readouterr().err


def test_the_bar_is_removed_after_an_error(drawing, tmp_path, capsys):
    def stop(progress: Progress) -> None:
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        pq.compare(SOURCE, SOURCE, progress=True, on_progress=stop)
    assert not capsys.readouterr().err.rstrip("\r").split("\r")[-1].strip()


def test_names_are_escaped(drawing, capsys):
    from polyquant.formats.progress import _bar

    with _bar("test") as move:
        move(Progress(1, 2, "\x1b[31m\u202e" + "n" * 500, 0.0))
    assert "\x1b[31m" not in (shown := capsys.readouterr().err) and "\u202e" not in shown
