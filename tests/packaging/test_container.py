"""The Containerfile copies files that exist, and calls the program as it is."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path

import click
import pytest

from polyquant.cli import cli

ROOT = Path(__file__).resolve().parents[2]
LINES = re.sub(r"\\\n\s*", "", (ROOT / "Containerfile").read_text(encoding="utf-8")).splitlines()
INSTRUCTIONS = [line.split(maxsplit=1) for line in LINES if line and not line.startswith("#")]
IGNORED = [
    line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if not line.startswith("#")
]


def arguments(instruction: str) -> list[str]:
    return [rest for name, rest in INSTRUCTIONS if name == instruction]


def sent(path: Path) -> bool:
    """True if .dockerignore lets a file into the build: the last matching line decides."""
    name, out = str(path.relative_to(ROOT)), True
    for line in IGNORED:
        pattern = line.removeprefix("!").removeprefix("**/")
        if fnmatch(name, pattern) or fnmatch(name, f"{pattern}/*") or fnmatch(path.name, pattern):
            out = line.startswith("!")
    return out


def copied() -> list[Path]:
    return [ROOT / name for line in arguments("COPY") for name in line.split()[:-1]]


def test_it_copies_what_the_build_needs():
    assert {"pyproject.toml", "CMakeLists.txt", "README.md", "native", "src"} <= {p.name for p in copied()}
    for path in copied():
        assert path.exists() and sent(path)


def test_it_copies_the_folders_that_cmake_reads():
    text = re.sub("#.*", "", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8"))
    folders = {name for name in re.findall(r"(\w+)/[\w*]", text) if (ROOT / name).is_dir()}
    assert {"native", "src"} <= folders <= {p.name for p in copied()}


@pytest.mark.parametrize("name", [".git/config", "tests/conftest.py", "src/polyquant/_native.so", "model.gguf"])
def test_other_files_stay_outside(name):
    assert not sent(ROOT / name)


def test_it_runs_as_an_unprivileged_user():
    after = INSTRUCTIONS[[name for name, _ in INSTRUCTIONS].index("USER") :]
    assert arguments("USER") == ["1000"] and not [name for name, _ in after if name in ("RUN", "COPY")]
    assert "--uid 1000" in " ".join(arguments("RUN"))


def test_the_port_and_the_health_check_are_those_of_the_server():
    serve = cli.get_command(click.Context(cli), "serve")
    port = next(p for p in serve.params if p.name == "port").default
    (check,) = arguments("HEALTHCHECK")
    assert arguments("EXPOSE") == [str(port)] and f"http://127.0.0.1:{port}/health" in check
    command = json.loads(check[check.index("[") :])
    compile(command[2], "HEALTHCHECK", "exec")
    assert command[:2] == ["python", "-c"]


def test_it_starts_the_program():
    assert json.loads(arguments("ENTRYPOINT")[0]) == ["polyquant"] and json.loads(arguments("CMD")[0]) == ["--help"]
