"""Options that are written once: a frozen dataclass whose fields carry their help.

    @dataclass(frozen=True, slots=True)
    class TrellisOptions:
        bits: int | None = option(None, help="Bits of each quantized weight.", type=int, low=2, high=8)

The command line makes `--bits` of it, grouped under the title of its format, and `plan(..., bits=3)` finds its way into it. An option that
several formats share has one flag: its texts are joined.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

__all__ = [
    "NoOptions",
    "Option",
    "SaysTargetOptions",
    "build",
    "given",
    "option",
    "options_of",
    "refuse_unknown",
    "with_keywords",
]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Option:
    """One option. flag: as the command line calls it, "" if only Python has it; type: of its value there: bool is a switch, Path a file.

    parse: text -> value, where it is none of these types. low, high: bounds of a number, both allowed unless open. multiple: repeatable.
    default: what the help says is the default.
    """

    name: str
    help: str
    flag: str
    type: type
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    multiple: bool = False
    parse: Callable[[str], Any] | None = None
    default: str = ""


@dataclass(frozen=True, slots=True)
class NoOptions:
    """For what takes none."""


@runtime_checkable
class SaysTargetOptions(Protocol):
    """A format that can say the options of its target without importing what writes it."""

    @property
    def target_options(self) -> type | None:
        """`target.options`; None for a format that is only read."""


def option(
    default: Any = None,
    *,
    help: str,
    type: type = str,
    flag: str | None = None,
    metavar: str | None = None,
    choices: Iterable[str] = (),
    low: float | None = None,
    high: float | None = None,
    low_open: bool = False,
    multiple: bool = False,
    parse: Callable[[str], Any] | None = None,
    shown: str = "",
) -> Any:
    """A dataclass field with its help; see `Option`. flag: by default the field's name with dashes. shown: the default, as the help says it."""

    def described(name: str) -> Option:
        said = f"--{name.replace('_', '-')}" if flag is None else flag
        return Option(name, help, said, type, metavar, tuple(choices), low, high, low_open, multiple, parse, shown)

    return field(default=default, metadata={"option": described})


def options_of(cls: type) -> dict[str, Option]:
    """The options of a dataclass by field name, in order."""
    return {f.name: f.metadata["option"](f.name) for f in fields(cls) if "option" in f.metadata}


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that say something: None, False and empty collections stand for an option that is left out."""
    return {
        name: value
        for name, value in values.items()
        if not (value is None or value is False or (isinstance(value, tuple | list | dict) and not value))
    }


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """An instance from the values that its fields take; lists become tuples. Raises TypeError for a missing field."""
    known = {f.name for f in fields(cls) if f.init}  # type: ignore[arg-type]
    files = {n for n, o in options_of(cls).items() if o.type is Path}
    chosen = {n: _plain(v, path=n in files) for n, v in given(values).items() if n in known}
    needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]  # type: ignore[arg-type]
    assert set(needed) <= chosen.keys(), f"{cls.__name__} needs {needed}"
    return cls(**chosen)


def _plain(value: Any, *, path: bool) -> Any:
    """Lists as tuples; paths as text, unless the option takes a path."""
    if isinstance(value, list):
        return tuple(value)
    return os.fspath(value) if isinstance(value, os.PathLike) and not path else value


def refuse_unknown(values: Iterable[str], known: Iterable[str], function: str) -> None:
    """TypeError, as Python words it, for a keyword that nothing takes."""
    known = sorted(known)
    for name in values:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}'{hint}")


def with_keywords(keywords: type, defaults: Mapping[str, object]) -> Callable[[F], F]:
    """Decorator of a function that takes `**options: Unpack[keywords]`: `help()` and `inspect.signature()` show each keyword with its type and default.

    defaults: of those that are not None. Options of formats from installed packages are taken too; they are shown as `**plugin_options`.
    """

    def decorate(function: F) -> F:
        written = inspect.signature(function)
        own = [
            p.replace(annotation=_Source.of(p.annotation))
            for p in written.parameters.values()
            if p.kind is not p.VAR_KEYWORD
        ]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=_Source.of(annotation))
            for name, annotation in keywords.__annotations__.items()
        ]  # fmt: skip
        others = inspect.Parameter("plugin_options", inspect.Parameter.VAR_KEYWORD, annotation=_Source("Any"))
        returns = _Source.of(written.return_annotation)
        function.__signature__ = written.replace(parameters=[*own, *more, others], return_annotation=returns)  # type: ignore[attr-defined]
        return function

    return decorate


class _Source(str):
    """An annotation as source text, shown without quotes."""

    __slots__ = ()

    @classmethod
    def of(cls, annotation: Any) -> _Source:
        """Of a string, or of what typing makes of one."""
        return cls(getattr(annotation, "__forward_arg__", annotation))

    def __repr__(self) -> str:
        return str(self)
