"""Importance of columns: the mean square of the inputs of each column of a weight.

It weights the squared error of the column's weights. Read from the files of llama.cpp's imatrix tool, a GGUF file with
per tensor:

    NAME.in_sum2   f32 [experts, K]   sum of squared activations per input column
    NAME.counts    f32 [experts, 1]   number of rows in the sum

or measured (calibration/squares.py): the float model reads a calibration text, and each expert of a stack counts its
routed tokens.
importance = in_sum2 / counts. The older binary form (.dat) has no magic number and is not supported:
`llama-imatrix --output-format gguf` writes this one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from polyquant.calibration.hessians import UNREACHED
from polyquant.errors import InputError
from polyquant.opening import open_checkpoint
from polyquant.types import F32

__all__ = ["Summed", "load_importance", "unreached", "unreached_notice"]


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
