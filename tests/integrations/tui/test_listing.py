"""The tree of names, searching and sorting."""

from __future__ import annotations

import tracemalloc

import pytest

from polyquant.integrations.tui.columns import cells, columns_of, fitted
from polyquant.integrations.tui.listing import Entry, Listing, Measured, matcher


def listing(*names, **more):
    return Listing(tuple(Entry(name, (4, 8), "f32", 128) for name in names), **more)


def shape(found):
    return [(line.depth, line.label, line.leaf) for line in found.lines]


@pytest.mark.parametrize(
    "names",
    [
        ("a", "a.b", "a.a", "a.a.a"),
        ("a.a", "a", "a.a.a.a", "b."),
        ("", ".", "..", "...", "x"),
        ("a..b", "a..c", "a.", "a"),
        tuple("a" + ".a" * i for i in range(60)),
        ("a." * 4000 + "x", "a." * 4000 + "y", "a." * 3999 + "x"),
    ],
)
def test_every_tensor_is_a_leaf_once_all_groups_are_open(names):
    found = listing(*names)
    found.open_all(True)
    assert sorted(line.key for line in found.lines if line.leaf) == sorted(names)
    assert len({line.key for line in found.lines if not line.leaf}) == sum(not line.leaf for line in found.lines)
    found.open_all(False)
    assert sum(len(line.members) for line in found.lines) == len(names)


def test_shared_components_are_joined():
    found = listing(*(f"model.layers.{i}.mlp.{x}.weight" for i in range(3) for x in "ab"), "lm_head.weight")
    assert shape(found) == [
        (0, "model.layers", False), (1, "0.mlp", False), (1, "1.mlp", False), (1, "2.mlp", False),
        (0, "lm_head.weight", True),
    ]  # fmt: skip
    found.toggle(found.lines[2])
    assert shape(found)[3:5] == [(2, "a.weight", True), (2, "b.weight", True)]


def test_names_sort_by_number():
    found = listing(*(f"blk.{i}.w" for i in (10, 2, 1)), tree=False)
    found.sort = "name"
    found.select()
    assert [line.key for line in found.lines] == ["blk.1.w", "blk.2.w", "blk.10.w"]


def test_the_worst_come_first_and_unmeasured_last():
    found = listing("a", "b", "c", "d", tree=False)
    found.errors |= {
        "b": Measured(30.0, 1, 0, None),
        "d": Measured(float("nan"), 0, 0, None),
        "a": Measured(20.0, 1, 0, None),
    }
    found.sort = "error"
    found.select()
    assert [line.key for line in found.lines] == ["d", "a", "b", "c"]


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("attn q", "blk.0.ATTN_q.weight", True), ("attn q", "blk.0.attn_k.weight", False),
        ("*.attn_?.*", "blk.0.attn_q.weight", True), ("*[red]", "a[red]", False), ("", "x", True),
        (r"re:^blk\.[01]\.", "blk.1.x", True), (r"re:^blk\.[01]\.", "blk.2.x", False),
    ],
)  # fmt: skip
def test_patterns(pattern, name, matches):
    assert matcher(pattern)(name) is matches


@pytest.mark.parametrize("pattern", ["re:(", "re:" + "(" * 900, "re:a{99999999999}"])
def test_wrong_expressions(pattern):
    with pytest.raises(ValueError, match="not a regular expression"):
        matcher(pattern)


@pytest.mark.parametrize("width", [10, 40, 80, 120, 200])
@pytest.mark.parametrize("two", [False, True])
def test_columns_fit(width, two):
    found = listing("x" * 10_000, "[red]\x1b[2J\u202e", two=two)
    chosen = fitted(columns_of(found), width)
    assert sum(n for _, n in chosen) + 2 * (len(chosen) - 1) <= max(width, 1)
    for line in found.lines:
        texts = cells(found, line, chosen)
        assert len(texts) == len(chosen) and all(text.isprintable() and len(text) < 500 for text in texts)


def test_memory_per_tensor():
    """70,000 tensors with all groups open take less than 150 MB."""
    names = (f"model.layers.{i // 1150}.mlp.experts.{i // 3 % 384}.{i}.weight" for i in range(7_000))
    entries = tuple(Entry(name, (8, 8), "f16", 128) for name in names)
    tracemalloc.start()
    try:
        found = Listing(entries)
        found.open_all(True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len([line for line in found.lines if line.leaf]) == 7_000 and peak < 15 << 20
