"""Recognize smoothing: factors that move between a norm, or the rows of a matrix, and the columns of its readers.

    norm w, readers A, B           ->   w / s, A diag(s), B diag(s)           SmoothQuant, AWQ
    matrix V, reader O             ->   diag(1 / s) V, O diag(s)              v -> o, up -> down

The factors follow from the stored norm or matrix. If all its readers fit with them, the model computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from polyquant.analysis.certification.scan import Scan
from polyquant.analysis.certification.sides import Reader, Side
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.parts import Feed
from polyquant.architectures.record import Architecture
from polyquant.types import F32, as_matrix

__all__ = ["Smoothed", "smoothed"]

Rescan = Callable[[Side, Side], Scan]
_ROWS = 1 << 18


@dataclass(frozen=True, slots=True)
class Smoothed:
    """One recognized product. sides: the expected tensors with their factors; scans: of these."""

    feeder: str
    readers: tuple[str, ...]
    sides: Mapping[str, Side]
    scans: Mapping[str, Scan]


def smoothed(
    wrong: set[str],
    expected: Mapping[str, Side],
    actual: Mapping[str, Side],
    record: Architecture,
    hyper: Hyper,
    rescan: Rescan,
) -> Iterator[Smoothed]:
    """Yield the products that explain wrong tensors, layer by layer. Names are those of GGUF."""
    current = dict(expected)
    for index in range(hyper.layers):
        for feed in (*record.feeds("norm"), *record.feeds("values", "product")):
            feeder = f"blk.{index}.{feed.source}.weight"
            readers = [n for r in feed.readers if (n := f"blk.{index}.{r}.weight") in expected and n in actual]
            if feeder not in wrong or feeder not in actual or not wrong & set(readers):
                continue
            found = _product(feed, feeder, readers, current, actual, hyper, rescan)
            if found is not None:
                current |= found.sides
                wrong -= set(found.scans)
                yield found


def _product(
    feed: Feed,
    feeder: str,
    readers: list[str],
    expected: Mapping[str, Side],
    actual: Mapping[str, Side],
    hyper: Hyper,
    rescan: Rescan,
) -> Smoothed | None:
    norm = feed.kind == "norm"
    factors = _row_factors(expected[feeder], actual[feeder], vector=norm)
    if factors is None:
        return None
    sides = {feeder: _times(expected[feeder], factors, norm=norm)}
    bias = f"{feeder.removesuffix('.weight')}.bias"
    if bias in expected and bias in actual:
        sides[bias] = _times(expected[bias], factors, norm=True)
    for name in readers:
        k = as_matrix(expected[name].shape)[1]
        columns = _columns(factors, k, hyper)
        if columns is None:
            return None
        side = expected[name]
        sides[name] = replace(side, columns=columns if side.columns is None else side.columns * columns)
    scans = {name: rescan(side, actual[name]) for name, side in sides.items()}
    return Smoothed(feeder, tuple(readers), sides, scans) if all(s.sound for s in scans.values()) else None


def _times(side: Side, factors: F32, *, norm: bool) -> Side:
    if norm:
        return replace(side, columns=factors if side.columns is None else side.columns * factors)
    return replace(side, rows=factors)


def _row_factors(expected: Side, actual: Side, *, vector: bool) -> F32 | None:
    """Stored / expected: of each value of a norm, or of each row of a matrix [rows]. None if one is not positive."""
    rows, k = as_matrix(expected.shape)
    wanted, found = Reader(expected), Reader(actual)
    if vector:
        e, d = wanted.rows(slice(0, 1)).reshape(-1), found.rows(slice(0, 1)).reshape(-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(e != 0, d / np.where(e != 0, e, 1), np.float32(1))
    else:
        step, pieces = max(1, _ROWS // max(1, k)), []
        for start in range(0, rows, step):
            part = slice(start, min(rows, start + step))
            x, y = wanted.rows(part), found.rows(part)
            xx = np.einsum("nk,nk->n", x, x)
            pieces.append(np.where(xx > 0, np.einsum("nk,nk->n", x, y) / np.where(xx > 0, xx, 1), 1))
        ratio = np.concatenate(pieces)
    ratio = np.asarray(ratio, np.float32)
    return ratio if bool(np.isfinite(ratio).all() and (ratio > 0).all()) else None


def _columns(factors: F32, k: int, hyper: Hyper) -> F32 | None:
    """The factors of a reader's columns [k]: 1 / s, the last rows of a fused matrix, repeated for heads that share."""
    if len(factors) == k:
        return np.asarray(1 / factors, np.float32)
    values, shared = hyper.value_width, hyper.heads // max(1, hyper.kv_heads)
    if k == values * shared and len(factors) >= values:
        tail = factors[-values:].reshape(hyper.kv_heads, 1, hyper.head_size)
        return np.asarray(1 / np.broadcast_to(tail, (hyper.kv_heads, shared, hyper.head_size)).reshape(-1), np.float32)
    return np.asarray(1 / factors[-k:], np.float32) if len(factors) > k else None
