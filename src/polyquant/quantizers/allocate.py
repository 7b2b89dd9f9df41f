"""Bit allocation: choose the bits of each tensor so that the total damage is minimal within a byte budget.

minimize sum_i damage_i(bits_i) subject to sum_i bytes_i(bits_i) <= budget: the multiple-choice knapsack, solved exactly
by dynamic programming over the budget in steps of 1 / 16384 (bytes are rounded up, so the result never exceeds the
budget).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from polyquant.errors import PlanError

__all__ = ["Choice", "allocate", "distortion"]

_STEPS = 1 << 14
_CODED = (0.3, 0.0706, 0.01808, 0.0047, 0.00123, 0.00034, 0.000092, 0.0000246)
_GRID = (0.36, 0.119, 0.0371, 0.0119, 0.00354, 0.00106, 0.00027, 0.000095)


def distortion(bits: int, codebook: str) -> float:
    """Return the measured mean squared error for unit Gaussian values; window 14 for trellis codes."""
    return (_GRID if codebook == "grid" else _CODED)[bits - 1]


@dataclass(frozen=True, slots=True)
class Choice:
    """A tensor with its size in bytes and its damage for each allowed number of bits."""

    name: str
    nbytes: Mapping[int, int]
    damage: Mapping[int, float]


def allocate(choices: Sequence[Choice], budget: int) -> dict[str, int]:
    """Return tensor -> bits with the least total damage within `budget` bytes.

    Raises PlanError if even the fewest bits do not fit.
    """
    least = sum(min(c.nbytes.values()) for c in choices)
    if least > budget:
        raise PlanError(
            "the size budget is too small even for the fewest bits",
            expected=f"at least {least:,} bytes",
            found=f"{budget:,}",
        )
    unit = max(1.0, (budget - least) / _STEPS)
    room = int((budget - least) / unit)
    best = np.zeros(room + 1)  # least damage by number of budget steps above the minimum
    taken = []
    for c in choices:
        options = sorted(c.nbytes)
        floor = min(c.nbytes.values())
        steps = [int(np.ceil((c.nbytes[b] - floor) / unit)) for b in options]
        table = np.full((len(options), room + 1), np.inf)
        for row, bits, cost in zip(table, options, steps, strict=True):
            if cost <= room:
                row[cost:] = best[: room + 1 - cost] + c.damage[bits]
        choice = table.argmin(0)
        best = table[choice, np.arange(room + 1)]
        taken.append((options, steps, choice.astype(np.int8)))
    out, left = {}, room
    for c, (options, steps, choice) in zip(reversed(choices), reversed(taken), strict=True):
        at = int(choice[left])
        out[c.name] = options[at]
        left -= steps[at]
    return {c.name: out[c.name] for c in choices}
