"""The numbers in docs/formats/trellis.md are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from polyquant import codec
from polyquant.formats.trellis.codes import CODES
from polyquant.ops.trellis import CODEBOOKS

PAGE = (Path(__file__).resolve().parents[2] / "docs/formats/trellis.md").read_text(encoding="utf-8")


def test_sizes():
    rows = re.findall(r"^\| (\d) \| ([\d,]+) \(([\d.]+)\) \| ([\d,]+) \(([\d.]+)\) \|$", PAGE, re.M)
    assert len(rows) == 4
    for bits, *figures in rows:
        for name, size, bpw in ((f"trellis.{bits}", *figures[:2]), (f"trellis.{bits}.mul1.14.flat", *figures[2:])):
            nbytes = sum(s.nbytes for s in codec(name).specs((14336, 4096)).values())
            assert (f"{nbytes:,}", f"{8 * nbytes / (14336 * 4096):.3f}") == (size, bpw)


def test_codebooks_and_codes_exist():
    assert set(re.findall(r"^\| `(\w+)` \| k", PAGE, re.M)) == set(CODEBOOKS)
    assert set(re.findall(r"TRL\d{3}", PAGE)) <= set(CODES)


def test_names_of_codecs():
    for name in re.findall(r"(?:exl3|trellis)\.\d[\w.]*", PAGE):
        assert codec(name).name == name
