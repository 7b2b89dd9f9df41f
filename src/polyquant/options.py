"""Options declared once: a frozen dataclass whose fields carry their help.

    @dataclass(frozen=True, slots=True)
    class TrellisOptions:
        bits: int | None = option(None, help="Bits of each quantized weight.", type=int, low=2, high=8)

The command line derives `--bits` from it, grouped under the title of its format, and `plan(..., bits=3)` accepts it. An
option that several formats share has one flag with the help of all of them.
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
    "DeclaresTargetOptions",
    "NoOptions",
    "Option",
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
    """One option. flag: on the command line, "" if only in Python; type: of its value; bool is a switch, Path a file.

    parse: string -> value, for other types. low, high: bounds of a number, inclusive unless low_open. multiple:
    repeatable. default: the default as shown in the help.
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
    """No options."""


@runtime_checkable
class DeclaresTargetOptions(Protocol):
    """A format that provides the options of its target without importing the target."""

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
    """A dataclass field with its help; see `Option`. flag: default: the field's name with dashes. shown: default in the
    help.
    """

    def described(name: str) -> Option:
        flag_name = f"--{name.replace('_', '-')}" if flag is None else flag
        return Option(name, help, flag_name, type, metavar, tuple(choices), low, high, low_open, multiple, parse, shown)

    return field(default=default, metadata={"option": described})


def options_of(cls: type) -> dict[str, Option]:
    """The options of a dataclass by field name, in order."""
    return {f.name: f.metadata["option"](f.name) for f in fields(cls) if "option" in f.metadata}


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are set: None, False and empty collections count as not given."""
    return {
        name: value
        for name, value in values.items()
        if not (value is None or value is False or (isinstance(value, tuple | list | dict) and not value))
    }


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Build an instance from the values of its fields; lists become tuples. Raises TypeError for a missing field."""
    known = {f.name for f in fields(cls) if f.init}  # type: ignore[arg-type]
    files = {n for n, o in options_of(cls).items() if o.type is Path}
    chosen = {n: _plain(v, path=n in files) for n, v in given(values).items() if n in known}
    every = fields(cls)  # type: ignore[arg-type]
    needed = [f.name for f in every if f.default is MISSING and f.default_factory is MISSING]
    assert set(needed) <= chosen.keys(), f"{cls.__name__} needs {needed}"
    return cls(**chosen)


def _plain(value: Any, *, path: bool) -> Any:
    """Convert lists to tuples, and paths to strings unless the option takes a path."""
    if isinstance(value, list):
        return tuple(value)
    return os.fspath(value) if isinstance(value, os.PathLike) and not path else value


def refuse_unknown(values: Iterable[str], known: Iterable[str], function: str) -> None:
    """Raise TypeError with Python's usual message for an unknown keyword."""
    known = sorted(known)
    for name in values:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}'{hint}")


def with_keywords(keywords: type, defaults: Mapping[str, object]) -> Callable[[F], F]:
    """Decorator of a function that takes `**options: Unpack[keywords]`: `help()` and `inspect.signature()` show each
    keyword with its type and default.

    defaults: of those that are not None. Options of formats from installed packages are taken too; they are shown as
    `**plugin_options`.
    """

    def decorate(function: F) -> F:
        written = inspect.signature(function)
        own = [
            p.replace(annotation=_Source.of(p.annotation))
            for p in written.parameters.values()
            if p.kind is not p.VAR_KEYWORD
        ]
        more = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=_Source.of(annotation)
            )
            for name, annotation in keywords.__annotations__.items()
        ]
        others = inspect.Parameter("plugin_options", inspect.Parameter.VAR_KEYWORD, annotation=_Source("Any"))
        returns = _Source.of(written.return_annotation)
        signature = written.replace(parameters=[*own, *more, others], return_annotation=returns)
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return decorate


class _Source(str):
    """An annotation as source text, shown without quotes."""

    __slots__ = ()

    @classmethod
    def of(cls, annotation: Any) -> _Source:
        """From a string or a ForwardRef."""
        return cls(getattr(annotation, "__forward_arg__", annotation))

    def __repr__(self) -> str:
        return str(self)
