"""polyquant formats"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

import click

from polyquant.analysis.catalogue import FormatInfo
from polyquant.analysis.catalogue import formats as listed_formats
from polyquant.analysis.matrix import FLOAT_PACKINGS, PACKINGS, Matrix, matrix
from polyquant.cli.completing import codecs as complete_codecs
from polyquant.cli.console import as_json, json_option, show_records
from polyquant.cli.terminal import say, width
from polyquant.errors import printable

_FEW = 4
"""Codecs for which the sentences are printed too."""


@click.command(
    epilog="""\b
Examples:
  polyquant formats
  polyquant formats --format json
  polyquant formats --matrix
  polyquant formats --matrix q4_0 compressed.p4.g32 awq.4.g32
  polyquant formats --matrix --format json""",
)
@click.argument("codecs", nargs=-1, metavar="[CODEC]...", shell_complete=complete_codecs)
@click.option("--matrix", "pairs", is_flag=True, help="Which packings keep the codes of which; with CODECs only these.")
@json_option
def formats(codecs: tuple[str, ...], pairs: bool, style: str) -> None:
    """List formats: their files, and the codecs that each reads and writes.

    The name is what --to takes; `polyquant convert --help` explains the options of each format.
    """
    if pairs:
        _show_matrix(codecs, style)
        return
    if codecs:
        raise click.UsageError("CODECs need --matrix: polyquant formats --matrix " + " ".join(map(printable, codecs)))
    every = listed_formats()
    rows = (
        (info.name, info.files or "-", str(len(info.reads)),
         str(len(info.writes)) if info.writes else "yes" if info.writable else "-")
        for info in every
    )  # fmt: skip
    show_records(every, style, ("=format", "files", ">reads", ">writes"), rows, _codecs_of(every))


def _show_matrix(names: Sequence[str], style: str) -> None:
    """Print a symbol per ordered pair; for few codecs also the sentences."""
    tables = [matrix(names)] if names else [matrix(PACKINGS), matrix(FLOAT_PACKINGS)]
    if style == "json":
        as_json([row for found in tables for row in found.rows()])
        return
    for found in tables:
        _show_symbols(found)
    say("=  exact: equal codes, scales and zero points")
    say("~  equal codes; exact if the scales fit the target's dtype, else they are rounded")
    say("?  exact if zero points and the scale of the tensor allow, else impossible")
    say(".  impossible without --requantize")
    if not names or len(names) > _FEW:
        say("")
        say("Name a few codecs for the reasons: polyquant formats --matrix q4_0 gptq.4.g32 awq.4.g32")
        return
    say("")
    for pair in tables[0]:
        if pair.have != pair.want:
            for text in _wrapped(f"{pair.have} to {pair.want}: {pair.verdict}"):
                say(text)


def _show_symbols(found: Matrix) -> None:
    shown = list(dict.fromkeys(pair.have for pair in found))
    longest = max(map(len, shown))
    say(" " * longest + "   to " + " ".join(f"{i % 10}" for i in range(1, len(shown) + 1)))
    for i, have in enumerate(shown):
        line = found[i * len(shown) : (i + 1) * len(shown)]
        say(f"{have:{longest}} {i + 1:4} " + " ".join(pair.symbol for pair in line))
    say("")


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
