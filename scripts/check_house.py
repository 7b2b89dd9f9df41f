"""Check the house rules that linters do not cover.

Sizes of files and functions, a single importer of the extension module, a single module that prints, no vague file
names, no branch on a format's name or a codec's class outside its package, no circular imports, no random state shared
by tests, and plain wording (wording.py).

Exit status 1 and one line per violation. Part of `make lint`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import wording

ROOT = Path(__file__).resolve().parent.parent
SOURCE, TESTS = ROOT / "src" / "polyquant", ROOT / "tests"
MAX_FILE, MAX_FUNCTION = 500, 80
ROOMLESS = {"utils", "util", "helpers", "common", "misc", "manager"}
ABOUT_ONE = {"codecs", "trellis", "msmodelslim", "integrations"}
"""Packages about one format or codecs: the APIs of two specifications, and the Trellis plugin of transformers."""
GENERATORS = {"default_rng", "Generator", "RandomState", "Random", "SeedSequence", "PCG64"}


def breaches(path: Path) -> Iterator[str]:
    """Yield the violations of one source file."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(SOURCE)
    if (lines := text.count("\n")) > MAX_FILE:
        yield f"{name}: {lines} lines, more than {MAX_FILE}"
    if ROOMLESS & {path.stem, *name.parts}:
        yield f"{name}: a vague file name"
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
    """Branches on a format's name or a codec's class outside their packages, where a new one would be missing."""
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
    """Yield one line per import cycle among modules (dotted name -> source text).

    Type-only imports and imports in functions count. A package is its __init__.py. Omit the root package, which imports
    every public function.
    """
    graph = _remove_leaves({name: _imported(ast.parse(text), sources) - {name} for name, text in sources.items()})
    while graph:
        path = [min(graph)]
        while path[-1] not in path[:-1]:
            path.append(min(graph[path[-1]]))
        circle = path[path.index(path[-1]) :]
        yield f"import cycle: {' -> '.join(circle)}"
        graph = _remove_leaves({name: needs - set(circle) for name, needs in graph.items() if name not in circle})


def _remove_leaves(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Remove modules that import no others, repeatedly: every path through the rest leads to a cycle."""
    while ends := {name for name, needs in graph.items() if not needs}:
        graph = {name: needs - ends for name, needs in graph.items() if name not in ends}
    return graph


def _imported(tree: ast.Module, known: Collection[str]) -> set[str]:
    """Modules of `known` that are imported anywhere in the file."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= names | ({node.module or ""} if names - set(known) else set())
    return modules & set(known)


def package_sources() -> dict[str, str]:
    """Dotted name -> text of every module but the root."""
    out = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    del out["polyquant"]
    return out


def shared_randomness(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and reason of random numbers that depend on earlier tests.

    They come from a generator shared by several tests, or from the process-wide ones of Python and numpy, so that
    results depend on the order of the tests.
    """
    for node in _run_once(tree):
        if isinstance(node, ast.Call) and _name(node.func)[-1] in GENERATORS:
            yield node.lineno, "a generator shared by tests: create one per test"
    for node in ast.walk(tree):
        match _name(node):
            case ["random", function] if function not in GENERATORS:
                yield node.lineno, f"random.{function} uses the generator of the process: make a random.Random(seed)"
            case ["np" | "numpy", "random", function] if function not in GENERATORS:
                yield node.lineno, f"np.random.{function} uses the generator of the process: make a default_rng(seed)"
        if isinstance(node, ast.Call) and _name(node.func)[-1] in GENERATORS and not (node.args or node.keywords):
            yield node.lineno, "a generator without a seed"


def _run_once(tree: ast.AST) -> Iterator[ast.AST]:
    """Code evaluated once for several tests: module level, default values, and results of wide fixtures and caches."""
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
    """`np.random.default_rng` -> its three parts; [""] for other expressions."""
    if isinstance(node, ast.Attribute):
        return [*_name(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else ""]


def _prints(function: ast.expr) -> bool:
    """print(...), click.echo(...), console.print(...)."""
    called = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    return called in {"print", "echo", "secho"}


def main() -> int:
    """Print violations; 1 if there are any."""
    lines = [line for path in sorted(SOURCE.rglob("*.py")) for line in breaches(path)]
    lines += import_circles(package_sources())
    for path in sorted(TESTS.rglob("*.py")):
        if TESTS / "vectors" not in path.parents:  # created once, by scripts
            tree = ast.parse(path.read_text(encoding="utf-8"))
            lines += [f"{path.relative_to(ROOT)}:{line}: {why}" for line, why in shared_randomness(tree)]
    for paths in (wording.DEFAULT, wording.OTHERS):
        hits, total = wording.check(paths)
        if len(hits) > wording.LIMIT * total:
            lines += [*map(wording.described, hits), wording.summary(hits, total)]
    print(*lines, sep="\n", end="\n" if lines else "")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
