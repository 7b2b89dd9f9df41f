"""Write docs/formats/README.md, the tables of formats and codecs, and docs/images/blocks-*.svg, maps of blocks.

PYTHONPATH=src python scripts/atlas_page.py        # needs the extra report

A map is made by the decoder itself: each bit of some random blocks is flipped, and the weights that change are counted.
"""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

import polyquant as pq
from polyquant import registry
from polyquant.analysis.catalogue import CodecInfo
from polyquant.analysis.report.charts import SCHEMA
from polyquant.analysis.report.drawing import svg
from polyquant.codecs.blocks import BlockCodec

__all__ = ["bit_classes", "files"]

ROOT = Path(__file__).resolve().parents[1]
UNUSED, ONE, SOME, GROUP, ALL = "no weight", "one weight", "2 to 8 weights", "a group: its scale", "the whole block"
COLORS = {ONE: "#4c8fe6", SOME: "#2fa084", GROUP: "#e8a13a", ALL: "#d5533f", UNUSED: "#9aa0a8"}
LEFT_OUT = ("q8_1", "q8_k")
"""Types of activations."""
CHARTS = {"blocks-small": (0, 64), "blocks-super": (64, 1000)}
"""Name of the picture -> weights per block, from and below."""
_PAGES = {"gguf": "gguf.md", "hf": "huggingface.md", "trellis-v3": "trellis.md", "msmodelslim": "msmodelslim.md"}
_SAMPLES = 32
_TEXT = "#7d858f"


def bit_classes(codec: BlockCodec) -> list[str]:
    """The class of each bit of a block, bit 0 of byte 0 first."""
    rng = np.random.default_rng(0)
    most = np.zeros(8 * codec.type_size, np.int64)
    for _ in range(_SAMPLES):
        block = rng.integers(0, 256, codec.type_size, dtype=np.uint8)
        flipped = np.repeat(block[None], 1 + len(most), 0)
        bits = np.arange(len(most))
        flipped[1 + bits, bits // 8] ^= (1 << bits % 8).astype(np.uint8)
        with np.errstate(all="ignore"):
            values = codec.decode(flipped)
        same = (values == values[0]) | (np.isnan(values) & np.isnan(values[0]))
        most = np.maximum(most, (~same[1:]).sum(1))
    return [_class(int(n), codec.block) for n in most]


def _class(weights: int, block: int) -> str:
    if weights <= 1:
        return ONE if weights else UNUSED
    if weights <= 8 < block:
        return SOME
    return GROUP if weights <= block // 2 else ALL


def _codecs(low: int, high: int) -> list[BlockCodec]:
    known = (registry.codec(name) for name in registry.CODECS)
    return [
        c
        for c in known
        if isinstance(c, BlockCodec) and low <= c.block < high and c.name not in LEFT_OUT and c.block > 1
    ]


def _spec(codecs: list[BlockCodec]) -> dict[str, Any]:
    """A strip for each codec: bytes from left to right, bits from top (7) to bottom (0)."""
    rows = []
    for codec in codecs:
        classes = bit_classes(codec)
        label = f"{codec.name}, {codec.block} in {codec.type_size}"
        for bit in range(8):
            begin = 0
            for kind, run in groupby(classes[bit::8]):
                end = begin + len(list(run))
                rows.append({"codec": label, "bit": bit, "from": begin, "to": end, "a change affects": kind})
                begin = end
    return {
        "$schema": SCHEMA,
        "data": {"values": rows},
        "background": None,
        "spacing": 9,
        "config": {
            "view": {"stroke": None},
            "axis": {"labelColor": _TEXT, "titleColor": _TEXT, "domainColor": _TEXT, "tickColor": _TEXT, "grid": False},
            "legend": {"labelColor": _TEXT, "titleColor": _TEXT, "orient": "top", "titleOrient": "left"},
            "header": {"labelColor": _TEXT, "labelAngle": 0, "labelAlign": "left", "title": None},
        },
        "facet": {"row": {"field": "codec", "sort": [f"{c.name}, {c.block} in {c.type_size}" for c in codecs]}},
        "spec": {
            "width": 560,
            "height": 32,
            "mark": {"type": "rect", "stroke": None},
            "encoding": {
                "x": {"field": "from", "type": "quantitative", "title": "byte of the block", "scale": {"nice": False}},
                "x2": {"field": "to"},
                "y": {"field": "bit", "type": "ordinal", "sort": "descending", "axis": None, "scale": {"padding": 0}},
                "color": {
                    "field": "a change affects", "type": "nominal",
                    "scale": {"domain": list(COLORS), "range": list(COLORS.values())},
                },
            },
        },
    }  # fmt: skip


def _table(rows: list[str], *columns: str) -> str:
    """A table of Markdown; columns that end with a colon are aligned to the right."""
    lines = (f"|{'---:' if c.endswith(':') else '---'}" for c in columns)
    return "\n".join((f"| {' | '.join(c.removesuffix(':') for c in columns)} |", f"{''.join(lines)}|", *rows))


def _formats() -> str:
    rows = []
    for form in pq.formats():
        if form.name in _PAGES:
            options = ", ".join(f"`{name}`" for name in form.options) or "-"
            numbers = f"{len(form.reads)} | {len(form.writes)}"
            rows.append(f"| [{form.name}]({_PAGES[form.name]}) | {form.files} | {numbers} | {options} |")
    return _table(rows, "format", "files", "codecs read:", "written:", "keywords of `polyquant.convert`")


def _row(c: CodecInfo) -> str:
    bits = "-" if c.bpw is None else f"{c.bpw:.4g}"
    written = "yes" if c.quantizes and c.written_by else "copied" if c.written_by else "no"
    return f"| `{c.name}` | {bits} | {c.form} | {c.block} | {', '.join(c.read_by)} | {written} |"


def _codec_tables() -> str:
    out = []
    for about, members in groupby(pq.codecs(), key=lambda c: c.about):
        rows = _table([*map(_row, members)], "codec", "bits per weight:", "form", "block:", "read from", "written")
        out.append(f"### {about[0].upper()}{about[1:]}\n\n{rows}")
    return "\n\n".join(out)


def files() -> dict[str, str]:
    """Path below docs -> text."""
    charts = {f"images/{name}.svg": svg(_spec(_codecs(*sizes))) for name, sizes in CHARTS.items()}
    page = f"""\
# Formats and codecs

A format is a kind of file or folder, a codec the bytes of one tensor. What happens to each codec
on the way from one format to another: [conversions between formats](../howto/README.md).

## Formats

{_formats()}

Ternary layouts (I2_S, TL1, TL2, packed BitNet) occur in GGUF and in Hugging Face folders: [ternary](ternary.md).
Forms of other tools in Hugging Face folders: [compressed-tensors](compressed-tensors.md), [GPTQ and
AWQ](gptq-awq.md), [FP8 and FP4](small-floats.md), [MLX](mlx.md), [bitsandbytes](bitsandbytes.md), [HQQ](hqq.md),
[torchao and Quark](torchao.md). [Which codes can be kept](matrix.md).

## Maps of blocks

What a bit does, found by flipping each bit of random blocks and decoding: blue bits are the code of one weight, green
bits select an entry of a codebook or its signs, yellow bits scale a group, red bits scale the whole block. Each strip
is one block; bytes go from left to right, bits from 7 (top) to 0. "32 in 18" means 32 weights in 18 bytes.

Blocks of 32 weights:

![Maps of the bits in small blocks: q4_0 has two red bytes, its scale, then blue codes](../images/blocks-small.svg)

Blocks of 64 weights and more:

![Maps of the bits in super-blocks: a red scale, yellow scales of groups, blue codes](../images/blocks-super.svg)

Trellis, affine and I2_S codecs have no blocks of fixed size: [Trellis](trellis.md), [msModelSlim](msmodelslim.md),
[ternary](ternary.md).

## Codecs

Bits per weight are those of a matrix [4096, 4096] with its scales. A block is the number of weights along a row that
share a scale or must divide it. Written: "copied" means that weights which have these codes keep them, but
none are made.

{_codec_tables()}
"""
    return {"formats/README.md": page, **charts}


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    out = parser.parse_args().out
    for name, text in files().items():
        (out / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
