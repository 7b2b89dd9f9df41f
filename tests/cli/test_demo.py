"""The commands that `polyquant demo` prints can be pasted into a shell."""

from __future__ import annotations

import sys

import pytest

from polyquant.cli.demo_command import _program


@pytest.mark.parametrize(
    ("argv", "found", "shown"),
    [
        (".venv/bin/polyquant", None, ".venv/bin/polyquant"),
        (".venv/bin/polyquant", "/usr/bin/polyquant", "polyquant"),
        ("src/polyquant/__main__.py", None, "polyquant"),
    ],
)
def test_printed_commands_work_in_the_shell(argv, found, shown, monkeypatch):
    monkeypatch.setattr(sys, "argv", [argv])
    monkeypatch.setattr("polyquant.cli.demo_command.which", lambda name: found)
    assert _program() == shown
