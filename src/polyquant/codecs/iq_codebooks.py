"""Codebooks of ggml's IQ1, IQ2 and IQ3 types, and the sign table.

An IQ1 or IQ2 codebook entry encodes 8 consecutive weights, an IQ3 entry for 4. Each value is one of a few levels, so
an entry is stored as `width` digits, each the index of a level, the first weight in the lowest bits:

    name     entries  width  bits  levels
    iq1         2048      8     2  -1 0 1
    iq2_xxs      256      8     2  8 25 43
    iq2_xs       512      8     2  8 25 43
    iq2_s       1024      8     2  8 25 43
    iq3_xxs      256      4     3  4 12 20 28 36 44 52 62
    iq3_s        512      4     3  1 3 5 7 9 11 13 15

`iq_codebooks.bin` holds the entries as little-endian u16, table after table in that order (9,216 bytes). Within a table
they are strictly increasing: a codebook is a subset of all digit strings. The digits of every iq2 and iq3_xxs entry add
up to an even number (the magnitudes are points of the lattices D8 and D4); iq1 and iq3_s follow no such rule, so they
need tables. The native kernels are built from the same file; scripts/make_iq_codebooks.py writes it.

Signs are stored separately from magnitudes. iq2_xxs, iq2_xs and iq3_xxs store 7 bits for 8 signs: the eighth makes the
number of minus signs even (SIGNS). Source: ggml-common.h of llama.cpp 0c1e570 (iq*_grid, ksigns_iq2xs), whose iq2 and
iq3 tables list the bytes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from polyquant.types import I8

__all__ = ["CODEBOOKS", "FILE", "SIGNS", "Codebook", "codebook"]

FILE = Path(__file__).with_suffix(".bin")


class Codebook(NamedTuple):
    """Size and levels of one table."""

    entries: int
    width: int
    bits: int
    levels: tuple[int, ...]


CODEBOOKS = {
    "iq1": Codebook(2048, 8, 2, (-1, 0, 1)),
    "iq2_xxs": Codebook(256, 8, 2, (8, 25, 43)),
    "iq2_xs": Codebook(512, 8, 2, (8, 25, 43)),
    "iq2_s": Codebook(1024, 8, 2, (8, 25, 43)),
    "iq3_xxs": Codebook(256, 4, 3, (4, 12, 20, 28, 36, 44, 52, 62)),
    "iq3_s": Codebook(512, 4, 3, (1, 3, 5, 7, 9, 11, 13, 15)),
}

SIGNS = np.array([s | (s.bit_count() & 1) << 7 for s in range(128)], np.uint8)
"""[128]; bit j set: weight j is negative."""


@cache
def codebook(name: str) -> I8:
    """Return one table, int8 [entries, width]."""
    book = CODEBOOKS[name]
    names = list(CODEBOOKS)
    start = sum(CODEBOOKS[n].entries for n in names[: names.index(name)])
    packed = np.fromfile(FILE, "<u2", book.entries, offset=2 * start)
    digits = packed[:, None] >> (book.bits * np.arange(book.width)) & ((1 << book.bits) - 1)  # [entries, width]
    entries: I8 = np.array(book.levels, np.int8)[digits]
    return entries
