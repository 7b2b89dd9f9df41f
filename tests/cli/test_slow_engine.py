"""Without native kernels, commands that compute much print one note; other commands and POLYQUANT_NATIVE=0 do not."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest

from golden import VECTORS
from polyquant.cli import cli
from polyquant.errors import PolyquantError
from polyquant.ops import native

LLAMA = VECTORS / "models/tiny-llama-untied/hf"
NOTE = "no native kernels"


@pytest.fixture
def without_kernels(monkeypatch):
    monkeypatch.setattr(native, "_native", None)
    monkeypatch.setattr(native, "_enabled", True)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the king said unto the man " * 60)
    return path


COMPUTING = (
    ("run", LLAMA, "-p", "a", "-n", 1),
    ("run", LLAMA, "-p", "a", "-n", 1, "--format", "json"),
    ("eval", LLAMA, "--text", "TEXT", "--context", 16, "--tokens", 16),
    ("importance", LLAMA, "OUT.gguf", "--calibration", "TEXT", "--windows", 1),
    ("quantize", LLAMA, "OUT.gguf", "--recipe", "q8_0", "--format", "json"),
)
FAILING = (
    ("report", LLAMA, LLAMA.parent / "tiny-llama-untied-Q4_0.gguf", "--text", LLAMA / "config.json", "-o", "OUT.html"),
    ("embed", LLAMA, "a"),
    ("serve", LLAMA / "config.json", "--port", 0),
)
"""Input that cannot be used, which is noticed after the note: these commands would take seconds, or not end."""
READING = (
    ("inspect", LLAMA),
    ("validate", LLAMA, "--headers"),
    ("convert", LLAMA, "OUT", "--to", "hf"),
    ("quantize", LLAMA, "OUT.gguf", "--recipe", "q8_0", "--dry-run"),
)


def filled(args, text, folder):
    return [text if a == "TEXT" else folder / a if str(a).startswith("OUT") else a for a in args]


@pytest.fixture
def run(text, tmp_path):
    """Run a command in this process, where the kernels are hidden."""

    def run(*args):
        words = [text if a == "TEXT" else tmp_path / a if str(a).startswith("OUT") else a for a in args]
        cli.main([*map(str, words)], standalone_mode=False)

    return run


@pytest.mark.parametrize("args", COMPUTING, ids=lambda args: args[0])
def test_commands_that_compute(without_kernels, run, capsys, args):
    run(*args)
    out, err = capsys.readouterr()
    assert err.count(NOTE) == 1 and NOTE not in out
    if "json" in args:
        json.loads(out)


@pytest.mark.parametrize("args", FAILING, ids=lambda args: args[0])
def test_commands_with_unusable_input(without_kernels, run, capsys, args):
    if args[0] == "serve":
        pytest.importorskip("uvicorn", reason="the server needs it")
    with suppress(PolyquantError):
        run(*args)
    assert capsys.readouterr().err.count(NOTE) == 1


@pytest.mark.parametrize("args", READING, ids=lambda args: args[0])
def test_commands_that_read_or_copy(without_kernels, run, capsys, args):
    run(*args)
    assert NOTE not in "".join(capsys.readouterr())


def test_numpy_by_request(without_kernels, run, capsys, monkeypatch):
    monkeypatch.setattr(native, "_enabled", False)
    run("run", LLAMA, "-p", "a", "-n", 1)
    assert capsys.readouterr().err == ""
