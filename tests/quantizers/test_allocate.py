"""Bits for each tensor: the smallest total error within a budget of bytes."""

import itertools

import numpy as np
import pytest

from polyquant.errors import PlanError
from polyquant.quantizers.allocate import Choice, allocate, distortion


def choices(rng, count, widths=range(2, 9)):
    out = []
    for i in range(count):
        weights, harm = int(rng.integers(1, 40)) * 256, float(rng.lognormal(0, 2))
        sizes = {b: weights * b // 8 + 100 for b in widths}
        out.append(Choice(f"w{i}", sizes, {b: harm * distortion(b, "mul1") for b in widths}))
    return out


def taken(found, some):
    return sum(c.nbytes[found[c.name]] for c in some), sum(c.damage[found[c.name]] for c in some)


@pytest.mark.parametrize("seed", range(5))
def test_as_good_as_exhaustive_search(seed):
    rng = np.random.default_rng(seed)
    some = choices(rng, 5, widths=(2, 3, 4, 5))
    budget = int(np.mean([[min(c.nbytes.values()), max(c.nbytes.values())] for c in some]) * 5)
    best = min(
        sum(c.damage[b] for c, b in zip(some, bits, strict=True))
        for bits in itertools.product((2, 3, 4, 5), repeat=5)
        if sum(c.nbytes[b] for c, b in zip(some, bits, strict=True)) <= budget
    )
    nbytes, damage = taken(allocate(some, budget), some)
    assert nbytes <= budget
    assert damage <= best * 1.001


@pytest.mark.parametrize("target", [2.5, 3.0, 3.3, 4.7])
def test_many_tensors_fill_the_budget(target):
    some = choices(np.random.default_rng(9), 200)
    weights = sum((c.nbytes[3] - c.nbytes[2]) * 8 for c in some)
    budget = int(weights * target / 8)
    nbytes, _ = taken(allocate(some, budget), some)
    assert budget - 0.02 * weights / 8 <= nbytes <= budget


def test_more_important_tensors_get_more_bits():
    harm = {"little": 1.0, "much": 1000.0}
    some = [
        Choice(n, {b: b * 100 for b in range(2, 9)}, {b: h * 0.25**b for b in range(2, 9)}) for n, h in harm.items()
    ]
    found = allocate(some, 800)
    assert found["much"] - found["little"] >= 4
    assert sum(found.values()) == 8


def test_minimum_and_maximum_budget():
    some = choices(np.random.default_rng(1), 7)
    least, most = (sum(f(c.nbytes.values()) for c in some) for f in (min, max))
    assert set(allocate(some, least).values()) == {2}
    assert set(allocate(some, 2 * most).values()) == {8}
    with pytest.raises(PlanError, match="fewest bits"):
        allocate(some, least - 1)


@pytest.mark.parametrize("codebook", ["mul1", "grid"])
def test_distortion_decreases_with_each_bit(codebook):
    found = [distortion(b, codebook) for b in range(1, 9)]
    assert all(2.3 < a / b < 5 for a, b in itertools.pairwise(found))
