"""The cost of a step, in picoseconds on one core of the reference machine: deterministic, so that all machines agree.

Arithmetic from the measured table of codecs (cost_table.py), traffic from the bytes read and written, and a feedback
product for a calibrated search: its 2 K operations per weight (LDLQ, GPTQ).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from polyquant.conversion.cost_table import COSTS
from polyquant.formats.steps import Step
from polyquant.types import Action, Affine, Codec, Floats, Shape, TrellisCodes, as_matrix

__all__ = ["Cost", "codec_cost", "codes_cost", "step_costs"]

_READ, _WRITE = 150, 700
"""Picoseconds per byte: read from the page cache; checksum and write."""
_STEP = 150_000_000
"""Per step: its bookkeeping in Python."""
_MEASURE = 350
"""Per weight: error sums."""
_FEEDBACK = 70
"""Per weight and input of a calibrated search."""
_REPACK = 1500
"""Per weight: equal codes in a different layout."""
_OTHER = (20_000, 500)
"""A codec that is not in the table, such as a plugin's."""


class Cost(NamedTuple):
    """Picoseconds of a step: bookkeeping, reading and writing; arithmetic on codes. read: bytes of its sources."""

    traffic: int
    codes: int
    read: int

    @property
    def total(self) -> int:
        """Picoseconds of the whole step."""
        return self.traffic + self.codes


def step_costs(steps: Iterable[Step], *, calibrated: bool = False, measure: bool = True) -> list[Cost]:
    """The cost of each step. calibrated: codes are searched with a Hessian."""
    stored, arithmetic = _Memory(_stored_bytes), _Memory(lambda a, b: codes_cost(a, b, measure=measure))
    return [_step_cost(s, stored, arithmetic, calibrated=calibrated) for s in steps]


def _step_cost(step: Step, stored: _Memory, arithmetic: _Memory, *, calibrated: bool) -> Cost:
    read = sum([stored(s.codec, s.shape) for s in step.sources])
    traffic = _STEP + _READ * (read or step.nbytes) + _WRITE * step.nbytes
    if step.source is None or step.action is Action.COPY:
        return Cost(traffic, 0, read)
    if step.action is Action.TRANSCODE:
        return Cost(traffic, step.weights * _REPACK, read)
    work = arithmetic(step.source, step.target)
    if calibrated and (step.searches or step.target.form is Affine):
        work += _FEEDBACK * as_matrix(step.map.shape)[1]
    return Cost(traffic, step.weights * work, read)


class _Memory:
    """Results of a function of a codec and a second argument, for 70,000 steps with few codecs and shapes. A codec may
    not be hashable; its identity is enough while the steps exist.
    """

    def __init__(self, function: Callable[[Codec, Any], int]) -> None:
        self._function = function
        self._found: dict[tuple[int, Any], int] = {}

    def __call__(self, codec: Codec, other: Any) -> int:
        key = id(codec), other if isinstance(other, tuple) else id(other)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._function(codec, other)
        return found


def codes_cost(source: Codec, target: Codec, *, measure: bool = True) -> int:
    """Picoseconds per weight to quantize what `source` holds to `target`."""
    encode, decode = codec_cost(target)
    return codec_cost(source)[1] + encode + (decode + _MEASURE if measure else 0)


def codec_cost(codec: Codec) -> tuple[int, int]:
    """(quantize, dequantize) in picoseconds per weight."""
    return _costs(codec.name, codec.form is TrellisCodes, codec.form is Floats)


@lru_cache(maxsize=4096)
def _costs(name: str, trellis: bool, floats: bool) -> tuple[int, int]:
    """The table's entry, or that of the longest name which begins like this one; trellis codes with more bits cost
    about as much as 4.
    """
    if (found := COSTS.get(name)) is not None:
        return found
    words = name.split(".")
    if trellis and len(words) > 2:
        bits = min(4, max(2, int(words[1]) if words[1].isdigit() else 4))
        if (found := COSTS.get(".".join(("trellis", str(bits), *words[2:4])))) is not None:
            return found
    for n in range(len(words) - 1, 0, -1):
        if (found := COSTS.get(".".join(words[:n]))) is not None:
            return found
    return COSTS["f32"] if floats else _OTHER


def _stored_bytes(codec: Codec, shape: Shape) -> int:
    """Bytes of all parts of a tensor."""
    return sum(spec.nbytes for spec in codec.specs(shape).values())
