"""Read input ranges of linear layers from a file: written by hand, or by the tool's calibration.

    {"model.layers.0.self_attn.q_proj": [-15.9, 36.2], ...} {"model.layers.0.self_attn.q_proj": {"per_sample_min_max":
    [[-15.9, 36.2], ...], "observed_min": -26.0, "observed_max": 26.2, ...}, ...}

From samples the dialect v1 uses the extremes; v0 and ascendv1 the mean of each, as in `observed_min` and
`observed_max`.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from polyquant.errors import InputError
from polyquant.storage import strict_json

__all__ = ["read_ranges"]

_FORM = '{"model.layers.0.self_attn.q_proj": [minimum, maximum], ...}'


def read_ranges(path: str | os.PathLike[str], dialect: str) -> dict[str, tuple[float, float]]:
    """Linear layer (without `.weight`) -> (minimum, maximum) input, including 0. Raises InputError."""
    content = strict_json.typed(strict_json.read(Path(path)), dict, "ranges", file=path)
    ranges = {name.removesuffix(".weight"): _range(name, entry, dialect, path) for name, entry in content.items()}
    if not ranges:
        raise InputError("contains no ranges", file=path, expected=_FORM)
    return ranges


def _range(name: str, entry: Any, dialect: str, path: object) -> tuple[float, float]:
    ends = entry
    if isinstance(entry, dict):
        samples = entry.get("per_sample_min_max")
        ends = [entry.get("observed_min"), entry.get("observed_max")]
        if isinstance(samples, list) and samples and (dialect == "v1" or None in ends):
            pairs = [_pair(name, sample, path) for sample in samples]
            lows, highs = [low for low, _ in pairs], [high for _, high in pairs]
            ends = [min(lows), max(highs)] if dialect == "v1" else [_mean(lows), _mean(highs)]
    low, high = _pair(name, ends, path)
    return min(low, 0.0), max(high, 0.0)


def _pair(name: str, ends: Any, path: object) -> tuple[float, float]:
    good = (
        isinstance(ends, list)
        and len(ends) == 2
        and all(isinstance(x, int | float) and not isinstance(x, bool) for x in ends)
    )
    if not good or not all(math.isfinite(x) for x in ends) or ends[0] > ends[1]:
        raise InputError("not an input range", file=path, tensor=name, expected=_FORM, found=repr(ends)[:80])
    return float(ends[0]), float(ends[1])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
