"""The panel of one tensor as lines of text: facts, statistics, a histogram of block characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from polyquant.errors import printable
from polyquant.integrations.tui.columns import dims
from polyquant.integrations.tui.listing import Line, Listing
from polyquant.tables import decibel, size

if TYPE_CHECKING:
    from polyquant.analysis.statistics import Statistics

__all__ = ["bars", "facts", "figures"]

_BLOCKS = " ▁▂▃▄▅▆▇█"
_NAME = 2000


def facts(listing: Listing, line: Line, width: int, parts: Sequence[str] = (), *, brief: bool = False) -> list[str]:
    """The name, type, shape and sizes of a tensor or a group. brief: leave out what the list shows."""
    some = [listing.entries[i] for i in line.members]
    name = wrap(printable(line.key, _NAME), max(8, width)) or [""]
    if len(name) > 3:
        name = [*name[:2], name[2][: width - 1] + "…"]
    if not line.leaf:
        sums = [
            f"{len(some):,} tensors",
            f"{sum(e.weights for e in some):,} weights",
            size(sum(e.nbytes for e in some)),
        ]
        kinds: dict[str, int] = {}
        for e in some:
            kinds[e.codec or e.b_codec] = kinds.get(e.codec or e.b_codec, 0) + 1
        listed = ", ".join(f"{codec} ({n:,})" for codec, n in sorted(kinds.items(), key=lambda item: -item[1])[:6])
        return [*name, *_items("", sums, width), *wrap(listed, width)]
    entry = some[0]
    out = name[:2] if brief else name
    if not entry.alone:
        share = f"{entry.nbytes / max(1, listing.nbytes):.2%} of all tensors"
        words = _stored(entry.shape, entry.codec, entry.nbytes, brief) + ([] if brief else [share])
        out += _items("A: " if listing.two else "", words, width)
    if entry.b_shape is not None:
        out += _items("B: ", _stored(entry.b_shape, entry.b_codec, entry.b_nbytes, brief), width)
    if entry.name in listing.errors:
        found = listing.errors[entry.name]
        words = [f"SNR {decibel(found.snr)}", f"cosine {found.cosine:.6f}", f"largest error {found.worst:.4g}"]
        words += [] if found.equal_codes is None else [f"equal codes {found.equal_codes:.2%}"]
        out += _items("B - A: ", words[:2] if brief else words, width)
    return out if brief else out + [line for part in parts[:3] for line in wrap(f"part {printable(part)}", width)]


def _items(label: str, words: Sequence[str], width: int) -> list[str]:
    """Join words by dots in lines that break only between words; the first line starts with a label."""
    lines = [label + words[0]]
    for word in words[1:]:
        longer = f"{lines[-1]} · {word}"
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(" " * len(label) + word)
    return lines


def _stored(shape: Sequence[int], codec: str, nbytes: int, brief: bool) -> list[str]:
    weights = math.prod(shape)
    bits = f"{8 * nbytes / weights:.3f} bits per weight" if weights else "no weights"
    return (
        [dims(shape), codec, size(nbytes)]
        if brief
        else [dims(shape), codec, f"{weights:,} weights", size(nbytes), bits]
    )


def figures(found: Statistics) -> list[str]:
    """The statistics of a tensor, one per line."""
    read = f"sample of {found.values:,} values" if found.is_sample else f"all {found.values:,} values"
    out = [
        read,
        f"min {found.smallest:.4g}  max {found.largest:.4g}",
        f"mean {found.mean:.3g}  std {found.deviation:.4g}",
        f"zeros {found.zeros:.2%}  beyond 6 std {found.outliers:.3%}",
    ]
    if found.invalid:
        out.append(f"NaN or infinite: {found.invalid:,}")
    if found.codes is not None:
        out.append("codes -1, 0, +1: " + ", ".join(f"{n / max(1, sum(found.codes)):.1%}" for n in found.codes))
    return out


def bars(found: Statistics, height: int) -> list[str]:
    """The histogram in `height` lines of block characters, and its axis."""
    highest = max(found.counts) or 1
    tops = [round(8 * height * n / highest) or (n > 0) for n in found.counts]  # a count above zero is always visible
    lines = ["".join(_BLOCKS[max(0, min(8, top - 8 * level))] for top in tops) for level in range(height - 1, -1, -1)]
    edge, width = f"{found.edge:.3g}", len(found.counts)
    axis = f"-{edge}" + "0".center(width - 2 * len(edge) - 1) + edge
    return [*lines, axis]
