"""Every command of the documentation runs, and prints what the page has. The rules are in console.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.console import blocks, differs, run_page

ROOT = Path(__file__).resolve().parents[2]
PAGES = (p for p in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if "generated" not in p.parts)
SHELL = [p for p in PAGES if any(blocks(p.read_text("utf-8")))]
NOT_RUN = {
    "README.md": 1,  # make
    "docs/browse.md": 1,  # needs a terminal
    "docs/cli.md": 3,  # a model of 70,000 tensors, a conversation, a terminal
    "docs/evaluate.md": 2,  # lm-eval downloads its tasks
    "docs/install.md": 1,  # needs a container engine
    "docs/llm.md": 2,  # installs packages, a model
    "docs/plugins.md": 1,  # installs a package
    "docs/quickstart.md": 2,  # installs the package, downloads a model
    "docs/remote.md": 3,  # servers
    "docs/scale.md": 3,  # a model of 70,000 tensors, several machines, clusters
    "docs/sweep.md": 1,  # takes a minute
    "docs/transformers.md": 1,  # installs torch
    "docs/vllm.md": 1,  # installs vLLM
}
"""Blocks that are not run, for a reason that is given before each."""
SLOW = {
    "docs/calibration.md",
    "docs/evaluate.md",
    "docs/hub.md",
    "docs/tutorials/deploy.md",
    "docs/tutorials/llama-cpp.md",
    "docs/tutorials/research.md",
}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="session")
def listening(command_server, tmp_path_factory):
    path = tmp_path_factory.mktemp("server") / "socket"
    command_server.listen(path)
    return str(path)


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, id=name_of(p), marks=[pytest.mark.slow] if name_of(p) in SLOW else []) for p in SHELL],
)
def test_commands_print_what_the_page_has(page: Path, listening, tmp_path):
    wrong = run_page(page, tmp_path, listening)
    assert not wrong, "\n".join(f"{page.name}:{c.line}: $ {c.text}\n{found}" for c, found in wrong)


def test_blocks_that_are_not_run_are_few():
    reasons = {name_of(p): [b.reason for b in blocks(p.read_text("utf-8")) if b.reason] for p in SHELL}
    assert {page: len(found) for page, found in reasons.items() if found} == NOT_RUN


def test_every_block_with_commands_is_marked_as_such():
    """A block without a language, or with another, would not be run."""
    unmarked = []
    for page in SHELL:
        language = None
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
            if line.lstrip().startswith("```"):
                language = line.strip().removeprefix("```") if language is None else None
            elif line.startswith(("$ ", "polyquant ")) and language not in (None, "sh", "console", "bash"):
                unmarked.append(f"{name_of(page)}:{number}")
    assert not unmarked


@pytest.mark.parametrize(
    ("page", "found", "different"),
    [
        ("a\nb", "a\nb\n", False),
        ("a\nb", "a\nc", True),
        ("a ... c", "a b\nb c", False),
        ("SNR 23.1 dB", "SNR 23.2 dB", False),
        ("SNR 23.1 dB", "SNR 24.1 dB", True),
        ("perplexity 31.8546", "perplexity 31.8540", False),
        ("wrote x in 0.1 s (10.7 MiB/s)", "wrote x in 12.5 s (3 KiB/s)", False),
        ("wrote 1,000 bytes", "wrote 1,001 bytes", True),
        ("Python 3.11.7, x86_64", "Python 3.13.12, x86_64", False),
        ("Python 3.11.7, x86_64", "Python 3.11, x86_64", True),
        ("1.5 and 1.5", "1.5 and 2.5", True),
        ("a (b)", "a (b", True),
    ],
)
def test_what_counts_as_equal(page, found, different):
    assert differs(page, found) is different
