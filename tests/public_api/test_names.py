"""The names that `polyquant` exports: each resolves, is documented, and is used by the typed example, which runs."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

import polyquant as pq
from polyquant.analysis.demo import demo_model

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "public_api.py"


@pytest.mark.parametrize("name", pq.__all__)
def test_every_name_resolves_and_is_documented(name):
    assert getattr(pq, name).__doc__
    assert f"`{name}`" in PAGE[PAGE.index("## Names") :]
    assert re.search(rf"\bpq\.{name}\b", EXAMPLE.read_text(encoding="utf-8")), name
    assert name in dir(pq)


def test_page_lists_only_public_names():
    listed = set(re.findall(r"`(\w+)`", PAGE[PAGE.index("## Names") :]))
    assert listed == set(pq.__all__)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        pq.nothing  # noqa: B018


def test_typing_files_are_part_of_the_package():
    package = resources.files("polyquant")
    assert (package / "py.typed").is_file()
    assert (package / "_native.pyi").is_file()


def test_import_loads_no_numpy():
    text = "import sys, polyquant; print(any(m in sys.modules for m in ('numpy', 'polyquant.types', 'click')))"
    assert subprocess.check_output([sys.executable, "-c", text], text=True).strip() == "False"


@pytest.mark.parametrize("name", ["codecs", "formats", "recipes"])
def test_packages_that_are_functions(name):
    """The name is both a package and a function, in any order of imports."""
    text = f"""
import polyquant as pq
before = len(pq.{name}())
import polyquant.{name}
print(before == len(pq.{name}()), pq.{name}.__path__ is not None)
"""
    assert subprocess.check_output([sys.executable, "-c", text], text=True).split() == ["True", "True"]


def test_example_runs(tmp_path):
    done = subprocess.run([sys.executable, EXAMPLE, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "q4_k" in done.stdout


def test_examples_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(demo_model("llama"))
    Path("text.txt").write_text("And it came to pass, that Pharaoh dreamed. " * 60, encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) > 8
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), scope)
    assert "this checkpoint calls it 'blk.0.ffn_up.weight'" in capsys.readouterr().out
