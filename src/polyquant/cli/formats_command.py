"""polyquant formats"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from textwrap import wrap

import click

from polyquant.analysis.catalogue import formats as listed_formats
from polyquant.cli.console import as_json, json_option, table
from polyquant.cli.terminal import say, width


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
    if style == "json":
        as_json([asdict(info) for info in every])
        return
    rows = table("=format", "files", ">reads", ">writes")
    for info in every:
        writes = str(len(info.writes)) if info.writes else "yes" if info.writable else "-"
        rows.add_row(info.name, info.files or "-", str(len(info.reads)), writes)
    rows.show()
    for info in every:
        only = [name for name in info.reads if name not in info.writes]
        say("")
        _wrapped(f"{info.name} reads and writes: {_families(info.writes)}")
        if only:
            _wrapped(f"{info.name} reads: {_families(only)}")


def _wrapped(text: str) -> None:
    for line in wrap(text, width(), subsequent_indent="  "):
        say(line)


def _families(names: Sequence[str]) -> str:
    """Codec names; members of one family as NAME.*"""
    firsts = [name.partition(".")[0] for name in names]
    return " ".join(dict.fromkeys(f"{f}.*" if firsts.count(f) > 1 else n for n, f in zip(names, firsts, strict=True)))
