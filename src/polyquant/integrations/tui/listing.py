"""The tensors of one model, or of two side by side: searching, filtering, sorting, and the tree of their names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from sys import intern
from typing import Any

from polyquant.no_collection import no_collection

__all__ = ["SORTS", "Entry", "Line", "Listing", "Measured", "matcher"]

_DIGITS = re.compile(r"(\d{1,18})")
_SEARCHED = 4096
"""Characters of a name that a regular expression is applied to: names may be as long as the file allows."""
_SPREAD = 200
"""Groups outside the layers are open at first if they have at most this many lines."""
_OPENED = 50
"""Maximum number of groups that are open at first."""
_FOUND = 40
"""Searches with at most this many results open their groups."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor as the headers describe it. b_*: the same tensor of the second model, None if that lacks it.

    alone: True if only the second model has it.
    """

    name: str
    shape: tuple[int, ...]
    codec: str
    nbytes: int
    b_shape: tuple[int, ...] | None = None
    b_codec: str = ""
    b_nbytes: int = 0
    alone: bool = False

    @property
    def weights(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def comparable(self) -> bool:
        """True if both models have it, with equal shapes."""
        return not self.alone and self.b_shape == self.shape


@dataclass(frozen=True, slots=True)
class Measured:
    """Errors of the second model's tensor against the first's."""

    snr: float
    cosine: float
    worst: float
    equal_codes: float | None


@dataclass(slots=True)
class Line:
    """One visible row: a tensor (leaf), or a group of tensors whose names share a prefix of `used` components."""

    depth: int
    label: str
    key: str
    members: Sequence[int]
    leaf: bool
    used: int = 0
    is_open: bool = False


def _natural(name: str) -> tuple[object, ...]:
    """A key that orders layer 10 after layer 2."""
    return tuple((1, int(p), "") if p.isdigit() and p.isascii() else (0, 0, p) for p in _DIGITS.split(name))


Key = Callable[["Listing", Entry], Any]

SORTS: dict[str, Key] = {
    "file order": lambda listing, e: 0,
    "name": lambda listing, e: _natural(e.name),
    "type": lambda listing, e: (e.codec, e.b_codec),
    "size": lambda listing, e: -e.nbytes,
    "weights": lambda listing, e: -e.weights,
    "bits per weight": lambda listing, e: -8 * e.nbytes / max(1, e.weights),
    "error": lambda listing, e: listing.snr(e),
}
"""Orders of the tensors. Sizes start with the largest, errors with the worst."""

_SUMMED: dict[str, Callable[[Entry], int]] = {"size": lambda e: e.nbytes, "weights": lambda e: e.weights}
"""Orders in which the sum of a group decides its place."""


def matcher(pattern: str) -> Callable[[str], bool]:
    """Return the test for a search: `re:` and a regular expression, a glob, or words that all occur.

    Raises ValueError for an invalid regular expression.
    """
    if pattern.startswith("re:"):
        try:
            search = re.compile(pattern[3:], re.IGNORECASE).search
        except (re.error, RecursionError, OverflowError) as problem:
            raise ValueError(f"not a regular expression: {problem}") from None
        return lambda name: search(name[:_SEARCHED]) is not None
    if any(c in pattern for c in "*?["):
        match = re.compile(translate(pattern), re.IGNORECASE).match
        return lambda name: match(name[:_SEARCHED]) is not None
    words = pattern.lower().split()
    return lambda name: all(word in name.lower() for word in words)


@dataclass(slots=True)
class Listing:
    """The entries of the models, and the selection that is shown.

    opened: the keys of the open groups, or with `inverted` of the closed ones. parts: the components of each name.
    summed: what orders the groups, by entry.
    """

    entries: tuple[Entry, ...]
    two: bool = False
    tree: bool = True
    sort: str = "file order"
    backwards: bool = False
    search: str = ""
    codec: str | None = None
    errors: dict[str, Measured] = field(default_factory=dict)
    opened: set[str] = field(default_factory=set)
    inverted: bool = False
    shown: list[int] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    nbytes: int = 0
    parts: list[tuple[str, ...]] = field(default_factory=list)
    summed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parts = [tuple(map(intern, e.name.split("."))) for e in self.entries]
        self.nbytes = sum(e.nbytes for e in self.entries if not e.alone)
        self.opened = set(self._first_groups())
        self.select()

    def snr(self, entry: Entry) -> float:
        """The measured signal-to-noise ratio; infinite if it is unknown, so that the worst come first."""
        found = self.errors.get(entry.name)
        return math.inf if found is None else -math.inf if math.isnan(found.snr) else found.snr

    def codecs(self) -> list[tuple[str, int, int]]:
        """(codec, tensors, bytes) of all entries, the largest first."""
        sums: dict[str, list[int]] = {}
        for e in self.entries:
            for codec, n in ((e.codec, e.nbytes), (e.b_codec, e.b_nbytes)) if self.two else ((e.codec, e.nbytes),):
                if codec:
                    one = sums.setdefault(codec, [0, 0])
                    one[0] += 1
                    one[1] += n
        return sorted(((c, n, size) for c, (n, size) in sums.items()), key=lambda item: -item[2])

    def select(self) -> None:
        """Apply the search, the filter and the order. Raises ValueError for an invalid search."""
        found: Iterable[int] = range(len(self.entries))
        if self.search:
            test = matcher(self.search)
            found = [i for i in found if test(self.entries[i].name)]
        if self.codec is not None:
            found = [i for i in found if self.codec in (self.entries[i].codec, self.entries[i].b_codec)]
        key = SORTS[self.sort]
        self.summed = [*map(_SUMMED[self.sort], self.entries)] if self.sort in _SUMMED else []
        self.shown = list(found)
        if self.sort != "file order":
            self.shown.sort(key=lambda i: key(self, self.entries[i]), reverse=self.backwards)
        elif self.backwards:
            self.shown.reverse()
        self.fold()

    @no_collection()
    def fold(self) -> None:
        """Recompute the visible lines, after a group was opened or closed."""
        if self.tree:
            self.lines = list(self._under(self.shown, expand=bool(self.search) and len(self.shown) <= _FOUND))
        else:
            self.lines = [Line(0, self.entries[i].name, self.entries[i].name, (i,), leaf=True) for i in self.shown]

    def toggle(self, line: Line) -> None:
        """Open or close a group."""
        self.opened ^= {line.key}
        self.fold()

    def open_all(self, is_open: bool) -> None:
        """Open or close all groups."""
        self.opened, self.inverted = set(), is_open
        self.fold()

    def _first_groups(self) -> Iterable[str]:
        """The groups that are open at first: those outside the layers."""
        pending, count = list(self._children(range(len(self.entries)), 0, 0)), 0
        while pending and count < _OPENED:
            line = pending.pop(0)
            if line.leaf or any(c.isdigit() for c in line.label):
                continue
            below = list(self._children(line.members, line.used, 0))
            if len(below) <= _SPREAD:
                yield line.key
                count += 1
                pending += below

    def _under(self, members: Sequence[int], *, expand: bool) -> Iterator[Line]:
        """The visible lines of these entries; expand: all groups are open."""
        stack = [iter(self._children(members, 0, 0))]
        while stack:  # not recursive: names may have thousands of components
            line = next(stack[-1], None)
            if line is None:
                stack.pop()
                continue
            line.is_open = not line.leaf and (expand or (line.key in self.opened) != self.inverted)
            yield line
            if line.is_open:
                stack.append(iter(self._children(line.members, line.used, line.depth + 1)))

    def _children(self, members: Sequence[int], used: int, depth: int) -> Iterator[Line]:
        """Group entries by the component after the first `used` ones; components shared by a whole group are joined."""
        groups: dict[str | None, list[int]] = {}
        for i in members:
            parts = self.parts[i]  # a name may end here: then it is the prefix of its group, and the only such name
            groups.setdefault(parts[used] if len(parts) > used else None, []).append(i)
        found = list(groups.values())
        if self.sort in _SUMMED and len(found) > 1:
            found.sort(key=lambda some: sum(map(self.summed.__getitem__, some)), reverse=not self.backwards)
        for some in found:
            parts = self.parts[some[0]]
            if len(some) == 1:
                label = ".".join(parts[used:] or parts[-1:])
                yield Line(depth, label, self.entries[some[0]].name, some, leaf=True)
                continue
            shared = max(used + 1, self._shared(some))
            yield Line(depth, ".".join(parts[used:shared]), ".".join(parts[:shared]), some, leaf=False, used=shared)

    def _shared(self, some: Sequence[int]) -> int:
        """The number of components that these names share; each keeps at least its last one."""
        names = [self.parts[i] for i in some]
        first, last = min(names), max(names)
        shared = next((n for n, (x, y) in enumerate(zip(first, last, strict=False)) if x != y), len(first))
        return min(shared, min(map(len, names)) - 1)
