"""polyquant inspect"""

from __future__ import annotations

from itertools import islice

import click

from polyquant.analysis.inspect import Inspection, shown
from polyquant.analysis.inspect import inspect as run
from polyquant.analysis.layer_table import LayerTable
from polyquant.cli.console import as_json, json_option, size, table
from polyquant.cli.option_flags import source_option
from polyquant.cli.source_type import SOURCE
from polyquant.cli.terminal import say, say_some, styled, width
from polyquant.errors import printable

MOST_KEYS = 200
"""Metadata entries shown in human-readable output; real files have under 100."""


@click.command(
    epilog="""\b
Examples:
  polyquant inspect model.gguf
  polyquant inspect hf-folder/ --tensors '*attn_q*'
  polyquant inspect hf://org/model@main               # fetches headers only
  polyquant inspect https://host/model.gguf
  polyquant inspect model.gguf --format json | jq .bpw""",
)
@click.argument("path", type=SOURCE)
@click.option("--tensors", metavar="GLOB", help="List tensors whose names match, one per line.")
@click.option("--metadata/--no-metadata", default=True, help="Show the key/value metadata.")
@source_option("ternary_layout")
@json_option
def inspect(path: str, tensors: str | None, metadata: bool, ternary_layout: str | None, style: str) -> None:
    """Show the contents of PATH (a GGUF file, a Hugging Face, Trellis or msModelSlim folder; a path, a URL, or a model
    in a store: ollama:NAME, oci:DIR:TAG). Reads headers only.
    """
    inspection = run(path, tensors=tensors, ternary_layout=ternary_layout)
    if style == "json":
        as_json(inspection.to_json())
        return
    _summary(inspection)
    if metadata and tensors is None and inspection.metadata:
        _metadata(inspection)
    if inspection.layers is not None:
        _layers(inspection.layers)
    if tensors is None:
        _tree(inspection)
    else:
        _list(inspection)
    say_some(inspection.notes, "note: ")


def _summary(inspection: Inspection) -> None:
    lines = {
        "file": printable(inspection.path),
        "format": f"{inspection.format} ({printable(inspection.why)})",
        "dialect": printable(inspection.dialect),
        "model": printable(inspection.architecture),
        "weights": f"{inspection.weights:,} in {len(inspection.tensors)} tensors",
        "size": f"{size(inspection.nbytes)} of tensors, {inspection.bpw:.3f} effective bits per weight",
        "types": ", ".join(f"{c} {n / max(1, inspection.weights):.1%}" for c, n in inspection.codecs.items()),
    }
    for key, text in lines.items():
        if text:
            say(styled(f"{key:8}", bold=True), f" {text}")
    for key, text in inspection.store.items():
        say(styled(f"{key:8}", bold=True), f" {printable(text)}")


def _metadata(inspection: Inspection) -> None:
    say()
    for key in islice(inspection.metadata, MOST_KEYS):
        value = shown(inspection.metadata[key], 4)
        text = f"{value['length']:,} entries, {value['first']}…" if isinstance(value, dict) else str(value)
        line = f"  {printable(key):44} {printable(text, 400)}"
        say(line if len(line) < width() else line[: width() - 2] + "…")
    if len(inspection.metadata) > MOST_KEYS:
        say(f"  … {len(inspection.metadata) - MOST_KEYS:,} more; --format json shows all")


def _layers(inspection: LayerTable) -> None:
    """One row per group of equal layers. "_DYNAMIC" is shortened so that seven columns fit."""
    say()
    t = table("layers", *inspection.columns)
    for numbers, types in inspection.rows:
        t.add_row(numbers, *(w.replace("_DYNAMIC", "_DYN") or "-" for w in types))
    t.show()


def _tree(inspection: Inspection) -> None:
    say()
    t = table("tensor", ">n", "shape", "codec", ">bpw", ">size")
    for g in inspection.groups:
        shape = "x".join(map(str, g.shapes[0])) + ("…" if len(g.shapes) > 1 else "")
        t.add_row(printable(g.pattern), str(g.count), shape, g.codec, f"{g.bpw:.2f}", size(g.nbytes))
    t.show()


def _list(inspection: Inspection) -> None:
    say()
    if not inspection.tensors:
        say("no tensor has a name that matches")
        return
    t = table("tensor", "shape", "codec", ">bpw", ">size")
    for w in inspection.tensors:
        t.add_row(printable(w.name), "x".join(map(str, w.shape)), str(w.codec), f"{w.bpw:.2f}", size(w.nbytes))
    t.show()
