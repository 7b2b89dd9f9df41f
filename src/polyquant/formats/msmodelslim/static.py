"""Recompute deq_scale and quant_bias of a static layer.

    deq_scale  = input_scale * weight_scale, float32; the tool multiplies in the model's dtype, which rounds it
    quant_bias = int32(round(bias / deq_scale - input_offset * sum of the codes of a row))

Source: msModelSlim's document ("deq_scale", "quant_bias") and the tool's arithmetic; both exact on all static vectors.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from polyquant.types import F32

__all__ = ["closest_deq_scale", "row_sums"]

_CHUNK = 1 << 22


def closest_deq_scale(input_scale: F32, weight_scale: F32, stored: F32 | None) -> F32:
    """The product float32 [n], unrounded or rounded to a half-precision type: the variant that matches most of
    `stored`.
    """
    with np.errstate(all="ignore"):
        product = np.asarray(input_scale * weight_scale, np.float32)
        if stored is None or stored.shape != product.shape:
            return product
        halves = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
        choices = [product, *(product.astype(half).astype(np.float32) for half in halves)]
    return max(choices, key=lambda c: int(np.count_nonzero(c == stored)))


def row_sums(codes: Any, rows: int, columns: int) -> NDArray[np.int64]:
    """Sums of the rows of int8 codes [rows, columns], read a few rows at a time. codes: a StoredArray."""
    out = np.empty(rows, np.int64)
    step = max(1, _CHUNK // max(1, columns))
    for a in range(0, rows, step):
        out[a : a + step] = codes.read(a, min(rows, a + step)).sum(1, dtype=np.int64)
    return out
