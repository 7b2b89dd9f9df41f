"""Importance matrices as llama.cpp's imatrix tool writes them: a GGUF with, per tensor, the summed squares of its inputs.

    NAME.in_sum2   f32 [experts, K]   sum of squared activations per input column
    NAME.counts    f32 [experts, 1]   how many rows went into the sum

importance = in_sum2 / counts: the mean square of each input column, the weight of that column's error in the layer's output.
The older binary form (.dat) has no magic and is not read: `llama-imatrix --output-format gguf` writes this one.
"""

from __future__ import annotations

import os

import numpy as np

from polyquant.errors import InputError
from polyquant.opening import open_checkpoint
from polyquant.types import F32

__all__ = ["load_importance"]


def load_importance(path: str | os.PathLike[str]) -> dict[str, F32]:
    """GGUF tensor name -> float32 [K], of a stack [experts, K]; positive. An expert that no token reached weighs its columns alike.

    Raises InputError for another kind of file or broken numbers.
    """
    checkpoint = open_checkpoint(path)
    names = [n.removesuffix(".in_sum2") for n in checkpoint if n.endswith(".in_sum2")]
    if checkpoint.naming != "gguf" or not names:
        raise InputError(
            "not an importance matrix",
            file=path,
            expected="tensors called NAME.in_sum2",
            hint="make one with llama-imatrix --output-format gguf",
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
            raise InputError("importance of another number of experts", file=path, tensor=name, expected=list(counts.shape), found=list(total.shape))  # fmt: skip
        mean = total.reshape(counts.size, -1) / np.maximum(counts.reshape(-1, 1), 1)  # [experts, K]
        if counts.size > 1:
            mean[counts.reshape(-1) == 0] = 1
        out[name] = np.maximum(mean if counts.size > 1 else mean[0], np.float32(1e-20)).astype(np.float32)
    return out
