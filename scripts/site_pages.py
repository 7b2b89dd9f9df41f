"""Pages of the documentation site that follow from the code: the commands and their options, and the Python names.

docs/conf.py writes them while the site is built; they are not stored.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from textwrap import indent
from types import GenericAlias, ModuleType

import click

import polyquant
from polyquant.cli import COMMANDS, cli

__all__ = ["Section", "examples", "sections", "write"]

ROOT = Path(__file__).resolve().parents[1]
Section = tuple[str, list[tuple[str, str]]]
"""The title of a group of options, and (flags, help) of each."""


def write(folder: Path) -> None:
    """Write all pages."""
    pages = {
        "contributing.md": _top("CONTRIBUTING.md"),
        "changelog.md": _top("CHANGELOG.md"),
        "commands/index.md": _commands(),
        "python/index.md": _contents("Python reference", ["functions", "types", "errors"]),
        "python/functions.md": _names("Functions", _callable),
        "python/types.md": _names("Types", lambda value: not _callable(value) and not _error(value)),
        "python/errors.md": _names("Errors", _error),
        **{f"commands/{name}.md": _command(name) for name in COMMANDS},
    }
    for name, text in pages.items():
        page = folder / name
        page.parent.mkdir(parents=True, exist_ok=True)
        if not page.exists() or page.read_text(encoding="utf-8") != text:  # an unchanged page is not built again
            page.write_text(text, encoding="utf-8")


def _top(name: str) -> str:
    """A file at the top of the repository, with links that hold two folders below it."""
    text = (ROOT / name).read_text(encoding="utf-8")
    text = re.sub(r"\]\(docs/", "](../", text)
    return text.replace("](CHANGELOG.md", "](changelog.md").replace("](CONTRIBUTING.md", "](contributing.md")


def _contents(title: str, pages: list[str]) -> str:
    return f"# {title}\n\n```{{toctree}}\n:maxdepth: 2\n\n" + "\n".join(pages) + "\n```\n"


def context_of(name: str) -> click.Context:
    """The context in which click writes the help of a command."""
    root = click.Context(cli, info_name="polyquant")
    command = cli.get_command(root, name)
    assert command is not None
    return click.Context(command, info_name=name, parent=root)


def sections(ctx: click.Context) -> list[Section]:
    """The options in the groups of `--help`, without that option itself."""
    out: dict[str, list[tuple[str, str]]] = {}
    for param in ctx.command.get_params(ctx):
        record = param.get_help_record(ctx)
        if isinstance(param, click.Option) and record is not None and "--help" not in param.opts:
            out.setdefault(getattr(param, "group", "Options"), []).append(record)
    return list(out.items())


def examples(command: click.Command) -> str:
    """The examples at the end of the help, without indentation; empty without any."""
    lines = (command.epilog or "").replace("\b\n", "").removeprefix("Examples:\n").splitlines()
    return "\n".join(line.removeprefix("  ") for line in lines)


def _commands() -> str:
    rows = "\n".join(f"| [`{name}`]({name}.md) | {text} |" for name, text in COMMANDS.items())
    return (
        "# Commands\n\nEvery command with its options, as `--help` prints them. [The command line](../../cli.md) has "
        f"an example with output for each.\n\n| command | function |\n|---|---|\n{rows}\n\n"
        "```{toctree}\n:hidden:\n\n" + "\n".join(COMMANDS) + "\n```\n"
    )


def _command(name: str) -> str:
    ctx = context_of(name)
    text = " ".join(inspect.cleandoc(ctx.command.help or "").split())
    usage = " ".join(("polyquant", name, *ctx.command.collect_usage_pieces(ctx)))
    out = [f"# {name}", _escaped(text), f"```text\n{usage}\n```"]
    for title, records in sections(ctx):
        out.append(f"## {title}")
        out += [f"`{flags}`\n: {_escaped(text) or 'No argument.'}" for flags, text in records]
    if shown := examples(ctx.command):
        out.append(f"## Examples\n\n```sh\n{shown}\n```")
    out.append(f"[Examples with output](../../cli.md#{name})")
    return "\n\n".join(out) + "\n"


def _escaped(text: str) -> str:
    """Markdown that shows the text as it is."""
    return re.sub(r"([\\*_<>\[\]|~#$])", r"\\\1", text)


def _callable(value: object) -> bool:
    """True for a function; a package can be one (polyquant/callable_package.py)."""
    return inspect.isfunction(value) or isinstance(value, ModuleType)


def _error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def _names(title: str, wanted: Callable[[object], bool]) -> str:
    out = [f"# {title}"]
    for name, value in _public():
        if wanted(value):
            out.append(f"## {name}\n\n```{{eval-rst}}\n{_directive(name, value)}\n```")
    return "\n\n".join(out) + "\n"


def _public() -> Iterator[tuple[str, object]]:
    for name in sorted(polyquant.__all__, key=str.lower):
        if not name.startswith("_"):
            yield name, getattr(polyquant, name)


def _directive(name: str, value: object) -> str:
    if isinstance(value, ModuleType):
        function = getattr(import_module("polyquant.analysis.catalogue"), name)
        text = indent(inspect.getdoc(function) or "", "   ")
        return f".. py:function:: polyquant.{name}() -> {inspect.signature(function).return_annotation}\n\n{text}"
    if isinstance(value, GenericAlias):
        return f".. py:data:: polyquant.{name}\n   :value: {value}"
    if _callable(value):
        return f".. autofunction:: polyquant.{name}"
    return f".. autoclass:: polyquant.{name}\n   :members:\n   :undoc-members:\n   :exclude-members: __init__"
