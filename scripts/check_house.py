"""The house rules that no linter knows: sizes of files and functions, one importer of the extension module, one door to
the terminal, no rooms without a name.

Exit status 1 and one line per breach. Part of `make lint`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "polyquant"
MAX_FILE, MAX_FUNCTION = 500, 80
ROOMLESS = {"utils", "util", "helpers", "common", "misc", "manager"}


def breaches(path: Path) -> Iterator[str]:
    """Every rule that one source file breaks."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(SOURCE)
    if (lines := text.count("\n")) > MAX_FILE:
        yield f"{name}: {lines} lines, more than {MAX_FILE}"
    if ROOMLESS & {path.stem, *name.parts}:
        yield f"{name}: a room without a name"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines, more than {MAX_FUNCTION}"
        if (
            isinstance(node, ast.Call)
            and name.parts[0] == "cli"
            and str(name) != "cli/terminal.py"
            and _prints(node.func)
        ):
            yield f"{name}:{node.lineno}: only cli/terminal.py prints"
        if isinstance(node, ast.ImportFrom) and str(name) != "ops/native.py":
            modules = {node.module or "", *(f"{node.module}.{a.name}" for a in node.names)}
            if "polyquant._native" in modules:
                yield f"{name}:{node.lineno}: only ops/native.py imports the extension module"


def _prints(function: ast.expr) -> bool:
    """print(...), click.echo(...), console.print(...)."""
    called = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    return called in {"print", "echo", "secho"}


def main() -> int:
    """Print breaches; 1 if there are any."""
    found = [line for path in sorted(SOURCE.rglob("*.py")) for line in breaches(path)]
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
