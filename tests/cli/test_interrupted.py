"""Full disks, signals, concurrent runs, protected targets: no partial output, and the same command resumes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from cli.bad_inputs import GGUF, SOUND
from golden import VECTORS

SOURCE = VECTORS / "models/tiny-llama-untied/hf"
PATCHED = """
import os, signal, sys, time
from polyquant.cli import main
from polyquant.storage.staging import Staging
finished, count = Staging.finish, 0
def finish(self, tensor, report, **more):
    global count
    finished(self, tensor, report, **more)
    count += 1
    if count == 6:
        {action}
Staging.finish = finish
main(sys.argv[1:])
"""


def start(action, *args):
    """Run the command in a separate process that does `action` after six tensors."""
    script = PATCHED.format(action=action)
    words = [sys.executable, "-c", script, *map(str, args)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def whole(polyquant, tmp_path_factory):
    """Return the output of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    assert polyquant("convert", SOURCE, folder / "m.gguf", "--codec", "q8_0").code == 0
    assert polyquant("convert", SOURCE, folder / "hf", "--codec", "f16").code == 0
    assert polyquant("convert", SOURCE, folder / "v3", "--codec", "trellis.3.mul1.12").code == 0
    return folder


@pytest.mark.parametrize("target, codec", [("m.gguf", "q8_0"), ("hf", "f16"), ("v3", "trellis.3.mul1.12")])
@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", 130), ("SIGKILL", -9)])
def test_the_same_command_resumes_after_a_signal(name, code, target, codec, whole, polyquant, tmp_path):
    command = ("convert", SOURCE, tmp_path / target, "--codec", codec)
    child = start(f"os.kill(os.getpid(), signal.{name}); time.sleep(0.2)", *command)
    _, err = child.communicate(timeout=60)
    assert child.returncode == code
    assert code < 0 or (err.strip().startswith("polyquant: interrupted") and err.strip().count("\n") == 0)
    work = unfinished(tmp_path)
    assert code < 0 or f"rm -r '{work}'" in err
    again = polyquant(*command, "--resume", "required")
    assert again.code == 0, again
    assert [p.name for p in tmp_path.iterdir()] == [target]
    same(tmp_path / target, whole / target)


def unfinished(folder):
    """The only work folder in a folder."""
    (found,) = folder.iterdir()
    assert ".polyquant-" in found.name
    return found


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def same(a, b):
    if a.is_dir():
        assert names(a) == names(b)
        for name in names(a):
            same(a / name, b / name)
    else:
        assert a.read_bytes() == b.read_bytes(), a


def test_a_changed_job_does_not_resume_another(whole, polyquant, tmp_path):
    child = start("os.kill(os.getpid(), signal.SIGKILL)", "convert", SOURCE, tmp_path / "m.gguf", "--codec", "q4_0")
    child.communicate(timeout=60)
    assert polyquant("convert", SOURCE, tmp_path / "m.gguf", "--codec", "q8_0", "--resume", "required").code == 2
    assert polyquant("convert", SOURCE, tmp_path / "m.gguf", "--codec", "q8_0").code == 0
    same(tmp_path / "m.gguf", whole / "m.gguf")


def test_a_torn_journal_is_not_trusted(whole, polyquant, tmp_path):
    command = ("convert", SOURCE, tmp_path / "m.gguf", "--codec", "q8_0")
    start("os.kill(os.getpid(), signal.SIGKILL)", *command).communicate(timeout=60)
    for damage in (
        lambda raw: raw[:-7],
        lambda raw: raw + b"\0" * 4096,
        lambda raw: raw + b'{"tensor": 1}\n',
        lambda raw: b"\xff\n",
    ):
        work = unfinished(tmp_path)
        journal = work / "journal"
        saved = journal.read_bytes()
        shutil.copytree(work, tmp_path / "copy")
        journal.write_bytes(damage(saved))
        again = polyquant(*command)
        assert again.code == 0, again
        same(tmp_path / "m.gguf", whole / "m.gguf")
        (tmp_path / "m.gguf").unlink()
        shutil.rmtree(work, ignore_errors=True)
        (tmp_path / "copy").rename(work)


def test_repeated_kills_with_torn_lines(whole, polyquant, tmp_path):
    command = ("convert", SOURCE, tmp_path / "m.gguf", "--codec", "q8_0", "--threads", 1)
    for _ in range(2):
        start("os.kill(os.getpid(), signal.SIGKILL)", *command).communicate(timeout=60)
        journal = unfinished(tmp_path) / "journal"
        journal.write_bytes(journal.read_bytes()[:-7])
    assert journal.read_bytes().count(b"\n") == 11  # the job and ten whole lines of two times six
    assert polyquant(*command, "--resume", "required").code == 0
    same(tmp_path / "m.gguf", whole / "m.gguf")


def test_one_of_two_concurrent_runs_wins(whole, polyquant, tmp_path):
    command = ("convert", SOURCE, tmp_path / "m.gguf", "--codec", "q8_0")
    first = start("sys.stderr.write('half\\n'); sys.stderr.flush(); sys.stdin.readline()", *command)
    assert first.stderr.readline() == "half\n"
    second = polyquant(*command)
    assert second.code == 2 and "another run" in second.line
    first.communicate("\n", timeout=60)
    assert first.returncode == 0
    same(tmp_path / "m.gguf", whole / "m.gguf")


def test_a_disk_that_is_full_from_the_start(polyquant, tmp_path):
    outcome = polyquant("convert", SOURCE, tmp_path / "m.gguf", "--codec", "q8_0", file_limit=100_000)
    assert outcome.code == 1 and "m.gguf" in outcome.line and "large" in outcome.line
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_during_the_run(whole, polyquant, tmp_path):
    command = ("convert", SOURCE, tmp_path / "m.gguf", "--codec", "q8_0")
    full = "def no_room(*_): raise OSError(28, os.strerror(28))\n        os.pwrite = no_room"
    child = start(full, *command)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert err.count("\n") == 1 and "m.gguf" in err and "No space left" in err
    assert not (tmp_path / "m.gguf").exists()
    assert polyquant(*command).code == 0
    same(tmp_path / "m.gguf", whole / "m.gguf")


def test_a_source_that_shrinks_during_the_run(polyquant, tmp_path):
    shutil.copytree(SOURCE, tmp_path / "in")
    child = start(
        "os.truncate(sys.argv[2] + '/model.safetensors', 5000)",
        "convert",
        tmp_path / "in",
        tmp_path / "m.gguf",
        "--threads",
        1,
    )
    _, err = child.communicate(timeout=60)
    assert child.returncode == 2 and err.count("\n") == 1 and "truncated" in err
    assert not (tmp_path / "m.gguf").exists()


def test_targets_that_are_refused(polyquant, tmp_path):
    (tmp_path / "in").mkdir()
    source = shutil.copytree(SOUND, tmp_path / "in/hf")
    (tmp_path / "old.gguf").write_text("precious")
    (tmp_path / "old").mkdir()
    (tmp_path / "old/file").write_text("precious")
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "dangling").symlink_to("nowhere")
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    for target in (
        "old.gguf",
        "old",
        "in/hf",
        "in/hf/x.gguf",
        "in",
        "link",
        "link/x.gguf",
        "dangling",
        "no/such/x.gguf",
        "",
    ):
        outcome = polyquant("convert", source, tmp_path / target, "--to", "gguf")
        assert outcome.code == 2 and outcome.line, (target, outcome)
    for target in ("in/hf", "in", "link", "in/hf/x.gguf"):
        outcome = polyquant("convert", source, tmp_path / target, "--to", "gguf", "--overwrite")
        assert outcome.code == 2 and outcome.line, (target, outcome)
    assert polyquant("convert", source, tmp_path / "old", "--to", "gguf", "--overwrite").code == 2
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before
    assert (tmp_path / "old.gguf").read_text() == "precious"


def test_overwriting_replaces_the_whole_target(polyquant, tmp_path):
    shutil.copy(GGUF, tmp_path / "old.gguf")
    shutil.copytree(SOUND, tmp_path / "old")
    (tmp_path / "old/vocab.json").write_text("{}")
    assert polyquant("convert", SOUND, tmp_path / "old.gguf", "--overwrite").code == 0
    assert polyquant("convert", SOUND, tmp_path / "old", "--overwrite").code == 0
    assert polyquant("validate", tmp_path / "old.gguf").code == 0
    assert not (tmp_path / "old/vocab.json").exists() and names(tmp_path) == ["old", "old.gguf"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(polyquant, tmp_path):
    tmp_path.chmod(0o500)
    try:
        outcome = polyquant("convert", SOUND, tmp_path / "m.gguf")
    finally:
        tmp_path.chmod(0o700)
    assert outcome.code == 1 and "Permission denied" in outcome.line


def test_a_target_where_nothing_can_be_written(polyquant):
    outcome = polyquant("convert", SOUND, "/proc/m.gguf")
    assert outcome.code in (1, 2) and outcome.line
    outcome = polyquant("edit", GGUF, "--set", "general.name=x", "--output", "/proc/m.gguf")
    assert outcome.code in (1, 2) and outcome.line
