"""Execute the notebooks of examples/notebooks and store their outputs; `--check` only compares (exit 1 if they differ).

python scripts/run_notebooks.py [--check] [NAME...]

Outputs of cells with the tag "varies" depend on the processor: of them only the kinds are compared. Durations are
ignored, of charts only the data is compared, and of data frames only the text. Needs nbclient and the extra `notebook`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

NOTEBOOKS = Path(__file__).resolve().parent.parent / "examples" / "notebooks"
_SECONDS = re.compile(r"\b\d+\.\d s\b")
_ADDRESS = re.compile(r"\bid=\w+|0x[0-9a-f]{6,}")
_FLOAT = re.compile(r"-?\d+\.\d{6,}(?:e[-+]\d+)?")
_DATA_FRAME = 'class="dataframe"'
"""In the HTML of pandas, which changes with its version."""
_LIMIT = 300
"""Seconds of a cell."""


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with fresh outputs, run in an empty folder."""
    book = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"IPYTHONDIR": folder, "JUPYTER_RUNTIME_DIR": folder}  # no profile, no history
        sockets = Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/kernel"}})
        NotebookClient(
            book, config=sockets, kernel_name="python3", timeout=_LIMIT, record_timing=False, coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        ).execute()  # fmt: skip
    book.metadata = {"kernelspec": book.metadata["kernelspec"], "language_info": {"name": "python"}}
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if not _is_bar(o)]
    return book


def _is_bar(output: nbformat.NotebookNode) -> bool:
    """True for progress bars: text on stderr, or a widget if ipywidgets is installed."""
    return output.get("name") == "stderr" or "application/vnd.jupyter.widget-view+json" in output.get("data", {})


def comparable(book: nbformat.NotebookNode) -> list[str]:
    """One line per output line, without the parts that may differ."""
    return [line for cell in book.cells if cell.cell_type == "code" for line in _lines(cell)]


def _lines(cell: nbformat.NotebookNode) -> Iterator[str]:
    yield f"--- {cell.id}"
    for output in cell.outputs:
        data = {"text/plain": output.text} if output.output_type == "stream" else output.get("data", {})
        yield f"{output.output_type} {' '.join(sorted(data))}"
        if "varies" not in cell.metadata.get("tags", []):
            for kind, content in sorted(data.items()):
                if kind != "image/svg+xml" and _DATA_FRAME not in content:
                    yield from _plain(content).splitlines()


def _plain(content: Any) -> str:
    """Text without durations and addresses, and with rounded numbers."""
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True, indent=0)
    text = _ADDRESS.sub("#", _SECONDS.sub("# s", text))
    return _FLOAT.sub(lambda match: f"{float(match[0]):.4g}", text)


def main(arguments: list[str]) -> int:
    """Run or check the notebooks."""
    names = [a for a in arguments if not a.startswith("--")]
    wrong = 0
    for path in [NOTEBOOKS / name for name in names] or sorted(NOTEBOOKS.glob("*.ipynb")):
        book = executed(path)
        if "--check" not in arguments:
            path.write_text(nbformat.writes(book) + "\n", encoding="utf-8")
            continue
        stored = nbformat.read(path, as_version=4)
        changes = list(difflib.unified_diff(comparable(stored), comparable(book), path.name, "now", lineterm="", n=1))
        if changes:
            wrong = 1
            print(*changes, "run scripts/run_notebooks.py and check the outputs", sep="\n")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
