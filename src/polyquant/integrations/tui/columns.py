"""The columns of the tensor list, and the text of each cell. Names are escaped here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from polyquant.errors import printable
from polyquant.integrations.tui.listing import Entry, Line, Listing
from polyquant.tables import size

__all__ = ["Column", "cells", "columns_of", "dims", "fitted"]

_NAME = 400
"""Characters of a name in the list; the panel below shows more."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column. width: cells, 0 for the rest of the line. sort: the order that a click selects. keep: columns with a
    small number are dropped first if the screen is narrow. marked: the column that shows the order.
    """

    title: str
    width: int
    keep: int
    text: Callable[[Listing, Sequence[Entry]], str]
    right: bool = True
    sort: str = ""
    marked: bool = True


def dims(shape: Sequence[int]) -> str:
    """A shape: 4096x14336, "scalar" for none."""
    return "x".join(map(str, shape)) or "scalar"


def _types(pairs: Iterable[tuple[str, int]]) -> str:
    """The type with most bytes, and the number of others."""
    sums: dict[str, int] = {}
    for codec, nbytes in pairs:
        if codec:
            sums[codec] = sums.get(codec, 0) + nbytes
    if not sums:
        return ""
    more = f" +{len(sums) - 1}" if len(sums) > 1 else ""
    return max(sums, key=sums.__getitem__) + more


def _bpw(nbytes: int, weights: int) -> str:
    return f"{8 * nbytes / weights:.2f}" if weights else "-"


def _share(listing: Listing, some: Sequence[Entry]) -> str:
    part = sum(e.nbytes for e in some if not e.alone) / max(1, listing.nbytes)
    return f"{part:.1%}" if part >= 0.0005 or not part else "<0.1%"


def _shapes(some: Sequence[Entry], second: bool = False) -> str:
    if len(some) > 1:
        return f"{len(some):,} tensors"
    if some[0].b_shape is not None and some[0].b_shape != some[0].shape and second:
        return f"{dims(some[0].shape)} / {dims(some[0].b_shape)}"
    return dims(some[0].shape)


def _worst(listing: Listing, some: Sequence[Entry]) -> tuple[Entry, float] | None:
    known = [(e, listing.snr(e)) for e in some if e.name in listing.errors]
    return min(known, key=lambda pair: pair[1]) if known else None


def _snr(listing: Listing, some: Sequence[Entry]) -> str:
    if len(some) == 1 and not some[0].comparable:
        return "only B" if some[0].alone else "only A" if some[0].b_shape is None else "shapes"
    found = _worst(listing, some)
    return (
        "" if found is None else "exact" if found[1] == math.inf else "-" if math.isinf(found[1]) else f"{found[1]:.1f}"
    )


def _cosine(listing: Listing, some: Sequence[Entry]) -> str:
    found = _worst(listing, some)
    return "" if found is None else f"{listing.errors[found[0].name].cosine:.6f}"


def _largest(listing: Listing, some: Sequence[Entry]) -> str:
    known = [listing.errors[e.name].worst for e in some if e.name in listing.errors]
    return f"{max(known):.3g}" if known else ""


def _equal(listing: Listing, some: Sequence[Entry]) -> str:
    known = [listing.errors[e.name].equal_codes for e in some if e.name in listing.errors]
    shares = [share for share in known if share is not None]
    return f"{min(shares):.1%}" if shares else ""


def columns_of(listing: Listing) -> tuple[Column, ...]:
    """All columns of a list."""
    longest = max((len(c) for c, _, _ in listing.codecs()), default=4)
    kind = min(longest + 3, 16)
    name = Column("tensor", 0, 99, lambda listing, some: "", right=False, sort="name")
    shape = Column("shape", 14, 5, lambda listing, some: _shapes(some, listing.two), right=False, sort="weights")
    if not listing.two:
        return (
            name,
            shape,
            Column(
                "type", kind, 9, lambda listing, some: _types((e.codec, e.nbytes) for e in some), right=False,
                sort="type",
            ),
            Column(
                "bits/w", 6, 3, lambda listing, some: _bpw(sum(e.nbytes for e in some), sum(e.weights for e in some)),
                sort="bits per weight",
            ),
            Column("size", 10, 8, lambda listing, some: size(sum(e.nbytes for e in some)), sort="size"),
            Column("share", 6, 6, _share, sort="size", marked=False),
        )  # fmt: skip
    return (
        name,
        shape,
        Column("A", kind, 8, lambda listing, some: _types((e.codec, e.nbytes) for e in some), right=False, sort="type"),
        Column(
            "B",
            kind,
            8,
            lambda listing, some: _types((e.b_codec, e.b_nbytes) for e in some),
            right=False,
            sort="type",
            marked=False,
        ),
        Column("size A", 10, 4, lambda listing, some: size(sum(e.nbytes for e in some)), sort="size"),
        Column("size B", 10, 6, lambda listing, some: size(sum(e.b_nbytes for e in some)), sort="size", marked=False),
        Column("SNR dB", 7, 9, _snr, sort="error"),
        Column("cosine", 8, 5, _cosine, sort="error", marked=False),
        Column("max err", 8, 3, _largest, sort="error", marked=False),
        Column("equal", 6, 2, _equal, sort="error", marked=False),
    )


def fitted(columns: Sequence[Column], width: int, least: int = 26) -> list[tuple[Column, int]]:
    """The columns that fit into `width`, with their widths: the first gets the rest, at least `least`."""
    kept = list(columns)
    while len(kept) > 1 and width - sum(c.width + 2 for c in kept if c.width) < least:
        kept.remove(min(kept, key=lambda c: c.keep))
    rest = max(1, width - sum(c.width + 2 for c in kept if c.width))
    return [(c, c.width or rest) for c in kept]


def cells(listing: Listing, line: Line, columns: Sequence[tuple[Column, int]]) -> list[str]:
    """The cells of a line."""
    some = [listing.entries[i] for i in line.members]
    mark = "  " if line.leaf else "▾ " if line.is_open else "▸ "
    indent = min(2 * line.depth, 24) if listing.tree else 0
    label = " " * indent + (mark if listing.tree else "") + printable(line.label, _NAME)
    return [label, *(column.text(listing, some) for column, _ in columns[1:])]
