"""The house rules that no linter knows: sizes of files and functions, one importer of the extension module, one module that
prints, no vague file names, no branch on a format's name or a codec's class outside its package, no circle of imports, and no random numbers that
tests share.

Exit status 1 and one line per breach. Part of `make lint`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE, TESTS = ROOT / "src" / "polyquant", ROOT / "tests"
MAX_FILE, MAX_FUNCTION = 500, 80
ROOMLESS = {"utils", "util", "helpers", "common", "misc", "manager"}
ABOUT_ONE = {"codecs", "trellis", "msmodelslim", "integrations"}
"""Packages that are about one format, or about codecs: the faces of two documents, and the Trellis plugin of transformers."""
GENERATORS = {"default_rng", "Generator", "RandomState", "Random", "SeedSequence", "PCG64"}


def breaches(path: Path) -> Iterator[str]:
    """Every rule that one source file breaks."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(SOURCE)
    if (lines := text.count("\n")) > MAX_FILE:
        yield f"{name}: {lines} lines, more than {MAX_FILE}"
    if ROOMLESS & {path.stem, *name.parts}:
        yield f"{name}: a file name that says nothing"
    tree = ast.parse(text)
    for line, reason in names_a_format(name, tree):
        yield f"{name}:{line}: {reason}"
    for node in ast.walk(tree):
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


def names_a_format(name: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Branches on a format's name or on a codec's class outside of the packages that are about them: a new one would have to be added there."""
    if name.parts[0] in ABOUT_ONE or (name.parts[0] == "formats" and len(name.parts) > 2):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            asked = any(isinstance(s, ast.Attribute) and s.attr == "format" for s in sides)
            asked |= any(isinstance(s, ast.Name) and s.id in ("to", "format") for s in sides)
            said = {c.value for s in sides for c in ast.walk(s) if isinstance(c, ast.Constant)}
            if asked and any(isinstance(value, str) for value in said):
                yield node.lineno, "branches on the name of a format: ask the format (formats/protocol.py)"
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "isinstance"
            and len(node.args) == 2
        ):
            classes = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)} & codec_classes()
            if classes:
                yield (
                    node.lineno,
                    f"branches on the class {min(classes)} of a codec: ask for a capability (capabilities.py)",
                )


@cache
def codec_classes() -> frozenset[str]:
    """Public classes of the codec files."""
    trees = (ast.parse(p.read_text(encoding="utf-8")) for p in (SOURCE / "codecs").glob("*.py"))
    return frozenset(
        n.name for t in trees for n in t.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")
    )


def import_circles(sources: Mapping[str, str]) -> Iterator[str]:
    """Circles among modules (dotted name -> source text), imports for types alone and inside of functions among them: one line for each.

    A package imports as what its __init__.py is. Leave out the root, which names every verb.
    """
    graph = _without_ends({name: _imported(ast.parse(text), sources) - {name} for name, text in sources.items()})
    while graph:
        path = [min(graph)]
        while path[-1] not in path[:-1]:
            path.append(min(graph[path[-1]]))
        circle = path[path.index(path[-1]) :]
        yield f"imports in a circle: {' -> '.join(circle)}"
        graph = _without_ends({name: needs - set(circle) for name, needs in graph.items() if name not in circle})


def _without_ends(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without what imports nothing else, again and again: every path through the rest comes to a circle."""
    while ends := {name for name, needs in graph.items() if not needs}:
        graph = {name: needs - ends for name, needs in graph.items() if name not in ends}
    return graph


def _imported(tree: ast.Module, known: Collection[str]) -> set[str]:
    """Modules of `known` that are imported, wherever in the file."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= whole | ({node.module or ""} if whole - set(known) else set())
    return found & set(known)


def package_sources() -> dict[str, str]:
    """Dotted name -> text of every module but the root."""
    out = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    del out["polyquant"]
    return out


def shared_randomness(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and reason of random numbers that depend on which tests ran before: those of a generator made once for several tests, and of the
    one that Python and numpy each have for the process. Whether a bound holds for them changes with the order of the tests.
    """
    for node in _run_once(tree):
        if isinstance(node, ast.Call) and _name(node.func)[-1] in GENERATORS:
            yield node.lineno, "a generator that tests share: let each test make its own"
    for node in ast.walk(tree):
        match _name(node):
            case ["random", function] if function not in GENERATORS:
                yield node.lineno, f"random.{function} uses the generator of the process: make a random.Random(seed)"
            case ["np" | "numpy", "random", function] if function not in GENERATORS:
                yield node.lineno, f"np.random.{function} uses the generator of the process: make a default_rng(seed)"
        if isinstance(node, ast.Call) and _name(node.func)[-1] in GENERATORS and not (node.args or node.keywords):
            yield node.lineno, "a generator without a seed"


def _run_once(tree: ast.AST) -> Iterator[ast.AST]:
    """What is evaluated once for several tests: all outside of functions, default values, and what wide fixtures and caches return."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from _run_once(node)
            continue
        yield from ast.walk(node.args)  # default values
        for decorator in getattr(node, "decorator_list", []):
            yield from ast.walk(decorator)
            call = decorator if isinstance(decorator, ast.Call) else None
            wide = call is not None and any(k.arg == "scope" for k in call.keywords)
            if wide or _name(call.func if call else decorator)[-1] in ("cache", "lru_cache"):
                results = (n.value for n in ast.walk(node) if isinstance(n, ast.Return | ast.Yield))
                yield from (value for value in results if value is not None)


def _name(node: ast.AST) -> list[str]:
    """`np.random.default_rng` -> its three words; [""] for what is no name."""
    if isinstance(node, ast.Attribute):
        return [*_name(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else ""]


def _prints(function: ast.expr) -> bool:
    """print(...), click.echo(...), console.print(...)."""
    called = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    return called in {"print", "echo", "secho"}


def main() -> int:
    """Print breaches; 1 if there are any."""
    found = [line for path in sorted(SOURCE.rglob("*.py")) for line in breaches(path)]
    found += import_circles(package_sources())
    for path in sorted(TESTS.rglob("*.py")):
        if TESTS / "vectors" not in path.parents:  # those were made once, by scripts
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found += [f"{path.relative_to(ROOT)}:{line}: {why}" for line, why in shared_randomness(tree)]
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
