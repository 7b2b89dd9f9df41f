"""Explain a wrong vector: a norm, a bias, a factor of RoPE."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from polyquant.analysis.certification.cause import Cause
from polyquant.analysis.side import Reader, Side
from polyquant.architectures.hyper import Hyper
from polyquant.types import F32, as_matrix

__all__ = ["explain_vector", "head_orders", "row_order"]

_CLOSE = 0.02


def explain_vector(name: str, expected: Side, actual: Side, others: Mapping[str, Side], hyper: Hyper | None) -> Cause:
    """The most likely cause of a wrong vector."""
    e, d = _flat(expected), _flat(actual)
    if not np.isfinite(d).all():
        return Cause("CER004", f"{int((~np.isfinite(d)).sum())} of {d.size} values are NaN or infinite")
    size = float(np.abs(e).max(initial=0)) or 1.0
    causes = (*_changed(e, d, size, expected), *_moved(name, e, d, size, others, hyper), *_partly(e, d, size))
    return causes[0]


def _changed(e: F32, d: F32, size: float, expected: Side) -> Iterator[Cause]:
    """All values are zero, shifted, negated, or not transformed."""
    if not d.any():
        yield Cause("CER020", "every value is zero")
    for shift in (1.0, -1.0, 2.0, -2.0):
        if _near(d, e + np.float32(shift), size) and not _near(d, e, size):
            how = "added once too often, or not subtracted" if shift > 0 else "missing: it was not added"
            yield Cause("CER023", f"every value is {abs(shift):g} too {'large' if shift > 0 else 'small'}: 1 is {how}")
    if not expected.op.moves and len(expected.weights) == 1:
        raw = np.asarray(expected.weights[0].dequantize(), np.float32).reshape(-1)
        if raw.shape == d.shape and _near(d, raw, float(np.abs(raw).max(initial=0)) or 1.0):
            yield Cause("CER029", "the values are those of the source, unchanged")
    if _near(d, -e, size):
        yield Cause("CER021", "every value has the opposite sign")


def _moved(name: str, e: F32, d: F32, size: float, others: Mapping[str, Side], hyper: Hyper | None) -> Iterator[Cause]:
    """The values of another vector, or in a different order, or multiplied."""
    for other, side in others.items():
        if other != name and _near(d, _flat(side), size):
            yield Cause("CER012", f"holds the values of {other}", holds=other)
            break
    if (ordered := _permuted(e, d, hyper, size)) is not None:
        yield ordered
    gain = float(e @ d / max(float(e @ e), 1e-30))
    if gain > 0 and _near(d, np.float32(gain) * e, size * max(1, gain)):
        yield Cause("CER022", f"every value is multiplied by {gain:.4g}")


def _partly(e: F32, d: F32, size: float) -> Iterator[Cause]:
    """Some values are wrong."""
    wrong = np.flatnonzero(np.abs(d - e) > _CLOSE * size)
    if len(wrong) and not d[wrong].any():
        yield Cause("CER020", f"{len(wrong)} of {d.size} values are zero, the first at {wrong[0]}")
    if len(wrong) and _near(d[wrong], -e[wrong], size):
        yield Cause("CER021", f"{len(wrong)} of {d.size} values have the opposite sign, the first at {wrong[0]}")
    what = f"{len(wrong)} of {d.size} values" if len(wrong) else "the values"
    yield Cause("CER010", f"{what} differ, by up to {float(np.abs(d - e).max()):.3g}")


def _flat(side: Side) -> F32:
    return Reader(side).rows(slice(0, as_matrix(side.shape)[0])).reshape(-1)


def _near(x: F32, y: F32, size: float) -> bool:
    return bool(np.abs(x - y).max(initial=0) <= _CLOSE * size)


def _permuted(e: F32, d: F32, hyper: Hyper | None, size: float) -> Cause | None:
    """The cause if the stored values are the expected ones in a different order."""
    if not _near(np.sort(d), np.sort(e), size):
        return None
    for what, order in head_orders(e.size, hyper):
        if _near(d, e[order], size):
            return Cause("CER015", what)
    if hyper is not None and e.size % hyper.head_size == 0 and e.size > hyper.head_size:
        a, b = e.reshape(-1, hyper.head_size), d.reshape(-1, hyper.head_size)
        if all(any(_near(row, other, size) for other in a) for row in b):
            return Cause("CER016", "the values of heads are exchanged")
    return row_order([int(np.abs(e - v).argmin()) for v in d], list(range(e.size)), "values")


def head_orders(size: int, hyper: Hyper | None) -> list[tuple[str, NDArray[np.int64]]]:
    """(description, order) of rotary rows: stored row i is the expected row order[i]."""
    if hyper is None or hyper.head_size < 4 or hyper.head_size % 2 or size % hyper.head_size:
        return []
    out = []
    for rotary in dict.fromkeys((hyper.head_size, hyper.rotary_size)):
        if rotary % 2 or rotary < 4 or rotary > hyper.head_size:
            continue
        head = np.arange(hyper.head_size)
        pairs = head.copy()
        pairs[:rotary] = np.arange(rotary).reshape(2, rotary // 2).T.reshape(-1)
        heads = np.arange(size // hyper.head_size)[:, None] * hyper.head_size
        halves = np.argsort(pairs)
        out += [
            ("rows of each head are in pairs, expected in halves (permuted for GGUF, or once too often)",
             (heads + pairs).reshape(-1)),
            ("rows of each head are in halves, expected in pairs (the order of Hugging Face, not permuted for GGUF)",
             (heads + halves).reshape(-1)),
        ]  # fmt: skip
    return out


def row_order(found: list[int], rows: list[int], what: str = "rows", total: int = 1 << 62) -> Cause:
    """The cause for rows that are in a different order: rows[i] holds row found[i]. total: of the tensor."""
    moved = [(r, f) for r, f in zip(rows, found, strict=True) if r != f]
    shift = Counter((r - f + total // 2) % total - total // 2 for r, f in moved).most_common(1)[0]
    if len(moved) > 2 and shift[1] > 0.9 * len(moved):
        return Cause("CER017", f"{what} {moved[0][0]} to {moved[-1][0]} are shifted by {shift[0]:+d}")
    pairs = dict(moved)
    swapped = sorted({(min(r, f), max(r, f)) for r, f in moved if pairs.get(f) == r})
    if swapped and 2 * len(swapped) == len(moved):
        shown = ", ".join(f"{a} and {b}" for a, b in swapped[:4])
        more = f" and {len(swapped) - 4} more pairs" if len(swapped) > 4 else ""
        return Cause("CER017", f"{what} {shown}{more} are exchanged")
    shown = ", ".join(f"{r} holds {f}" for r, f in moved[:4])
    return Cause("CER017", f"{what} are permuted: {shown}" + (", ..." if len(moved) > 4 else ""))
