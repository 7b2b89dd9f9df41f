"""Write src/polyquant/keywords.py, the typed keywords of `open`, `plan`, `convert` and `quantize`.

They come from the option classes of the formats and the signature of `plan`. `--check` only compares (exit 1 if they
differ). An option is declared once, as a field of its format's option class; this is the copy for type checkers.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from inspect import unwrap
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pages import write_or_check
from polyquant.capabilities import Tile
from polyquant.conversion.convert import plan
from polyquant.options import options_of
from polyquant.registry import FORMATS, format_named

PAGE = Path(__file__).resolve().parent.parent / "src" / "polyquant" / "keywords.py"
_HEAD = '''"""Keywords of `open`, `plan`, `convert` and `quantize` for type checkers and editors.

Generated: change the option classes of the formats (formats/*/options.py), then run scripts/make_keywords.py. The test
suite fails when they differ.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from polyquant.recipes.recipe import Rule
    from polyquant.types import F32

__all__ = ["OPEN_DEFAULTS", "PLAN_DEFAULTS", "ChoiceKeywords", "FormatKeywords", "OpenKeywords", "PlanKeywords"]
'''
_OWN = {"on_tensor": "Callable[[int, int, str], None] | None"}
"""Annotations of `plan` that are aliases elsewhere."""


@dataclass(slots=True)
class _Keyword:
    """One keyword: types as source text, and defaults, of all formats that take it."""

    kinds: list[str] = field(default_factory=list)
    defaults: list[object] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """All types as one union, None last; string literals are dropped if str is included."""
        kinds = [
            k
            for k in dict.fromkeys(self.kinds)
            if k != "None" and not ("str" in self.kinds and k.startswith("Literal"))
        ]
        return " | ".join([*kinds, *(["None"] if "None" in self.kinds else [])])

    @property
    def default(self) -> object:
        """The one that all formats have; None where they differ."""
        return self.defaults[0] if all(d == self.defaults[0] for d in self.defaults) else None


def page() -> str:
    """The whole module."""
    built_in = [format_named(name) for name in FORMATS]
    opening, both = dict[str, _Keyword](), dict[str, _Keyword]()
    for form in built_in:
        _gather(form.open_options, opening)
        _gather(form.open_options, both)
    for form in built_in:
        if form.target is not None:
            _gather(form.target.options, both)
    written = unwrap(plan).__kwdefaults__ or {}
    own = {
        name: _Keyword([_OWN.get(name, plan.__annotations__[name])], [value])
        for name, value in written.items()
        if name != "progress"  # `convert` has its own
    }
    return _HEAD + "".join(
        [
            _typed_dict(
                "OpenKeywords", "Keywords of `open`: properties of a source that its bytes do not show.", opening
            ),
            _typed_dict(
                "FormatKeywords",
                "Keywords of `plan` for formats: options of the targets, and open options of the source.",
                both,
            ),
            _typed_dict("ChoiceKeywords", "Keywords of `plan` for every format.", own),
            _typed_dict(
                "PlanKeywords",
                "All keywords of `plan`, which `convert` and `quantize` also accept.",
                {},
                "ChoiceKeywords, FormatKeywords",
            ),
            "\n\n",
            _defaults("OPEN_DEFAULTS", opening),
            _defaults("PLAN_DEFAULTS", {**own, **both}),
        ]
    )


def _gather(cls: type, into: dict[str, _Keyword]) -> None:
    """The options of one class."""
    hints = get_type_hints(cls, localns={**vars(import_module(cls.__module__)), "Tile": Tile})
    values = {f.name: f.default for f in fields(cls)}
    for name, option in options_of(cls).items():
        kinds = list(_members(hints[name]))
        if "str" in kinds and "FILE" in (option.metavar or ""):
            kinds.append("os.PathLike[str]")
        keyword = into.setdefault(name, _Keyword())
        keyword.kinds += kinds
        keyword.defaults.append(values[name])


def _members(hint: Any) -> Iterator[str]:
    """The types of a union as source text."""
    for member in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        yield _text(member)


def _text(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is type(None):
        return "None"
    if origin is Literal:
        return "Literal[" + ", ".join(f'"{a}"' for a in arguments) + "]"
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"Sequence[{_text(arguments[0])}]"
    if origin is os.PathLike:
        return "os.PathLike[str]"
    if origin is not None:
        name = {Mapping: "Mapping", Sequence: "Sequence", Callable: "Callable"}.get(origin, origin.__name__)
        return f"{name}[{', '.join(map(_text, arguments))}]"
    return str(hint.__name__)


def _typed_dict(name: str, about: str, keywords: Mapping[str, _Keyword], bases: str = "TypedDict") -> str:
    keys = "".join(f"    {key}: {keyword.kind}\n" for key, keyword in keywords.items())
    return f'\n\nclass {name}({bases}, total=False):\n    """{about}"""\n' + (f"\n{keys}" if keys else "")


def _defaults(name: str, keywords: Mapping[str, _Keyword]) -> str:
    values = {key: keyword.default for key, keyword in keywords.items() if keyword.default is not None}
    pairs = "".join(f"    {key!r}: {value!r},\n" for key, value in values.items()).replace("'", '"')
    return f'{name}: Mapping[str, Any] = {{\n{pairs}}}\n"""Defaults that are not None."""\n'


def main(arguments: list[str]) -> int:
    """Write or check the module."""
    return write_or_check(PAGE, page(), arguments, "make_keywords.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
