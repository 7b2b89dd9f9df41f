"""Check the project rules that no linter covers.

Sizes of files and functions, one importer of the extension module, one module that prints, no vague file names, no
branch on a format's name or a codec's class outside its package, no import cycles, and no random generators shared by
tests. Exit status 1 and one line per violation. Part of `make lint`.
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
"""Packages for one format or for codecs: codecs, the Python APIs of two specifications, and the transformers plugin."""
GENERATORS = {"default_rng", "Generator", "RandomState", "Random", "SeedSequence", "PCG64"}


def breaches(path: Path) -> Iterator[str]:
    """Yield the rule violations of one source file."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(SOURCE)
    if (lines := text.count("\n")) > MAX_FILE:
        yield f"{name}: {lines} lines, more than {MAX_FILE}"
    if ROOMLESS & {path.stem, *name.parts}:
        yield f"{name}: vague file name"
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
    """Yield branches on a format's name or a codec's class outside their packages; each new format or codec would need an edit there."""
    if name.parts[0] in ABOUT_ONE or (name.parts[0] == "formats" and len(name.parts) > 2):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            is_format = any(isinstance(s, ast.Attribute) and s.attr == "format" for s in sides)
            is_format |= any(isinstance(s, ast.Name) and s.id in ("to", "format") for s in sides)
            constants = {c.value for s in sides for c in ast.walk(s) if isinstance(c, ast.Constant)}
            if is_format and any(isinstance(value, str) for value in constants):
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
    """Return the public classes of the codec files."""
    trees = (ast.parse(p.read_text(encoding="utf-8")) for p in (SOURCE / "codecs").glob("*.py"))
    return frozenset(
        n.name for t in trees for n in t.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")
    )


def import_circles(sources: Mapping[str, str]) -> Iterator[str]:
    """Yield one line per import cycle among modules (dotted name -> source text).

    Imports for types and inside functions count. A package has the imports of its __init__.py. Omit the root package,
    which imports every command.
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
    """Remove modules without imports until none is left: every path through the rest ends in a cycle."""
    while ends := {name for name, needs in graph.items() if not needs}:
        graph = {name: needs - ends for name, needs in graph.items() if name not in ends}
    return graph


def _imported(tree: ast.Module, known: Collection[str]) -> set[str]:
    """Return the modules of `known` that are imported anywhere in the file."""
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= whole | ({node.module or ""} if whole - set(known) else set())
    return imported & set(known)


def package_sources() -> dict[str, str]:
    """Return dotted name -> text of every module except the root package."""
    out = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    del out["polyquant"]
    return out


def shared_randomness(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and reason of random generators shared by tests, including the global ones of Python and numpy.

    Their values depend on the order of the tests, and so does whether a tolerance holds.
    """
    for node in _run_once(tree):
        if isinstance(node, ast.Call) and _name(node.func)[-1] in GENERATORS:
            yield node.lineno, "a generator shared by tests: create one in each test"
    for node in ast.walk(tree):
        match _name(node):
            case ["random", function] if function not in GENERATORS:
                yield node.lineno, f"random.{function} uses the global generator: create a random.Random(seed)"
            case ["np" | "numpy", "random", function] if function not in GENERATORS:
                yield node.lineno, f"np.random.{function} uses the global generator: create a default_rng(seed)"
        if isinstance(node, ast.Call) and _name(node.func)[-1] in GENERATORS and not (node.args or node.keywords):
            yield node.lineno, "a generator without a seed"


def _run_once(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield code evaluated once for several tests: module level, default values, and results of wide fixtures and caches."""
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
    """`np.random.default_rng` -> its three words; [""] for expressions that are not names."""
    if isinstance(node, ast.Attribute):
        return [*_name(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else ""]


def _prints(function: ast.expr) -> bool:
    """True for print(...), click.echo(...) and console.print(...)."""
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
