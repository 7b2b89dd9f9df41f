"""Recognize smoothing: factors that move between a norm, or the rows of a matrix, and the columns of its readers.

    norm w, readers A, B           ->   w / s, A diag(s), B diag(s)           SmoothQuant, AWQ
    matrix V, reader O             ->   diag(1 / s) V, O diag(s)              v -> o, up -> down
    norm w, reader A               ->   w / s, norm bias -z, A diag(s), bias A diag(s) z        shifted inputs

The factors follow from the stored norm or matrix. If all its readers fit with them, the model computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from polyquant.analysis.certification.scan import Scan
from polyquant.analysis.certification.sides import constant
from polyquant.analysis.side import Reader, Side
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.parts import Feed
from polyquant.architectures.record import Architecture
from polyquant.types import F32, as_matrix

__all__ = ["Smoothed", "smoothed"]

Rescan = Callable[[Side, Side], Scan]
Sides = Mapping[str, Side]
_ROWS = 1 << 18
_SHIFTED = 0.03
"""Relative error of a bias that a shift was added to: the tool multiplies rounded matrices."""

_FITTED = 0.01
"""Relative error of factors that are fitted to quantized rows."""
_BETTER = 0.7
"""Factors that lower the error of a wrong reader to this share explain a part of it."""


@dataclass(frozen=True, slots=True)
class Smoothed:
    """One recognized product. sides: the expected tensors that it changes, with their factors; scans: of these."""

    feeder: str
    readers: tuple[str, ...]
    sides: Sides
    scans: Mapping[str, Scan]


@dataclass(frozen=True, slots=True)
class _Product:
    feed: Feed
    feeder: str
    readers: tuple[str, ...]

    @property
    def biases(self) -> tuple[str, ...]:
        """Names of the biases of feeder and readers."""
        return tuple(f"{name.removesuffix('.weight')}.bias" for name in (self.feeder, *self.readers))


def smoothed(
    wrong: Mapping[str, Scan], expected: Sides, actual: Sides, record: Architecture, hyper: Hyper, rescan: Rescan
) -> Iterator[Smoothed]:
    """Yield the products that explain wrong tensors, layer by layer. Names are those of GGUF."""
    same = {n for n in expected if n in actual and expected[n].shape == actual[n].shape}
    for index in range(hyper.layers):
        products = []
        for feed in (*record.feeds("norm"), *record.feeds("values", "product")):
            feeder = f"blk.{index}.{feed.source}.weight"
            readers = tuple(n for r in feed.readers if (n := f"blk.{index}.{r}.weight") in same)
            if feeder in wrong and feeder in same and wrong.keys() & set(readers):
                products.append(_Product(feed, feeder, readers))
        accepted = _accepted(products, wrong, expected, actual, hyper, rescan)
        if 0 < len(accepted) < len(products):  # without the others, whose factors are not genuine
            accepted = _accepted([p for p, _ in accepted], wrong, expected, actual, hyper, rescan)
        yield from (found for _, found in accepted)


def _accepted(
    products: list[_Product],
    wrong: Mapping[str, Scan],
    expected: Sides,
    actual: Sides,
    hyper: Hyper,
    rescan: Rescan,
) -> list[tuple[_Product, Smoothed]]:
    """The products that fit after all of them were applied: the feeder, and a reader, or at least better than before.

    A reader that does not fit has another fault, which shows in the values with the factors.
    """
    sides: dict[str, Side] = {}
    changed: dict[str, set[str]] = {}
    for product in products:
        before = dict(sides)
        if _apply(product, sides, expected, actual, hyper):
            names = {product.feeder, *product.readers}
            changed[product.feeder] = names | {n for n in product.biases if n in sides}
        else:
            sides = before
    scans = {name: rescan(side, actual[name]) for name, side in sides.items()}

    def fits(name: str) -> bool:
        return scans[name].sound or (name in wrong and scans[name].error < _BETTER * wrong[name].error)

    out = []
    for p in products:
        own = {n: scans[n] for n in changed.get(p.feeder, ()) if n in scans}
        if own and scans[p.feeder].sound and any(fits(n) for n in p.readers if n in scans):
            out.append((p, Smoothed(p.feeder, p.readers, {n: sides[n] for n in own}, own)))
    return out


def _apply(product: _Product, sides: dict[str, Side], expected: Sides, actual: Sides, hyper: Hyper) -> bool:
    """Add the expected tensors with the factors of one product to `sides`. False if there are none."""
    norm = product.feed.kind == "norm"
    feeder = sides.get(product.feeder, expected[product.feeder])
    factors = _row_factors(feeder, actual[product.feeder], vector=norm)
    if factors is None or (not norm and bool((np.abs(factors - 1) < _SHIFTED).all())):
        return False
    bias, *others = product.biases
    sides[product.feeder] = _times(feeder, factors, norm=norm)
    if bias in expected and bias in actual:
        slack = 0.0 if norm else _FITTED
        sides[bias] = replace(_times(sides.get(bias, expected[bias]), factors, norm=True), slack=slack)
    for name in product.readers:
        side = sides.get(name, expected[name])
        columns = _columns(factors, as_matrix(side.shape)[1], hyper)
        if columns is None:
            return False
        slack = side.slack if norm else max(side.slack, _FITTED)
        sides[name] = replace(side, columns=columns if side.columns is None else side.columns * columns, slack=slack)
    if norm and bias in actual and bias not in expected:
        return _shift(bias, product.readers, others, sides, expected, actual)
    return True


def _shift(
    bias: str, readers: tuple[str, ...], biases: list[str], sides: dict[str, Side], expected: Sides, actual: Sides
) -> bool:
    """Add the biases that undo the bias of a norm. False if a reader has none."""
    added = Reader(actual[bias]).rows(slice(0, 1)).reshape(-1)
    sides[bias] = constant(bias, added)
    if not added.any():
        return True
    for name, own in zip(readers, biases, strict=True):
        if own not in actual:
            return False
        old = Reader(expected[own]).rows(slice(0, 1)).reshape(-1) if own in expected else np.float32(0)
        moved = np.asarray(old - _product_with(sides[name], added), np.float32)
        sides[own] = replace(constant(own, moved), slack=_SHIFTED)
    return True


def _product_with(side: Side, x: F32) -> F32:
    """The matrix times x [rows]."""
    rows, k = as_matrix(side.shape)
    reader, step = Reader(side), max(1, _ROWS // max(1, k))
    return np.concatenate([reader.rows(slice(a, min(rows, a + step))) @ x for a in range(0, rows, step)])


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
