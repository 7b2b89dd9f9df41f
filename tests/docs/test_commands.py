"""Every `polyquant ...` in the documentation is a command with options that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from polyquant.cli import COMMANDS, cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAGES = [page for page in PAGES if "generated" not in page.parts]
WORD = r"""(?:'[^']*'|"[^"]*"|[^\s`|&;#])+"""
OF_THE_EXAMPLE_PLUGIN = ("--alignment",)


def invocations(page: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, words) of every call of the command in code: a line of a fenced block, or a span in backticks."""
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
            continue
        spans = [line] if fenced else re.findall(r"`([^`]+)`", line)
        for span in spans:
            if match := re.match(rf"(?:\$ |[A-Z_]+=\S+ )?polyquant +((?:{WORD} *)+)", span.strip()):
                yield number, re.findall(WORD, match[1])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_and_options_exist(page: Path):
    wrong = []
    for number, words in invocations(page):
        if not words or words[0].startswith("-") or not re.fullmatch("[a-z]+", words[0]):
            continue
        if words[0] not in COMMANDS:
            wrong.append(f"{number}: no command {words[0]}")
            continue
        command = cli.get_command(click.Context(cli), words[0])
        assert command is not None
        known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {
            "-h",
            "--help",
            *OF_THE_EXAMPLE_PLUGIN,
        }
        used = [w.split("=")[0] for w in words[1:] if re.match("--?[a-z]", w)]
        wrong += [f"{number}: {words[0]} has no option {w}" for w in used if w not in known]
    assert not wrong


def test_the_pages_have_commands():
    assert sum(1 for page in PAGES for _ in invocations(page)) > 100
