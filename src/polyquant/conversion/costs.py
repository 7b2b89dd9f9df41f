"""The cost of a step, in picoseconds on one core of the reference machine: deterministic, so that all machines agree.

Arithmetic from the measured table of codecs (cost_table.py), traffic from the bytes read and written, and a feedback
product for a calibrated search: its 2 K operations per weight (LDLQ, GPTQ).
"""

from __future__ import annotations

from functools import lru_cache

from polyquant.conversion.cost_table import COSTS
from polyquant.formats.steps import Step
from polyquant.types import Action, Affine, Codec, Floats, TensorSpec, TrellisCodes, as_matrix

__all__ = ["step_cost"]

_READ, _WRITE = 150, 700
"""Picoseconds per byte: read from the page cache; checksum and write."""
_STEP = 150_000_000
"""Per step: its bookkeeping in Python."""
_MEASURE = 350
"""Per weight: error sums."""
_FEEDBACK = 70
"""Per weight and input of a calibrated search."""
_REPACK = 1500
"""Per weight: equal codes in another layout."""
_OTHER = (20_000, 500)
"""A codec that is not in the table, such as a plugin's."""


def step_cost(step: Step, *, calibrated: bool = False, measure: bool = True) -> int:
    """The cost of a whole step. calibrated: codes are searched with a Hessian."""
    read = sum(_read(s) for s in step.sources) or step.nbytes
    traffic = _STEP + _READ * read + _WRITE * step.nbytes
    if step.source is None or step.action is Action.COPY:
        return traffic
    _, source = codec_cost(step.source)
    encode, decode = codec_cost(step.target)
    if step.action is Action.TRANSCODE:
        return traffic + step.weights * _REPACK
    work = source + encode + (decode + _MEASURE if measure else 0)
    if calibrated and (step.searches or step.target.form is Affine):
        work += _FEEDBACK * as_matrix(step.map.shape)[1]
    return traffic + step.weights * work


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


def _read(source: TensorSpec) -> int:
    """Bytes of a source tensor."""
    return sum(spec.nbytes for spec in source.codec.specs(source.shape).values())
