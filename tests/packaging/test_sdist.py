"""The sdist has what a build needs, and stays small."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = (
    "tests/",
    "bench/",
    "scripts/",
    "docs/images/",
    "examples/notebooks/",
    "Makefile",
    ".git",
    ".ci/",
    "build/",
    "dist/",
    "shared/",
)
MOST_BYTES = 9_000_000
"""7.8 MB of them are the models of `polyquant demo`."""


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    pytest.importorskip("scikit_build_core", reason="builds the sdist")
    folder = tmp_path_factory.mktemp("sdist")
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, folder], cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.tar.gz"))


def files(folder: Path, *suffixes: str) -> set[str]:
    return {str(p.relative_to(ROOT)) for p in folder.rglob("*") if p.suffix in suffixes}


def test_files(sdist):
    with tarfile.open(sdist) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    needed = files(ROOT / "src", ".py", ".pyi", ".typed", ".bin", ".html", ".css", ".js", ".toml", ".safetensors")
    needed |= files(ROOT / "native", ".cpp", ".hpp") | files(ROOT / "docs", ".md")
    needed |= {"pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md", "CHANGELOG.md", "man/polyquant.1"}
    assert needed <= names
    assert not [name for name in names if name.startswith(OUTSIDE) or name.endswith((".so", ".pyc"))]


def test_size(sdist):
    assert sdist.stat().st_size < MOST_BYTES


def installed(sdist: Path, folder: Path, **environment: str) -> Path:
    """The Python of an empty environment in which the sdist is installed."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "POLYQUANT"))} | environment
    command = [python, "-m", "pip", "install", "--quiet", f"polyquant[run] @ {sdist.as_uri()}"]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return python


def check(python: Path, *options: str) -> None:
    command = [python, "-I", ROOT / "scripts" / "check_wheel.py", *options]
    done = subprocess.run(command, cwd=python.parent, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "the installed wheel works\n"), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("without", [{"POLYQUANT_PURE": "true"}, {"CXX": "/nonexistent/c++"}], ids=["asked", "broken"])
def test_it_builds_without_a_compiler(sdist, tmp_path, without):
    check(installed(sdist, tmp_path, **without), "--pure")


@pytest.mark.slow
def test_it_builds_with_a_compiler(sdist, tmp_path):
    check(installed(sdist, tmp_path))
