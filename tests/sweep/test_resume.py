"""A sweep that ends at any point continues with the same call, and repeats no finished step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import polyquant as pq
from polyquant.analysis.sweep import folder
from polyquant.analysis.sweep.process import run_child
from polyquant.errors import PlanError
from polyquant.storage import journal
from sweep.conftest import SOURCE, quick

STEPS = ["sweep", "source", "started", "converted", "measured"]


class Killed(BaseException):
    pass


def figures(result):
    """The figures that are the same in every run."""
    steady = ("candidate", "status", "bytes", "bpw", "perplexity", "kl", "kl_99", "top_1", "efficient")
    return [{k: row[k] for k in steady} for row in result.rows()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, book):
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        return figures(pq.sweep(SOURCE, text=book, work=tmp_path_factory.mktemp("whole") / "w", recipes=["q4_0"]))


@pytest.mark.parametrize("when", ["before", "torn", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_an_end_at_each_step(step, when, undisturbed, book, calls, tmp_path, monkeypatch):
    inner = folder.WorkPlace.record

    def record(self, kind, **values):
        if kind == step and when == "torn":
            os.write(self._journal, b"0123abcd " + json.dumps({"kind": kind, **values}).encode()[:40])
        if kind == step and when != "after":
            raise Killed
        inner(self, kind, **values)
        if kind == step:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(folder.WorkPlace, "record", record)
        with pytest.raises(Killed):
            pq.sweep(SOURCE, text=book, work=tmp_path / "work", recipes=["q4_0"])
    recorded = STEPS[: STEPS.index(step) + (when == "after")]
    calls.clear()
    result = pq.sweep(SOURCE, text=book, work=tmp_path / "work", recipes=["q4_0"])
    assert figures(result) == undisturbed
    left = [
        task
        for task, of in {"source": "source", "convert": "converted", "measure": "measured"}.items()
        if of not in recorded
    ]
    assert [task for task, _ in calls] == left
    assert sorted(p.name for p in (tmp_path / "work").iterdir()) == ["journal", "q4_0.gguf", "reference"]


def test_a_torn_first_line_is_an_empty_journal(book, calls, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "journal").write_bytes(b'1234abcd {"kind": "swe')
    assert pq.sweep(SOURCE, text=book, work=work, recipes=["q4_0"]).trials[0].status == "measured"


def test_a_damaged_line_ends_the_journal(book, calls, tmp_path):
    work = tmp_path / "work"
    pq.sweep(SOURCE, text=book, work=work, recipes=["q4_0"])
    lines = (work / "journal").read_bytes().splitlines(keepends=True)
    assert [journal.parsed(line)["kind"] for line in lines] == STEPS
    lines[4] = lines[4].replace(b'"kl_99": ', b'"kl_99": 9', 1)
    (work / "journal").write_bytes(b"".join(lines))
    calls.clear()
    pq.sweep(SOURCE, text=book, work=work, recipes=["q4_0"])
    assert [task for task, _ in calls] == ["measure"]


NAME = "trellis-8-effort=fast"
SWEEP = """
import sys
import polyquant as pq
from polyquant.analysis.sweep.run import Watch

class Screen(Watch):
    def progress(self, name, what, done, total):
        print(name, what, flush=True)

pq.sweep(sys.argv[1], text=sys.argv[2], work=sys.argv[3], recipes=["trellis:8:effort=fast"], watch=Screen())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_signal_during_a_conversion(end, book, tmp_path):
    """The process of the step ends too, and the conversion resumes where it was."""
    work = tmp_path / "work"
    command = [sys.executable, "-c", SWEEP, str(SOURCE), str(book), str(work)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for line in child.stdout:
            if line == "trellis:8:effort=fast converting\n":
                break
        steps = [int(p) for p in _children(child.pid)]
        child.send_signal(end)
        child.wait(30)
        until = time.monotonic() + 20
        while any(_status(p) != "Z" for p in steps):
            assert time.monotonic() < until
            time.sleep(0.05)
        assert steps and child.returncode != 0
    finally:
        child.kill()
        child.communicate()
    assert not (work / NAME).exists() and list(work.glob(f".{NAME}.polyquant-*"))
    result = pq.sweep(SOURCE, text=book, work=work, recipes=["trellis:8:effort=fast"])
    assert result.trials[0].status == "measured"
    assert sorted(p.name for p in work.iterdir()) == ["journal", "reference", NAME]


def _children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _status(pid):
    """The state of a process; Z if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


# ---------------------------------------------------------------- the process of a step


def test_a_step_that_is_late_is_interrupted(book, tmp_path):
    request = {"source": str(SOURCE), "path": str(tmp_path / "t"), "options": {"bits": 8, "to": "trellis-v3"}}
    start = time.monotonic()
    answer = run_child("convert", {**request, "overwrite": False, "damage": None, "threads": 1}, seconds=1.5)
    assert answer.late and answer.result is None and time.monotonic() - start < 15
    assert not (tmp_path / "t").exists()


def test_errors_of_a_step():
    request = {"source": "no/such", "path": "x", "options": {"to": "gguf"}, "overwrite": False, "damage": None}
    answer = run_child("convert", {**request, "threads": None})
    assert answer.final and "no/such" in answer.error
    broken = run_child("nothing", {})
    assert broken.result is None and not broken.final and "KeyError" in broken.error


def test_a_killed_step_is_reported(book, calls, tmp_path, monkeypatch):
    from polyquant.analysis.sweep import process, run

    assert "lack of memory" in process._ended(-signal.SIGKILL, "")
    assert "signal 11" in process._ended(-signal.SIGSEGV, "")
    inner = run.run_child

    def killed(task, request, **more):
        return process.Answer(error="killed") if task == "measure" else inner(task, request, **more)

    with monkeypatch.context() as patch:
        patch.setattr(run, "run_child", killed)
        trial = pq.sweep(SOURCE, text=book, work=tmp_path / "work", recipes=["q4_0"]).trials[0]
        assert (trial.status, trial.reason) == ("failed", "killed")
        with pytest.raises(PlanError, match="source was not measured: killed"):
            patch.setattr(run, "run_child", lambda task, request, **more: process.Answer(error="killed"))
            pq.sweep(SOURCE, text=book, work=tmp_path / "other", recipes=["q4_0"])
    assert pq.sweep(SOURCE, text=book, work=tmp_path / "work", recipes=["q4_0"]).trials[0].status == "measured"


# ---------------------------------------------------------------- journals of others


def rewritten(work, change):
    """Change the entries of a journal, with valid checksums."""
    lines = (work / "journal").read_bytes().splitlines(keepends=True)
    entries = [journal.parsed(line) for line in lines]
    change({entry["kind"]: entry for entry in entries})
    (work / "journal").unlink()
    fd = os.open(work / "journal", os.O_WRONLY | os.O_CREAT)
    for entry in entries:
        journal.append(fd, **entry)
    os.close(fd)


FORGED = {
    "a file outside": lambda e: e["converted"].update(path="../precious", files={"": e["precious"]}),
    "a file above": lambda e: e["converted"].update(path=".", files={"../precious": e["precious"]}),
    "an absolute file": lambda e: e["converted"].update(files={"/precious": [1, 2]}),
    "logits outside": lambda e: e["source"]["stored"].update(files=[["../../precious", 1, 2]]),
    "no name": lambda e: e["started"].pop("name"),
    "another kind": lambda e: e["started"].update(kind="finished"),
    "no figures": lambda e: e["measured"].update(measurement={}),
    "no speed": lambda e: e["measured"]["measurement"]["speed"].pop("decode"),
    "no steps": lambda e: e["converted"].update(steps=[{}]),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_journal_is_refused(name, book, calls, tmp_path):
    work = tmp_path / "work"
    pq.sweep(SOURCE, text=book, work=work, recipes=["q4_0"])
    (tmp_path / "precious").write_text("mine")
    state = folder.file_states(tmp_path / "precious")[""]
    rewritten(work, lambda entries: FORGED[name]({**entries, "precious": state}))
    for options in ({"keep": "none"}, {"restart": True}):
        with pytest.raises(PlanError, match="the journal is not that of a sweep"):
            pq.sweep(SOURCE, text=book, work=work, recipes=["q4_0"], **options)
    assert (tmp_path / "precious").read_text() == "mine"
