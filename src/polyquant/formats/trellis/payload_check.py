"""Check payloads: non-finite scales, tiles with differing headers, and known bugs of Metal Marlin's decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError
from polyquant.formats.trellis.arrays import HeadedTiles
from polyquant.formats.trellis.survey import Survey
from polyquant.formats.trellis.weights import Axes, Facts
from polyquant.storage.source import FileArray
from polyquant.types import F32, ArraySpec, Finding, Severity

__all__ = ["check_payload"]

ERROR, WARNING = Severity.ERROR, Severity.WARNING


@dataclass(slots=True)
class _Defects:
    """Names of the weights that Metal Marlin's decoder decodes differently than intended."""

    uneven: list[str] = field(default_factory=list)
    rotated: list[str] = field(default_factory=list)
    swapped: list[str] = field(default_factory=list)


def check_payload(contents: Survey, axes: Mapping[str, Axes]) -> Iterator[Finding]:
    """Scan scales, su, sv and header bytes of every weight."""
    defects = _Defects()
    for name, facts in contents.weights.items():
        try:
            yield from _weight(facts, axes[name], defects)
        except InputError as e:
            yield Finding("TRL018", ERROR, e.message, name, facts.file.name)
    marlin = [n for n, a in axes.items() if a == "nk"]
    if marlin:
        yield Finding("TRL045", WARNING, f"{len(marlin)} weights are [N, K], outputs first", marlin[0])
    for code, severity, names, what in (
        ("TRL046", WARNING, defects.uneven, "were quantized with the mean of differing scales in a tile"),
        ("TRL047", ERROR, defects.rotated, "remain rotated after Metal Marlin's decoder"),
        ("TRL048", WARNING, defects.swapped, "are square and have swapped signs"),
    ):
        if names:
            yield Finding(code, severity, f"{len(names)} weights {what}", names[0])


def _weight(facts: Facts, axes: Axes, defects: _Defects) -> Iterator[Finding]:
    scales, su, sv = (_floats(facts, part) for part in ("scales", "su", "sv"))
    parts = {"scales": scales, "su": su, "sv": sv}
    if "lut" in facts.components:
        parts["lut"] = _floats(facts, "lut")
    for part, values in parts.items():
        bad = int((~np.isfinite(values)).sum())
        if bad:
            message = f"component '{part}' contains NaN or infinity: {bad:,} of {values.size:,} values"
            yield Finding("TRL026", ERROR, message, facts.name, facts.components[part].source.path.name)
        lost = int((values == 0).sum()) if part in ("su", "sv") else 0
        if lost:
            side = "inputs" if part == "su" else "outputs"
            message = f"component '{part}' contains {lost:,} zeros of {values.size:,} values: these {side} are lost"
            yield Finding("TRL027", WARNING, message, facts.name, facts.components[part].source.path.name)
    if facts.headers == "tile":
        yield from _headers(facts)
    if axes == "kn" or facts.codebook is not None:
        return
    if _uneven(scales):
        defects.uneven.append(facts.name)
    if (su != 1).any():
        defects.rotated.append(facts.name)
    if facts.square and not np.array_equal(su, sv):
        defects.swapped.append(facts.name)


def _floats(facts: Facts, part: str) -> F32:
    stored = facts.components[part]
    spec = ArraySpec(stored.entry.shape, np.dtype(np.float32))
    values: NDArray[np.float32] = FileArray(stored.source, stored.entry.offset, spec).read(0, spec.shape[0])
    return values


def _uneven(scales: F32) -> bool:
    """True if the scales of 16 neighbouring outputs differ."""
    groups, n = scales.shape
    tiles = np.pad(scales, ((0, 0), (0, -n % 16)), mode="edge").reshape(groups, -1, 16)
    return bool((tiles != tiles[..., :1]).any())


def _headers(facts: Facts) -> Iterator[Finding]:
    """Check every tile's header byte, some rows of tiles at a time."""
    stored = facts.components["indices"]
    size = 32 * facts.bits
    tiles = stored.entry.nbytes // (size + 1)
    rows = stored.entry.shape[0] if len(stored.entry.shape) == 3 else 1
    array = HeadedTiles(stored.source, stored.entry.offset, ArraySpec((rows, tiles // rows, size), np.dtype(np.uint8)))
    step = max(1, (1 << 22) * rows // stored.entry.nbytes)
    bad = sum(int((array.headers(a, a + step) != facts.bits).sum()) for a in range(0, rows, step))
    if bad:
        message = f"header bytes of {bad:,} of {tiles:,} tiles are not {facts.bits}"
        yield Finding("TRL025", ERROR, message, facts.name, facts.file.name)
