"""The notebooks of examples/ run, and give the outputs that are stored in them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import polyquant

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


SLOW = {"2-compare-quantizers"}


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.stem in SLOW else []) for p in NOTEBOOKS]
)
def test_a_notebook_gives_its_outputs(path):
    for package in ("nbclient", "ipykernel", "pandas", "tokenizers", "vl_convert"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "run_notebooks.py", "--check", path.name],
        env={**os.environ, "PYTHONPATH": str(Path(polyquant.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_stored_outputs_are_complete_and_hold_no_paths_of_a_machine(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(bool(cell.outputs) for cell in cells) > len(cells) / 2
    assert not [o for cell in cells for o in cell.outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert not re.search(r"/(?:tmp|home|root|usr|work|builds)/|[A-Z]:\\\\", path.read_text(encoding="utf-8"))
    assert book.cells[0].source.startswith("# ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_links_resolve(path):
    book = nbformat.read(path, as_version=4)
    text = "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert links
    assert not [link for link in links if not (path.parent / link).exists()]


def cell(*outputs, tags=()):
    return nbformat.v4.new_code_cell("", id="a", outputs=list(outputs), metadata={"tags": list(tags)})


def test_what_is_compared():
    pytest.importorskip("nbclient", reason="nbclient is not installed")
    spec = importlib.util.spec_from_file_location("run_notebooks", ROOT / "scripts" / "run_notebooks.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def lines(*cells):
        return script.comparable(nbformat.v4.new_notebook(cells=list(cells)))

    def shown(**data):
        kinds = {"text": "text/plain", "html": "text/html", "chart": "application/vnd.vegalite.v5+json"}
        return nbformat.v4.new_output("display_data", {kinds[name]: value for name, value in data.items()})

    assert lines(cell(shown(text="1.2 s, 30 dB"))) == lines(cell(shown(text="9.9 s, 30 dB")))
    assert lines(cell(shown(text="30 dB"))) != lines(cell(shown(text="31 dB")))
    assert lines(cell(shown(html="<b>1</b>"))) != lines(cell(shown(html="<b>2</b>")))
    assert lines(cell(shown(text="30"), tags=["varies"])) == lines(cell(shown(text="31"), tags=["varies"]))
    assert lines(cell(shown(text="30"), tags=["varies"])) != lines(cell(tags=["varies"]))
    close, far = ({"data": [0.12345678 + x]} for x in (0.0, 1e-3))
    assert lines(cell(shown(chart=close))) == lines(cell(shown(chart={"data": [0.12345679]})))
    assert lines(cell(shown(chart=close))) != lines(cell(shown(chart=far)))


def test_all_four_are_here():
    assert [path.name[0] for path in NOTEBOOKS] == ["1", "2", "3", "4"]
