"""polyquant inspect"""

from __future__ import annotations

from itertools import islice

import click

from polyquant.analysis.inspect import Inspection, shown
from polyquant.analysis.inspect import inspect as run
from polyquant.analysis.layer_table import LayerTable
from polyquant.cli.console import as_json, json_option, size, table
from polyquant.cli.option_flags import source_option
from polyquant.cli.terminal import say, say_some, styled, width
from polyquant.errors import printable

MOST_KEYS = 200
"""Metadata entries that people are shown; real files have under 100."""


@click.command(
    epilog="""\b
Examples:
  polyquant inspect model.gguf
  polyquant inspect hf-folder/ --tensors '*attn_q*'
  polyquant inspect model.gguf --format json | jq .bpw""",
)
@click.argument("path", type=click.Path())
@click.option("--tensors", metavar="GLOB", help="List tensors whose names match, one a line.")
@click.option("--metadata/--no-metadata", default=True, help="Show the key/value metadata too.")
@source_option("ternary_layout")
@json_option
def inspect(path: str, tensors: str | None, metadata: bool, ternary_layout: str | None, style: str) -> None:
    """What is in PATH (a GGUF file, a Hugging Face, Trellis or msModelSlim folder). Reads headers only."""
    found = run(path, tensors=tensors, ternary_layout=ternary_layout)
    if style == "json":
        as_json(found.to_json())
        return
    _summary(found)
    if metadata and tensors is None and found.metadata:
        _metadata(found)
    if found.layers is not None:
        _layers(found.layers)
    if tensors is None:
        _tree(found)
    else:
        _list(found)
    say_some(found.notes, "note: ")


def _summary(found: Inspection) -> None:
    lines = {
        "file": printable(found.path),
        "format": f"{found.format} ({printable(found.why)})",
        "dialect": printable(found.dialect),
        "model": printable(found.architecture),
        "weights": f"{found.weights:,} in {len(found.tensors)} tensors",
        "size": f"{size(found.nbytes)} of tensors, {found.bpw:.3f} effective bits per weight",
        "types": ", ".join(f"{c} {n / max(1, found.weights):.1%}" for c, n in found.codecs.items()),
    }
    for key, text in lines.items():
        if text:
            say(styled(f"{key:8}", bold=True), f" {text}")


def _metadata(found: Inspection) -> None:
    say()
    for key in islice(found.metadata, MOST_KEYS):
        value = shown(found.metadata[key], 4)
        text = f"{value['length']:,} entries, {value['first']}…" if isinstance(value, dict) else str(value)
        line = f"  {printable(key):44} {printable(text, 400)}"
        say(line if len(line) < width() else line[: width() - 2] + "…")
    if len(found.metadata) > MOST_KEYS:
        say(f"  … {len(found.metadata) - MOST_KEYS:,} more; --format json shows all")


def _layers(found: LayerTable) -> None:
    """A line for layers that are alike. The one long word of the format is shortened, so that seven of them fit."""
    say()
    t = table("layers", *found.columns)
    for numbers, words in found.rows:
        t.add_row(numbers, *(w.replace("_DYNAMIC", "_DYN") or "-" for w in words))
    t.show()


def _tree(found: Inspection) -> None:
    say()
    t = table("tensor", ">n", "shape", "codec", ">bpw", ">size")
    for g in found.groups:
        shape = "x".join(map(str, g.shapes[0])) + ("…" if len(g.shapes) > 1 else "")
        t.add_row(printable(g.pattern), str(g.count), shape, g.codec, f"{g.bpw:.2f}", size(g.nbytes))
    t.show()


def _list(found: Inspection) -> None:
    say()
    t = table("tensor", "shape", "codec", ">bpw", ">size")
    for w in found.tensors:
        t.add_row(printable(w.name), "x".join(map(str, w.shape)), str(w.codec), f"{w.bpw:.2f}", size(w.nbytes))
    t.show()
