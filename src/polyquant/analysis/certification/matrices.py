"""Explain a wrong matrix or stack: sample the rows beyond the bound, and try each known mistake on them.

The sample is restricted to the columns beyond the bound, so that a block or a tile is found in a row that is right
elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyquant.analysis.certification.cause import Cause
from polyquant.analysis.certification.matching import Match, cosines, find_rows, transposed_rows
from polyquant.analysis.certification.rereading import misread
from polyquant.analysis.certification.scan import Scan
from polyquant.analysis.certification.vectors import head_orders, row_order
from polyquant.analysis.side import Reader, Side
from polyquant.analysis.statistics import median
from polyquant.architectures.hyper import Hyper
from polyquant.ops.metrics import unit_errors
from polyquant.types import F32, as_matrix

__all__ = ["counterpart", "explain_matrix", "layer_of", "spans"]

_SAMPLE = 64
_SEARCHED = 1 << 28
"""Weights of other tensors that are searched for the rows of one tensor."""
_LAYER = re.compile(r"(?:^|\.)(?:blk|layers|layer|h|blocks)\.(\d{1,5})\.")
_GATED = re.compile(r"gate|up|w1|w3|fc1|h_to_4h|Wi|c_fc|input_linear")
_OPPOSITE = {"gate": "up", "up": "gate", "w1": "w3", "w3": "w1"}
_ATTENTION = re.compile(r"attn|attention|qkv|[qkv]_proj|query|key|value")


@dataclass(frozen=True, slots=True)
class _Sample:
    """Rows beyond the bound, in the columns beyond it: expected and stored values [n, columns].

    whole: all rows of the tensor, in all columns, are beyond the bound. least: cosine of two rows that are equal up to
    the codec's error.
    """

    rows: list[int]
    columns: NDArray[np.int64]
    expected: F32
    stored: F32
    whole: bool
    all_columns: bool
    least: float
    place: str


def explain_matrix(
    name: str, expected: Side, actual: Side, found: Scan, others: Mapping[str, Side], hyper: Hyper | None
) -> Cause:
    """The most likely cause of a wrong matrix or stack of matrices. others: the expected tensors."""
    sample = _sampled(expected, actual, found)
    whole_rows = Reader(expected).picked(sample.rows)
    wrong = median(cosines(Reader(actual).picked(sample.rows), whole_rows)) < sample.least
    if sample.whole and wrong and (cause := misread(actual, whole_rows, sample.rows, sample.least)) is not None:
        return cause
    if not np.isfinite(sample.stored).all():
        return Cause("CER004", f"{sample.place}: {_bad(sample.stored)} of {sample.stored.size} values checked are "
                     "NaN or infinite")  # fmt: skip
    if not sample.stored.any():
        return Cause("CER020", f"{sample.place} are zero")
    for attempt in (_direction, _within, _transposed, _elsewhere):
        if (cause := attempt(name, sample, expected, found, others, hyper)) is not None:
            return cause
    return Cause("CER010", f"{sample.place}: the relative error is {found.error:.3g} over the tensor, up to "
                 f"{found.worst:.3g} in a block; the bound is {found.bound.unit:.2g}")  # fmt: skip


def _bad(x: F32) -> int:
    return int((~np.isfinite(x)).sum())


def _sampled(expected: Side, actual: Side, found: Scan) -> _Sample:
    rows = as_matrix(expected.shape)[0]
    n = expected.shape[-2] if len(expected.shape) > 2 else rows
    first = list({r // n: i for i, r in reversed(list(enumerate(found.rows)))}.values())[:_SAMPLE]
    spread = np.linspace(0, len(found.rows) - 1, min(len(found.rows), _SAMPLE)).astype(int).tolist()
    index = sorted({*first, *spread})
    mask = np.any([found.columns[i] for i in index], axis=0)
    columns = np.flatnonzero(np.repeat(mask, found.unit))
    index = [i for i in index if found.columns[i].any()]
    picked = [found.rows[i] for i in index]
    every = bool(mask.all())
    x, y = Reader(expected).picked(picked)[:, columns], Reader(actual).picked(picked)[:, columns]
    narrow = _narrowed(x, y, found)
    if narrow is not None:
        columns, x, y, every = columns[narrow], x[:, narrow], y[:, narrow], False
    typical = min(found.bound.typical, 0.9)
    place = f"rows {spans(found.rows)}" + ("" if every else f", columns {spans(columns.tolist())}")
    whole = every and len(found.rows) >= min(0.9 * rows, 1 << 14)
    return _Sample(picked, columns, x, y, whole, every, 0.85 * float(np.sqrt(1 - typical**2)), place)


def _narrowed(x: F32, y: F32, found: Scan) -> NDArray[np.int64] | None:
    """The columns beyond the bound, in pieces of 32 (or 16), if they are at most half of the columns."""
    width = 32 if found.unit % 32 == 0 and x.shape[1] > 32 else 16
    if found.unit % width or x.shape[1] <= width or not np.isfinite(y).all():
        return None
    sums = unit_errors(x, y, width).sum(1)  # over the sampled rows: [4, pieces]
    limit = found.bound.unit**2 * np.maximum(sums[0], sums[0].mean()) + width * len(x) * found.bound.floor**2
    beyond = sums[3] > limit
    if not beyond.any() or beyond.mean() > 0.5:
        return None
    return np.flatnonzero(np.repeat(beyond, width))


def spans(rows: Iterable[int]) -> str:
    """Ascending numbers as spans: "3 to 7, 12 and 4 more"."""
    out: list[list[int]] = []
    for r in rows:
        if out and r == out[-1][1] + 1:
            out[-1][1] = r
        else:
            out.append([r, r])
    shown = ", ".join(f"{a} to {b}" if b > a else str(a) for a, b in out[:3])
    return shown + (f" and {sum(b - a + 1 for a, b in out[3:])} more" if len(out) > 3 else "")


def _direction(name: str, s: _Sample, expected: Side, found: Scan, *_: object) -> Cause | None:
    """Rows with the right direction: the wrong sign, size or precision."""
    like = median(cosines(s.stored, s.expected))
    if (~s.stored.any(1)).mean() > 0.9:
        return Cause("CER020", f"{s.place} are zero")
    if like <= -s.least:
        return Cause("CER021", f"{s.place} have the opposite sign")
    return _partly(s) if 0.3 * s.least < like < s.least else _size(s, found) if like >= s.least else None


def _size(s: _Sample, found: Scan) -> Cause | None:
    """Rows that are multiplied, or less precise than the codec."""
    gains = np.einsum("nk,nk->n", s.stored, s.expected) / np.einsum("nk,nk->n", s.expected, s.expected)
    gain = median(gains) / found.bound.gain
    rest = float(np.linalg.norm(s.stored - gains[:, None] * s.expected) / np.linalg.norm(s.expected))
    if abs(gain - 1) > max(0.04, min(found.bound.slack, 0.3), 0 if found.bound.cosine else rest):
        return Cause("CER022", f"{s.place} are multiplied by {gain:.3g}")
    if not s.whole and (cause := _partly(s)) is not None:
        return cause
    if found.error < 0.5:
        return Cause("CER024", f"the relative error is {found.error:.3g}, and "
                     f"{found.bound.typical or found.bound.unit:.2g} is typical of this codec")  # fmt: skip
    return None


def _partly(s: _Sample) -> Cause | None:
    """A part of each row that is zero or negated while the rest is right."""
    off = np.abs(s.stored - s.expected) > 0.5 * np.abs(s.expected)
    off &= np.abs(s.expected) > 0.3 * np.abs(s.expected).mean()
    if not off.any() or off.mean() > 0.9:
        return None
    zero = ~s.stored[off].any()
    if zero and off.sum() >= 4 and (s.stored == 0).mean() > 1.5 * (s.expected == 0).mean():
        columns = s.columns[np.flatnonzero(off.any(0))]
        return Cause("CER020", f"rows {spans(s.rows)}, columns {spans(columns.tolist())} are zero")
    if off.sum() >= 4 and float(cosines(s.stored[off][None], s.expected[off][None])[0]) < -0.8:
        return Cause("CER021", f"{s.place}: {int(off.sum())} values checked have the opposite sign")
    return None


def _within(
    name: str, s: _Sample, expected: Side, found: Scan, others: Mapping[str, Side], hyper: Hyper | None
) -> Cause | None:
    """Rows of the same tensor in a different order."""
    match = find_rows(s.stored, expected, s.columns)
    good = (match.cosine >= s.least) & (match.rows != np.array(s.rows))
    if good.mean() < 0.6:
        return None
    rows = [r for r, g in zip(s.rows, good, strict=True) if g]
    held = [int(m) for m, g in zip(match.rows, good, strict=True) if g]
    if not s.all_columns:
        return Cause("CER019", f"{s.place} hold rows {spans(sorted(held))} of the same tensor")
    return _ordered(name, rows, held, expected, hyper)


def _ordered(name: str, rows: list[int], held: list[int], side: Side, hyper: Hyper | None) -> Cause:
    """Name the order of rows: rows[i] holds row held[i]."""
    n = side.shape[-2]
    r, m = np.array(rows), np.array(held)
    if len(side.shape) > 2 and bool(((m - r) % n == 0).all()):
        return _experts({int(a): int(b) for a, b in zip(r // n, m // n, strict=True) if a != b})
    for what, order in head_orders(as_matrix(side.shape)[0], hyper):
        if bool((order[r] == m).all()):
            return Cause("CER015", what)
    if _GATED.search(name) and n % 2 == 0 and (cause := _halves(r, m, n)) is not None:
        return cause
    size = hyper.head_size if hyper is not None else 0
    if size > 1 and n % size == 0 and n > size and _ATTENTION.search(name) and bool(((m - r) % size == 0).all()):
        heads = {int(a): int(b) for a, b in zip(r // size, m // size, strict=True)}
        shown = ", ".join(f"{a} holds {b}" for a, b in list(heads.items())[:6])
        return Cause("CER016", f"heads of {size} rows are in another order: {shown}")
    cause = row_order(held, rows, total=as_matrix(side.shape)[0])
    return Cause(cause.code, f"{cause.message}: experts get the scores of others") if _is_router(name) else cause


def _halves(r: NDArray[np.int64], m: NDArray[np.int64], n: int) -> Cause | None:
    """The halves of a matrix that holds gate and up, one after the other or interleaved."""
    if not bool((r // n == m // n).all()):
        return None
    if bool(((m - r) % n == n // 2).all()):
        return Cause("CER013", "the halves of its rows are exchanged")
    return Cause("CER013", "even and odd rows are exchanged") if bool((m == r ^ 1).all()) and len(r) > 2 else None


def _is_router(name: str) -> bool:
    return bool(re.search(r"ffn_gate_inp|router|mlp\.gate\.weight|block_sparse_moe\.gate", name))


def _experts(held: Mapping[int, int]) -> Cause:
    pairs = sorted({(min(a, b), max(a, b)) for a, b in held.items() if held.get(b) == a})
    if pairs and 2 * len(pairs) == len(held):
        shown = ", ".join(f"{a} and {b}" for a, b in pairs[:6])
        return Cause("CER011", f"experts {shown} are exchanged" + (", ..." if len(pairs) > 6 else ""))
    shown = ", ".join(f"{a} holds {b}" for a, b in sorted(held.items())[:6])
    return Cause("CER011", f"experts are in another order: {shown}" + (", ..." if len(held) > 6 else ""))


def _transposed(name: str, s: _Sample, expected: Side, *_: object) -> Cause | None:
    if not s.all_columns:
        return None
    like = transposed_rows(s.stored, expected, s.rows)
    if like is None or median(like) < s.least:
        return None
    return Cause("CER018", "the matrix is transposed" if s.whole else f"{s.place} are those of the transposed matrix")


# ---------------------------------------------------------------- other tensors


def layer_of(name: str) -> tuple[int, str]:
    """(layer, name without its number); (-1, name) outside the layers."""
    found = _LAYER.search(name)
    return (int(found[1]), name[: found.start(1)] + "*" + name[found.end(1) :]) if found else (-1, name)


def counterpart(a: str, b: str) -> bool:
    """True for the gate and the up projection of one layer."""
    if layer_of(a)[0] != layer_of(b)[0]:
        return False
    words, others = re.split(r"([._])", a), re.split(r"([._])", b)
    differing = [(x, y) for x, y in zip(words, others, strict=False) if x != y]
    return len(words) == len(others) and len(differing) == 1 and _OPPOSITE.get(differing[0][0]) == differing[0][1]


def _elsewhere(
    name: str, s: _Sample, expected: Side, found: Scan, others: Mapping[str, Side], hyper: Hyper | None
) -> Cause | None:
    """Rows of another tensor of the source."""
    k = as_matrix(expected.shape)[1]
    layer, stem = layer_of(name)

    def near(other: str) -> tuple[bool, bool, int]:
        index, kind = layer_of(other)
        return index != layer, kind != stem, abs(index - layer)

    names = [n for n, side in others.items() if n != name and as_matrix(side.shape)[1] == k and len(side.shape) > 1]
    names.sort(key=near)
    searched = 0
    for other in names[:256]:
        side = others[other]
        if max(s.rows) < as_matrix(side.shape)[0]:
            like = cosines(s.stored, Reader(side).picked(s.rows)[:, s.columns])
            if median(like) >= s.least:
                return _held(name, other, s, side.shape == expected.shape)
    for other in names[:64]:
        side = others[other]
        searched += as_matrix(side.shape)[0] * k
        if searched > _SEARCHED:
            break
        match: Match = find_rows(s.stored, side, s.columns)
        if median(match.cosine) >= s.least:
            held = spans(sorted({int(r) for r in match.rows}))
            code = "CER013" if s.all_columns and counterpart(name, other) else "CER019"
            return Cause(code, f"{s.place} hold rows {held} of {other}")
    return None


def _held(name: str, other: str, s: _Sample, same_shape: bool) -> Cause:
    if s.whole and same_shape:
        return Cause("CER012", f"holds the values of {other}", holds=other)
    code = "CER013" if s.all_columns and counterpart(name, other) else "CER019"
    return Cause(code, f"{s.place} hold the values of {other} at the same place")
