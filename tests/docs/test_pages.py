"""The numbers in docs/ are those of the code, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from polyquant import codec
from polyquant.cli import COMMANDS
from polyquant.codecs.tl import TILES
from polyquant.formats.gguf.dialect import TYPES
from polyquant.registry import format_named
from polyquant.storage import limits

DOCS = Path(__file__).resolve().parents[2] / "docs"
GGUF = (DOCS / "formats" / "gguf.md").read_text(encoding="utf-8")
TERNARY = (DOCS / "formats" / "ternary.md").read_text(encoding="utf-8")


def test_table_of_types_equals_the_code():
    rows = re.findall(
        r"^\| (\d+) \| `(\w+)` \| (\d+) \| (\d+) \| ([\d.]+) \| [^|]+ \| (yes|no) \| ([^|]+) \|$", GGUF, re.M
    )
    said = {int(i): (name, int(block), int(size)) for i, name, block, size, *_ in rows}
    assert said == {i: (t.codec, t.block, t.nbytes) for i, t in TYPES["mainline"].items()}
    for _, name, block, size, bpw, written, swapped in rows:
        assert float(bpw) == 8 * int(size) / int(block)
        found = codec(name)
        kept = getattr(found, "encode", True) is not None and format_named("gguf").writes(found)
        assert (written == "yes") == kept, name
        assert (swapped == "none") == (not found.fields), name


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("metadata keys | {}", limits.GGUF_KEYS),
        ("bytes of a key | {}", limits.GGUF_KEY_BYTES),
        ("tensors | {}", limits.GGUF_TENSORS),
        ("bytes of a tensor name | {}", limits.GGUF_NAME_BYTES),
        ("dimensions | {}", limits.GGUF_DIMENSIONS),
        ("files of a split model | {}", limits.GGUF_SPLIT_FILES),
        ("number of nested arrays | 4; {}", limits.GGUF_NESTED_ARRAYS),
        ("string value | {} MiB", limits.GGUF_STRING_BYTES >> 20),
    ],
)
def test_limits_of_gguf(text, value):
    assert text.format(f"{value:,}") in GGUF


def test_sizes_of_ternary_layouts():
    rows = re.findall(r"^\| `([\w.]+)` \| .* \| ([\d,]+) \|$", TERNARY, re.M)
    assert len(rows) == 11
    for name, size in rows:
        assert int(size.replace(",", "")) == sum(a.nbytes for a in codec(name).specs((4096, 4096)).values()), name


def test_tiles_of_known_models():
    rows = re.findall(r"^\| (\d+) x (\d+) \| (\d+), (\d+), (\d+) \| (\d+), (\d+), (\d+) \|", TERNARY, re.M)
    numbers = [tuple(map(int, r)) for r in rows]
    assert {n[:2]: (n[2:5], n[5:]) for n in numbers} == TILES


def test_every_command_has_a_section():
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^## (\w+)$", page, re.M)) == set(COMMANDS)


IN_THE_SITE_ONLY = "generated/"
"""Pages that scripts/site_pages.py writes while the site is built."""
PAGES = [p for p in (*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")) if "generated" not in p.parts]


def anchors(page):
    """The anchors that code hosts give to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    plain = (re.sub(r"[^\w\s-]", "", h.strip().lower()) for h in re.findall(r"^#+ (.*)$", text, re.M))
    return {re.sub(r"\s", "-", h) for h in plain}


def test_every_page_is_in_the_contents():
    """Those of the site are index.md and the README of a folder (docs/conf.py), those of the files docs/README.md."""
    contents = (DOCS / "index.md").read_text(encoding="utf-8").splitlines()
    pages = {page.relative_to(DOCS) for page in PAGES if page.is_relative_to(DOCS)}
    pages -= {Path("index.md"), Path("README.md")}
    listed = {page for page in pages if page.with_suffix("").as_posix() in contents}
    assert {page for page in pages - listed if (page.parent / "README.md") not in listed} == set()
    linked = re.findall(r"\]\(([^)#:]+)", (DOCS / "README.md").read_text(encoding="utf-8"))
    assert {page.as_posix() for page in listed} <= set(linked)


def test_links_resolve():
    known = {page.resolve(): anchors(page) for page in PAGES}
    dead = []
    for page in PAGES:
        for path, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
            if path.startswith(IN_THE_SITE_ONLY):
                continue
            target = (page.parent / path).resolve() if path else page.resolve()
            if not target.exists() or (anchor and target in known and anchor not in known[target]):
                dead.append(f"{page.relative_to(DOCS.parent)}: {path}#{anchor}")
    assert not dead
