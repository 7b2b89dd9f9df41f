"""Versions, platforms and paths in the packaging files agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import polyquant

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WHEELS = PROJECT["tool"]["cibuildwheel"]


def test_wheels_are_built_for_supported_versions_of_python():
    oldest = re.fullmatch(r">=3\.(\d+)", PROJECT["project"]["requires-python"])[1]
    built = sorted(int(re.fullmatch(r"cp3(\d+)-\*", b)[1]) for b in WHEELS["build"])
    assert built == list(range(int(oldest), max(built) + 1))


def test_the_check_of_wheels_exists():
    (path,) = re.findall(r"\{project\}/(\S+)", WHEELS["test-command"])
    assert (ROOT / path).is_file() and path in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_container_has_a_supported_python():
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    (version,) = set(re.findall(r"python:3\.(\d+)-slim", text))
    assert f"cp3{version}-*" in WHEELS["build"] and f"-cp3{version}-" in text


def test_the_kernels_are_compiled_for_every_processor():
    options = re.sub("#.*", "", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8"))
    assert "-mtune" not in options and "-mavx" in options
    # For one set of kernels each.
    assert set(re.findall(r"-march=\S+", options)) == {"-march=armv8.2-a+dotprod)", "-march=armv8.2-a+dotprod+i8mm)"}


def test_the_version_is_that_of_the_package():
    text = (ROOT / "src/polyquant/__init__.py").read_text(encoding="utf-8")
    assert f'__version__ = "{polyquant.__version__}"' in text and PROJECT["project"]["dynamic"] == ["version"]
