"""polyquant formats"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

import click

from polyquant.analysis.catalogue import FormatInfo
from polyquant.analysis.catalogue import formats as listed_formats
from polyquant.cli.console import json_option, show_records
from polyquant.cli.terminal import width


@click.command(
    epilog="""\b
Examples:
  polyquant formats
  polyquant formats --format json""",
)
@json_option
def formats(style: str) -> None:
    """List formats: their files, and the codecs that each reads and writes.

    The name is what --to takes; `polyquant convert --help` explains the options of each format.
    """
    every = listed_formats()
    rows = (
        (info.name, info.files or "-", str(len(info.reads)),
         str(len(info.writes)) if info.writes else "yes" if info.writable else "-")
        for info in every
    )  # fmt: skip
    show_records(every, style, ("=format", "files", ">reads", ">writes"), rows, _codecs_of(every))


def _codecs_of(every: Sequence[FormatInfo]) -> Iterator[str]:
    """Lines with the codecs of each format, as wide as the terminal."""
    for info in every:
        yield ""
        yield from _wrapped(f"{info.name} reads and writes: {_families(info.writes)}")
        if only := [name for name in info.reads if name not in info.writes]:
            yield from _wrapped(f"{info.name} reads: {_families(only)}")


def _wrapped(text: str) -> list[str]:
    return wrap(text, width(), subsequent_indent="  ")


def _families(names: Sequence[str]) -> str:
    """Codec names; members of one family as NAME.*"""
    firsts = [name.partition(".")[0] for name in names]
    return " ".join(dict.fromkeys(f"{f}.*" if firsts.count(f) > 1 else n for n, f in zip(names, firsts, strict=True)))
