"""A sweep: its figures are those of the other commands, budgets hold, nothing foreign is removed, it resumes."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import pytest

import polyquant as pq
from polyquant.analysis.sweep.advice import Limits, choose, efficient
from polyquant.analysis.sweep.run import Watch, outlook, run
from polyquant.errors import InputError, PlanError, UnknownNameError, UnsupportedError
from sweep.conftest import SOURCE, quick

NAMES = ["q8_0", "q4_0", "trellis:3:effort=fast", "i2_s"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, book):
    """A sweep in which each step runs in this process, and its work folder."""
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        work = tmp_path_factory.mktemp("finished") / "work"
        return pq.sweep(SOURCE, text=book, work=work, recipes=NAMES, keep="all"), work


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_figures_are_those_of_the_other_commands(finished, book):
    result, work = finished
    assert [t.name for t in result.trials] == NAMES
    assert names(work) == ["journal", "q4_0.gguf", "q8_0.gguf", "reference", "trellis-3-effort=fast"]
    alone = pq.evaluate(SOURCE, text=book, tokens=8192)
    assert result.reference.perplexity.value == pytest.approx(alone.model.perplexity.value, rel=1e-6)
    assert result.reference.nbytes == pq.inspect(SOURCE).nbytes
    for trial in result.trials[:3]:
        path = trial.path
        expected = pq.evaluate(path, text=book, against=SOURCE, tokens=8192)
        found = trial.measurement.evaluation
        assert found.windows == expected.windows > 1
        for figure in ("kl", "kl_99", "kl_max", "top_1", "log_ratio", "probability_rms"):
            mine, theirs = getattr(found.divergence, figure), getattr(expected.divergence, figure)
            assert getattr(mine, "value", mine) == pytest.approx(getattr(theirs, "value", theirs), rel=1e-5)
        assert found.model.perplexity.value == pytest.approx(expected.model.perplexity.value, rel=1e-6)
        assert found.reference.nll == result.reference.measurement.evaluation.model.nll
        assert (trial.nbytes, trial.bpw) == (pq.inspect(path).nbytes, pytest.approx(pq.inspect(path).bpw))
        assert trial.error.rrmse == pytest.approx(pq.compare(SOURCE, path).error.rrmse, rel=1e-6)
        assert trial.speed.decode > 0 and trial.speed.prompt > 0 and trial.speed.memory > 1 << 20


def test_a_candidate_that_is_not_possible_is_a_row_with_its_reason(finished):
    failed = finished[0].trials[3]
    assert (failed.status, failed.nbytes, failed.path) == ("failed", None, None)
    assert "needs ternary weights" in failed.reason


def test_rows_are_flat_and_equal_the_json(finished):
    result, _ = finished
    found = json.loads(json.dumps(result.to_json()))
    assert found["rows"] == json.loads(json.dumps(result.rows())) and len(found["rows"]) == 5
    assert all(row.keys() == found["rows"][0].keys() for row in found["rows"])
    assert [r["candidate"] for r in found["rows"]] == ["source", *NAMES]
    assert {r["candidate"] for r in found["rows"] if r["efficient"]} == set(result.efficient)
    assert found["recommended"] == result.recommended.name


def test_the_result_shows_as_one_line_and_a_table(finished):
    result, _ = finished
    assert "3 of 4 candidates measured" in repr(result) and "\n" not in repr(result)
    shown = result._repr_html_()
    assert all(name in shown for name in NAMES) and result.advice.sentence in shown


def test_a_finished_sweep_repeats_nothing(finished, book, calls):
    result, work = finished
    again = pq.sweep(SOURCE, text=book, work=work, recipes=NAMES, keep="all")
    assert not calls and again.rows() == result.rows() and again.trials == result.trials


def test_a_further_candidate_uses_the_stored_source(finished, book, calls, tmp_path):
    work = shutil.copytree(finished[1], tmp_path / "work")
    result = pq.sweep(SOURCE, text=book, work=work, recipes=["q4_0", "q5_0"], keep="all")
    assert calls == [("convert", "q5_0.gguf"), ("measure", "q5_0.gguf")]
    assert [t.status for t in result.trials] == ["measured", "measured"]


@pytest.mark.parametrize("change", ["missing", "damaged"])
def test_logits_that_are_gone_are_computed_again(finished, book, calls, tmp_path, change):
    work = shutil.copytree(finished[1], tmp_path / "work")
    for file in (work / "reference").iterdir():
        if change == "missing":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
    kl = pq.sweep(SOURCE, text=book, work=work, recipes=["q5_0"], keep="all").trials[0].kl
    expected = pq.sweep(SOURCE, text=book, work=tmp_path / "new", recipes=["q5_0"], keep="all").trials[0].kl
    assert kl == pytest.approx(expected, rel=1e-5)


def test_calibration_goes_to_the_candidates_that_use_it(book, tmp_path):
    recipes = ["w8a16", "trellis:3", "hf:hf_mxfp4", "q4_0"]
    made = outlook(SOURCE, text=book, work=tmp_path / "w", recipes=recipes, calibration=book)
    assert [c.name for c in made.requested if "calibration" in c.options] == ["trellis:3"]
    assert not any(f.refused for f in made.made)


# ---------------------------------------------------------------- changes


def test_checksums_are_not_the_source(finished, book, calls, tmp_path):
    """A file that `checksum` puts into the source does not end a sweep of it."""
    copied = shutil.copytree(SOURCE, tmp_path / "copied", copy_function=shutil.copyfile)
    pq.sweep(copied, text=book, work=tmp_path / "w", recipes=["q4_0"])
    (copied / "polyquant-checksums.json").write_text("{}")
    done = len(calls)
    pq.sweep(copied, text=book, work=tmp_path / "w", recipes=["q4_0"])
    assert len(calls) == done


def test_a_changed_text_source_or_setting_is_refused(finished, book, calls, tmp_path):
    work = shutil.copytree(finished[1], tmp_path / "work")
    other = tmp_path / "other.txt"
    other.write_text(book.read_text() + " more")
    with pytest.raises(PlanError, match=r"the text changed since this sweep began.*--restart"):
        pq.sweep(SOURCE, text=other, work=work, recipes=["q4_0"])
    copied = shutil.copytree(SOURCE, tmp_path / "copied", copy_function=shutil.copyfile)
    with pytest.raises(PlanError, match="the source changed"):
        pq.sweep(copied, text=book, work=work, recipes=["q4_0"])
    with pytest.raises(PlanError, match="--tokens changed since"):
        pq.sweep(SOURCE, text=book, work=work, recipes=["q4_0"], tokens=500)
    assert not calls
    result = pq.sweep(SOURCE, text=other, work=work, recipes=["q4_0"], restart=True)
    assert [task for task, _ in calls] == ["source", "convert", "measure"]
    assert result.trials[0].path is not None


def test_a_candidate_that_changed_before_it_was_measured_is_made_again(book, calls, tmp_path, monkeypatch):
    from polyquant.analysis.sweep import run as module

    work, inner = tmp_path / "work", module.run_child

    def stop_at_measure(task, request, **more):
        if task == "measure":
            raise KeyboardInterrupt
        return inner(task, request, **more)

    monkeypatch.setattr(module, "run_child", stop_at_measure)
    with pytest.raises(KeyboardInterrupt):
        pq.sweep(SOURCE, text=book, work=work, recipes=["q4_0"])
    monkeypatch.setattr(module, "run_child", inner)
    (work / "q4_0.gguf").unlink()
    calls.clear()
    assert pq.sweep(SOURCE, text=book, work=work, recipes=["q4_0"]).trials[0].status == "measured"
    assert [task for task, _ in calls] == ["convert", "measure"]


# ---------------------------------------------------------------- what is kept


@pytest.mark.parametrize("keep", ["efficient", "none"])
def test_kept_candidates(keep, book, calls, tmp_path):
    work = tmp_path / "work"
    recipes = ["q8_0", "q4_0", "mxfp4"]  # mxfp4 is as small as q4_0 and worse
    result = pq.sweep(SOURCE, text=book, work=work, recipes=recipes, keep=keep)
    kept = {t.name for t in result.trials if t.path is not None}
    assert kept == (set() if keep == "none" else set(result.efficient) | {result.recommended.name, result.fastest.name})
    assert {p.stem for p in work.glob("*.gguf")} == kept
    calls.clear()
    again = pq.sweep(SOURCE, text=book, work=work, recipes=recipes, keep=keep)
    assert not calls and again.rows() == result.rows()


def test_files_of_others_stay(book, calls, tmp_path):
    work = tmp_path / "work"
    pq.sweep(SOURCE, text=book, work=work, recipes=["w8a16", "q4_0"], keep="all")
    (work / "w8a16/notes.txt").write_text("mine")
    (work / "letter").write_text("mine")
    (work / "q4_0.gguf").write_bytes(b"replaced")
    notes = []

    class Seen(Watch):
        def note(self, text):
            notes.append(text)

    made = outlook(SOURCE, text=book, work=work, recipes=["w8a16", "q4_0"], keep="none")
    run(made, Seen())
    assert (work / "w8a16/notes.txt").read_text() == (work / "letter").read_text() == "mine"
    assert names(work / "w8a16") == ["notes.txt"] and (work / "q4_0.gguf").read_bytes() == b"replaced"
    assert any("q4_0.gguf" in n for n in notes) and any("notes.txt" in n for n in notes)


def test_an_existing_file_is_not_overwritten(book, calls, tmp_path):
    work = tmp_path / "work"
    pq.sweep(SOURCE, text=book, work=work, recipes=["q8_0"])
    (work / "q4_0.gguf").write_bytes(b"mine")
    trial = pq.sweep(SOURCE, text=book, work=work, recipes=["q4_0"]).trials[0]
    assert trial.status == "failed" and "is not of this sweep" in trial.reason
    assert (work / "q4_0.gguf").read_bytes() == b"mine"


def test_other_folders_are_refused(book, calls, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("mine")
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake/journal").write_text("dear diary\n")
    (tmp_path / "file").write_text("mine")
    for name, text in [
        ("full", "not of a sweep"),
        ("fake", "not of a sweep"),
        ("file", "not a folder"),
        ("no/x", "mkdir -p"),
    ]:
        with pytest.raises(PlanError, match=text):
            pq.sweep(SOURCE, text=book, work=tmp_path / name, recipes=["q4_0"])
    assert (tmp_path / "fake/journal").read_text() == "dear diary\n" and not calls


def test_two_sweeps_do_not_share_a_folder(book, calls, tmp_path):
    made = outlook(SOURCE, text=book, work=tmp_path / "work", recipes=["q4_0"])

    class Second(Watch):
        def finished(self, trial, seconds):
            with pytest.raises(PlanError, match="another sweep is using this folder"):
                run(made)

    assert run(made, Second()).trials[0].status == "measured"


# ---------------------------------------------------------------- budgets


def test_time_ends_between_candidates(book, calls, tmp_path):
    made = outlook(SOURCE, text=book, work=tmp_path / "work", recipes=["q8_0", "q4_0", "q5_0"], max_time=100)
    now = iter(range(0, 10_000, 9))  # each step reads the clock several times
    result = run(made, clock=lambda: float(next(now)))
    done = [t.status for t in result.trials]
    assert "measured" in done and "skipped" in done
    assert all("--max-time" in t.reason for t in result.trials if t.status == "skipped")
    measured = len([c for c in calls if c[0] == "measure"])
    rest = pq.sweep(SOURCE, text=book, work=tmp_path / "work", recipes=["q8_0", "q4_0", "q5_0"])
    assert [t.status for t in rest.trials] == ["measured"] * 3
    assert len([c for c in calls if c[0] == "measure"]) == 3 and measured < 3


def test_disk_that_does_not_hold_all(book, calls, tmp_path):
    sizes = {n: pq.plan(SOURCE, "gguf", recipe=n).nbytes for n in ("q8_0", "q4_0", "f16")}
    budget = sizes["q8_0"] + sizes["q4_0"] // 2 + 6_000_000  # with the journal and the logits
    made = outlook(SOURCE, text=book, work=tmp_path / "work", recipes=list(sizes), keep="all", max_disk=budget)
    peak = 0

    class Size(Watch):
        def finished(self, trial, seconds):
            nonlocal peak
            peak = max(peak, sum(f.stat().st_size for f in made.work.rglob("*") if f.is_file()))

    result = run(made, Size())
    assert peak <= budget
    assert {t.status for t in result.trials} >= {"measured"}


def test_disk_budget_skips_with_its_reason(book, calls, tmp_path):
    smallest = pq.plan(SOURCE, "gguf", recipe="q4_0").nbytes
    made = outlook(
        SOURCE, text=book, work=tmp_path / "work", recipes=["q4_0", "f16"], keep="all", max_disk=smallest + 200_000
    )
    by_name = {t.name: t for t in run(made).trials}
    assert by_name["q4_0"].status == "measured" and by_name["f16"].status == "skipped"
    assert "--max-disk" in by_name["f16"].reason


def test_budgets_that_hold_nothing_are_refused(book, calls, tmp_path):
    work = tmp_path / "work"
    with pytest.raises(PlanError, match=r"the disk budget does not hold even one candidate.*--max-disk"):
        pq.sweep(SOURCE, text=book, work=work, recipes=["q4_0", "q8_0"], max_disk="100KB")
    with pytest.raises(PlanError, match="the time budget does not hold even one candidate"):
        pq.sweep(SOURCE, text=book, work=work, recipes=["q4_0"], max_time=0.5)
    assert not work.exists() and not calls


# ---------------------------------------------------------------- refusals


def test_refusals(book, calls, tmp_path):
    def refused(kind, words, source=SOURCE, **options):
        with pytest.raises(kind, match=words):
            pq.sweep(source, **{"text": book, "work": tmp_path / "work", "recipes": ["q4_0"], **options})

    refused(UnknownNameError, "q4_n", recipes=["q4_n"])
    refused(PlanError, "no candidate is possible; i2_s: ", recipes=["i2_s"])
    refused(PlanError, "same file", recipes=["w8a16:keep=a*", "w8a16:keep=a?"])
    refused(PlanError, "unknown value of keep", keep="some")
    refused(PlanError, "not a memory size", max_disk="much")
    refused(PlanError, "--max-kl must be positive", max_kl=0.0)
    refused(UnsupportedError, "download it first", source="hf://org/name")
    refused(InputError, "no such file", calibration=tmp_path / "nothing")
    refused((InputError, OSError), "nothing", text=tmp_path / "nothing")
    assert not calls and not (tmp_path / "work").exists()


def test_a_text_that_is_too_short_ends_the_sweep(calls, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("one two")
    with pytest.raises(PlanError, match=r"the source was not measured: .*too short"):
        pq.sweep(SOURCE, text=short, work=tmp_path / "work", recipes=["q4_0"])


# ---------------------------------------------------------------- advice


def test_the_choice_follows_the_limits(finished):
    trials = finished[0].trials
    q8, q4, trellis, _ = trials
    everything = choose(trials, Limits(max_kl=1e9))
    assert everything.smallest is min(trials[:3], key=lambda t: t.nbytes)
    strict = choose(trials, Limits(max_kl=q8.kl * 1.01))
    assert strict.smallest is strict.fastest is q8 and "q8_0 is the only candidate" in strict.sentence
    none = choose(trials, Limits(max_kl=q8.kl / 2))
    assert none.smallest is none.fastest is None
    assert "excluded 3 by divergence; closest to the source is q8_0" in none.sentence
    assert choose(trials, Limits(max_kl=1e9, max_size=q8.nbytes - 1)).smallest in (q4, trellis)
    fast = choose(trials, Limits(max_kl=1e9, min_speed=1e9))
    assert fast.smallest is None and "3 by speed" in fast.sentence
    assert choose([], Limits()).sentence == "no candidate was measured"


def test_efficient_candidates_are_not_beaten(finished):
    trials = finished[0].trials
    named = efficient(trials)
    for t in trials[:3]:
        better = [o for o in trials[:3] if o.nbytes <= t.nbytes and o.kl <= t.kl and o is not t]
        assert (t.name in named) == (not better)


def test_the_report_contains_the_figures(finished, tmp_path):
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed")
    result, _ = finished
    page = tmp_path / "report.html"
    assert result.write_report(page) == page.stat().st_size
    text = page.read_text()
    for trial in result.trials[:3]:
        for figure in (trial.kl, trial.perplexity.value, trial.speed.decode, trial.speed.memory, trial.nbytes):
            assert f'data-value="{figure}"' in text
    assert result.advice.sentence in text and "needs ternary weights" in text and "tokens per second" in text
    with pytest.raises(PlanError, match="target exists"):
        result.write_report(page)


def test_the_report_has_figures_and_rows(finished):
    result, _ = finished
    side = result.report()
    rows = {row["model"]: row for row in side.rows()}
    for trial in result.trials[:3]:
        assert rows[trial.name]["kl"] == trial.kl
        assert rows[trial.name]["efficient"] == (trial.name in result.efficient)
    points = side.figure("size_against_error").spec["data"]["values"]
    assert sorted(point["y"] for point in points) == sorted(t.kl for t in result.trials[:3])


def test_forecasts_are_close(finished, book, tmp_path):
    made = outlook(SOURCE, text=book, work=tmp_path / "work", recipes=[*NAMES, "trellis:3.5"])
    by_name = {t.name: t for t in finished[0].trials}
    for forecast in made.made:
        trial = by_name.get(forecast.candidate.name)
        if trial is not None and trial.status == "measured":
            assert forecast.nbytes == trial.nbytes and forecast.seconds > 0
    allocated = next(f for f in made.made if f.candidate.name == "trellis:3.5")
    real = pq.plan(SOURCE, "trellis-v3", target_bpw=3.5)
    assert allocated.nbytes == pytest.approx(sum(s.nbytes for s in real.steps), rel=0.03)
    assert made.made[-1].refused and math.isfinite(made.seconds) and made.disk > 0
    assert [c["candidate"] for c in json.loads(json.dumps(made.to_json()))["candidates"]][-1] == "i2_s"


def test_target_sizes_measure_the_model_once(book, calls, tmp_path, monkeypatch):
    from polyquant.formats.trellis import allocation

    inner, measured = allocation._damage, []
    monkeypatch.setattr(allocation, "_damage", lambda *a: measured.append(1) or inner(*a))
    result = pq.sweep(
        SOURCE, text=book, work=tmp_path / "work", recipes=["trellis:2.5:effort=fast", "trellis:3.5:effort=fast"]
    )
    assert [t.status for t in result.trials] == ["measured", "measured"] and len(measured) == 1
    assert result.trials[0].nbytes < result.trials[1].nbytes and result.trials[0].kl > result.trials[1].kl


def test_the_page_of_many_candidates_is_small(finished):
    """As large as for a model of 32 layers."""
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed")
    from polyquant.analysis.report.page import page
    from polyquant.analysis.sweep.overview import overview

    result, _ = finished
    q4 = result.trials[1]
    layer = [s for s in q4.steps if s.tensor.startswith("blk.0.")]
    steps = tuple(replace(s, tensor=s.tensor.replace("blk.0.", f"blk.{i}.")) for i in range(32) for s in layer)
    many = [replace(q4, name=f"q4_{i}", nbytes=q4.nbytes + i, steps=steps) for i in range(16)]
    found = overview(result.reference, many, frozenset({"q4_0"}), text="text", machine="machine", advice="q4_0")
    text = page(found)
    assert len(text) < 2_000_000 and text.count("Codecs by layer") == 1
    assert "better ones are not listed" in text
