"""Command-line flags from the option dataclasses of the formats (polyquant.options), grouped in `--help` by format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from polyquant.cli.grouped import GroupedOption
from polyquant.options import DeclaresTargetOptions, Option, options_of
from polyquant.registry import formats

if TYPE_CHECKING:
    from polyquant.formats.protocol import Format

__all__ = ["format_options", "source_option", "writable"]

F = TypeVar("F", bound=Callable[..., Any])


class _Parsed(click.ParamType[Any]):
    """A value parsed by the option's own function, whose errors are one line instead of a usage error."""

    def __init__(self, option: Option) -> None:
        self._option = option
        self.name = option.metavar or "value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        assert self._option.parse is not None
        return self._option.parse(value)


def format_options(*, sources: bool, targets: bool) -> Callable[[F], F]:
    """Add a flag for every option of reading (sources) and writing (targets) formats, including installed packages."""

    def add(command: F) -> F:
        for flag in reversed(_flags(sources=sources, targets=targets)):
            command = flag(command)
        return command

    return add


def _flags(*, sources: bool, targets: bool) -> list[Callable[[Any], Any]]:
    takers: dict[str, list[tuple[str, Option]]] = {}
    for form in sorted(formats(), key=lambda f: f.priority):
        writing = _target_options(form) if targets else None
        classes = [form.open_options] if sources else []
        classes += [writing] if writing is not None else []
        for cls in classes:
            for name, option in options_of(cls).items():
                if option.flag and all(title != form.title for title, _ in takers.get(name, ())):
                    takers.setdefault(name, []).append((form.title, option))
    single = [item for item in takers.items() if len(item[1]) == 1]
    shared = [item for item in takers.items() if len(item[1]) > 1]
    return [_flag(name, options) for name, options in (*shared, *single)]


def _target_options(form: Format) -> type | None:
    """The option class of a format's target, if possible without importing it; None for a read-only format."""
    if isinstance(form, DeclaresTargetOptions):
        return form.target_options
    return None if form.target is None else form.target.options


def writable() -> list[str]:
    """Names of the writable formats, in order of detection, each followed by its quantization schemes."""
    out = []
    for form in formats():
        if _target_options(form) is not None:
            out += [form.name, *getattr(form, "schemes", ())]
    return out


def format_names() -> list[str]:
    """Names of the writable formats, without their schemes."""
    return [form.name for form in formats() if _target_options(form) is not None]


def source_option(name: str, *, flag: str | None = None, help: str | None = None) -> Callable[[F], F]:
    """The flag of one open option as its formats describe it, or a second flag of the same type with its own help."""
    takers = [(f.title, options_of(f.open_options)[name]) for f in formats() if name in options_of(f.open_options)]
    if flag is None:
        return _flag(name, takers)
    _, first = takers[0]
    return click.option(flag, help=help, metavar=first.metavar, **_kind(first, first.choices))


def _flag(name: str, takers: Sequence[tuple[str, Option]]) -> Callable[[Any], Any]:
    """One flag. Formats that share it must agree on everything except help and choices."""
    title, first = takers[0]
    shared = len(takers) > 1
    titles_by_help: dict[str, list[str]] = {}
    for taker, option in takers:
        titles_by_help.setdefault(_text(option), []).append(taker)
    helps = [f"{', '.join(titles)}: {text}" if shared else text for text, titles in titles_by_help.items()]
    choices = tuple(dict.fromkeys(c for _, option in takers for c in option.choices))
    group = "Options of several formats" if shared else title
    return click.option(
        first.flag, name, cls=GroupedOption, group=group, help=" ".join(helps), metavar=first.metavar,
        **_kind(first, choices),
    )  # fmt: skip


def _text(option: Option) -> str:
    return f"{option.help}  [default: {option.default}]" if option.default else option.help


def _kind(option: Option, choices: Sequence[str]) -> dict[str, Any]:
    """The click type of an option."""
    if option.type is bool:
        return {"is_flag": True}
    if option.parse is not None:
        return {"type": _Parsed(option), "multiple": option.multiple}
    if choices:
        return {"type": click.Choice(choices), "multiple": option.multiple}
    if option.type is int:
        return {"type": click.IntRange(_int(option.low), _int(option.high))}
    if option.type is float:
        return {"type": click.FloatRange(option.low, option.high, min_open=option.low_open)}
    return {"type": click.Path() if option.type is Path else str, "multiple": option.multiple}


def _int(bound: float | None) -> int | None:
    return None if bound is None else int(bound)
