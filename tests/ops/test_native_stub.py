"""The stub _native.pyi has every function, class and method of the extension module, with the same parameters."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import polyquant
from polyquant.ops import native

STUB = Path(polyquant.__file__).parent / "_native.pyi"

Parameters = list[tuple[str, bool]]
"""(name, has a default) of each."""


def stated() -> dict[str, Parameters | None]:
    """Name -> parameters of the stub, None of a property and of a class without methods."""
    out: dict[str, Parameters | None] = {}
    for node in ast.parse(STUB.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            out[node.name] = parameters(node)
        elif isinstance(node, ast.ClassDef):
            out[node.name] = None
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    out[f"{node.name}.{member.name}"] = None if member.decorator_list else parameters(member)
    return out


def parameters(node: ast.FunctionDef) -> Parameters:
    taken = node.args
    names = [a.arg for a in (*taken.posonlyargs, *taken.args)]
    without = len(names) - len(taken.defaults)
    return [(n, i >= without) for i, n in enumerate(names)] + ([(taken.vararg.arg, False)] if taken.vararg else [])


def bound() -> dict[str, Parameters | None]:
    """The same of the module itself."""
    module = native.module()
    out: dict[str, Parameters | None] = {}
    for name, value in vars(module).items():
        if name.startswith("__"):
            continue
        if not isinstance(value, type):
            out[name] = signature(value)
            continue
        out[name] = None
        for member, function in vars(value).items():
            if isinstance(function, property):
                out[f"{name}.{member}"] = None
            elif hasattr(function, "__nb_signature__"):
                out[f"{name}.{member}"] = signature(function)
    return out


def signature(function: object) -> Parameters:
    ((text, *_),) = function.__nb_signature__  # type: ignore[attr-defined]
    inside = re.sub(
        r"\[[^][]*\]", "", re.sub(r"\[[^][]*\]", "", text)
    )  # without the types' brackets, in which are commas
    listed = inside[inside.index("(") + 1 : inside.rindex(")")]
    found = [p.strip() for p in listed.split(",") if p.strip() and p.strip() != "/"]
    return [(re.split(r"[:=]", p.lstrip("*"))[0].strip(), "=" in p) for p in found]


@pytest.mark.skipif(not native.available(), reason="the pure package has no extension module")
def test_stub_is_the_module():
    want, have = bound(), stated()
    assert sorted(have) == sorted(want)
    for name, found in want.items():
        assert have[name] == found, name
