"""Importance of columns: the mean square of the inputs of each column of a weight.

It weights the squared error of the column's weights. Read from the files of llama.cpp's imatrix tool, a GGUF file with
per tensor:

    NAME.in_sum2   f32 [experts, K]   sum of squared activations per input column
    NAME.counts    f32 [experts, 1]   number of rows in the sum

or measured here: the float model reads a calibration text, and each expert of a stack counts its routed tokens.
importance = in_sum2 / counts. The older binary form (.dat) has no magic number and is not supported:
`llama-imatrix --output-format gguf` writes this one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from polyquant.architectures.translate import to_gguf
from polyquant.calibration.hessians import UNREACHED, GatheringStages, part_of
from polyquant.calibration.stages import WINDOWS, calibration_stages
from polyquant.errors import InputError
from polyquant.opening import open_checkpoint
from polyquant.operations import Stack
from polyquant.ops import exact
from polyquant.rows import matrix_name
from polyquant.types import F32, Checkpoint, TensorMap

__all__ = ["Squares", "Summed", "load_importance", "measure", "unreached", "unreached_notice"]

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


@dataclass(frozen=True, slots=True)
class Summed:
    """Sums for a tensor or for each expert of a stack. total: float32 [experts, K]; counts: float32 [experts]."""

    total: F32
    counts: F32

    @property
    def importance(self) -> F32:
        """float32 [K], for a stack [experts, K]; positive. All columns of an expert that no token reached get
        importance 1.
        """
        mean = self.total / np.maximum(self.counts[:, None], 1)
        if len(mean) > 1:
            mean[self.counts == 0] = 1
        return np.maximum(mean if len(mean) > 1 else mean[0], np.float32(1e-20)).astype(np.float32)


def unreached(importance: F32 | None) -> list[int]:
    """Experts without measured importance, whose columns all have importance 1."""
    return [] if importance is None or importance.ndim < 2 else np.flatnonzero((importance == 1).all(axis=1)).tolist()


def unreached_notice(left: Mapping[str, Sequence[int]]) -> str:
    """The warning about experts that no token reached. left: stack -> such experts."""
    count = sum(map(len, left.values()))
    return f"{count} experts of {len(left)} stacks were {UNREACHED}: their columns have equal importance"


def load_importance(path: str | os.PathLike[str]) -> dict[str, F32]:
    """Load GGUF tensor name -> float32 [K], for a stack [experts, K]; see Summed.

    Raises InputError for other files and for invalid values.
    """
    checkpoint = open_checkpoint(path)
    names = [n.removesuffix(".in_sum2") for n in checkpoint if n.endswith(".in_sum2")]
    if checkpoint.naming != "gguf" or not names:
        raise InputError(
            "not an importance matrix",
            file=path,
            expected="tensors named NAME.in_sum2",
            hint="create one with `polyquant importance`, or llama-imatrix --output-format gguf",
        )
    out = {}
    for name in names:
        total = checkpoint[f"{name}.in_sum2"].dequantize()
        if f"{name}.counts" not in checkpoint:
            raise InputError("importance without counts", file=path, tensor=name)
        counts = checkpoint[f"{name}.counts"].dequantize()
        if not (np.isfinite(total).all() and (total >= 0).all() and np.isfinite(counts).all()):
            raise InputError("importance is negative or not finite", file=path, tensor=name)
        if counts.size == 0 or total.size % counts.size:
            raise InputError(
                "counts do not match the number of experts",
                file=path,
                tensor=name,
                expected=list(counts.shape),
                found=list(total.shape),
            )
        out[name] = Summed(total.reshape(counts.size, -1), counts.reshape(-1)).importance
    return out


# ------------------------------------------------------------ measured


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
