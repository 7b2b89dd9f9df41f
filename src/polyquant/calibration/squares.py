"""Importance of the columns of matrices, measured: sums of squared inputs while a model reads a calibration text."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from polyquant.architectures.translate import to_gguf
from polyquant.calibration.hessians import GatheringStages, part_of
from polyquant.calibration.importance import Summed
from polyquant.calibration.sizes import WINDOWS
from polyquant.calibration.stages import calibration_stages
from polyquant.errors import InputError
from polyquant.operations import Stack
from polyquant.ops import exact
from polyquant.rows import matrix_name
from polyquant.types import F32, Checkpoint, TensorMap

__all__ = ["Squares", "measure"]

_EMBEDDING = "token_embd.weight"


class Squares:
    """Accumulate inputs [T, K] of a linear layer. A calibration.hessians.Gatherer.

    total: sum of squares, float64 [K]; count: tokens.
    """

    def __init__(self, k: int) -> None:
        self.total, self.count = np.zeros(k), 0

    def add(self, x: F32) -> None:
        """x [T, K]."""
        self.total += exact.column_dots(x, x)
        self.count += len(x)

    def merge(self, other: Squares) -> None:
        """Add what another one has gathered from later windows."""
        self.total, self.count = self.total + other.total, self.count + other.count


def measure(
    source: Checkpoint,
    text: str | os.PathLike[str],
    *,
    windows: int = WINDOWS,
    tick: Callable[[float], None] = lambda _: None,
) -> dict[str, Summed]:
    """Run a float model on a calibration text -> GGUF tensor name -> sums of squared inputs. Embeddings have none.

    text: a file, or "self" for generated text; at most `windows` windows of it. tick: called with the finished share.
    Memory: 8 bytes per column of one layer's matrices, including all experts, and the states of all tokens. Raises
    InputError, UnsupportedError.
    """
    stages = calibration_stages(source.path, text, windows=windows)
    maps = [m for m in _maps(source) if m.target != _EMBEDDING and len(m.shape) > 1]
    out: dict[str, Summed] = {}
    for index in range(len(stages.names)):
        _one_stage(stages, index, maps, out, part_of(tick, index, len(stages.names)))
    if not out:
        raise InputError("no matrix of the model got inputs", file=source.path)
    return {m.target: out[m.target] for m in maps if m.target in out}


def _maps(source: Checkpoint) -> Sequence[TensorMap]:
    """Maps from GGUF tensor names to the source's tensors."""
    if source.naming == "gguf":
        return [TensorMap(w.name, (w.name,), w.shape) for w in source.values()]
    return to_gguf(source, with_tokenizer=False).tensors


def _one_stage(
    stages: GatheringStages,
    index: int,
    maps: Sequence[TensorMap],
    out: dict[str, Summed],
    tick: Callable[[float], None],
) -> None:
    """Run a stage and add the sums of its tensors to `out`."""
    here = frozenset(stages.names[index])
    readers = {m.target: names for m in maps if (names := _readers(m, here))}
    wanted = frozenset(name for names in readers.values() for name in names)
    seen = stages.gather(index, wanted, tick, Squares)
    for m in maps:
        gathered = [seen[name] for name in readers.get(m.target, ())]
        if gathered and all(len(g.total) == m.shape[-1] for g in gathered):
            out[m.target] = _summed(gathered)


def _readers(made: TensorMap, here: frozenset[str]) -> list[str]:
    """The stage's names for a GGUF tensor: one, or one per expert; [] if there are none."""
    candidates: list[list[str]] = [[made.target], list(made.sources[:1])]
    if len(made.shape) == 3:
        several = isinstance(made.op, Stack) and len(made.sources) == made.shape[0]
        stacks = (made.target, *made.sources[:1])
        candidates = [list(made.sources)] if several else []
        candidates += [[matrix_name(stack, e) for e in range(made.shape[0])] for stack in stacks]
    return next((names for names in candidates if here.issuperset(names)), [])


def _summed(gathered: Sequence[Squares]) -> Summed:
    total = np.stack([g.total for g in gathered]).astype(np.float32)
    return Summed(total, np.array([g.count for g in gathered], np.float32))
