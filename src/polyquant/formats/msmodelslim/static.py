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

from polyquant.ops.int8 import quant_bias
from polyquant.types import F32

__all__ = ["closest_deq_scale", "closest_quant_bias", "row_sums"]

_HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_CHUNK = 1 << 22


def closest_deq_scale(input_scale: F32, weight_scale: F32, stored: F32 | None) -> F32:
    """The product float32 [n], unrounded or rounded to a half-precision type: the variant that matches most of
    `stored`.
    """
    with np.errstate(all="ignore"):
        product = np.asarray(input_scale * weight_scale, np.float32)
        if stored is None or stored.shape != product.shape:
            return product
        choices = [product, *(product.astype(half).astype(np.float32) for half in _HALVES)]
    return max(choices, key=lambda c: int(np.count_nonzero(c == stored)))


def closest_quant_bias(
    bias: F32 | None, deq_scale: F32, input_offset: F32, sums: NDArray[np.int64], found: NDArray[np.float64]
) -> NDArray[np.float64]:
    """quant_bias float64 [n]. bias / deq_scale is rounded to a half-precision type if most of `found` agree with that.

    The v1 command line keeps scales and biases in the model's dtype, and so the quotient, before it subtracts the
    offset.
    """
    exact = quant_bias(bias, deq_scale, input_offset, sums)
    if bias is None or _agreeing(exact, found) > len(found) // 2:
        return exact
    with np.errstate(all="ignore"):
        for half in _HALVES:
            if all(np.array_equal(x.astype(half).astype(np.float32), x) for x in (bias, deq_scale)):
                quotient = (bias / deq_scale).astype(half).astype(np.float64)
                rounded = np.rint(quotient - input_offset.astype(np.float64) * sums)
                if _agreeing(rounded, found) > len(found) // 2:
                    return rounded
    return exact


def _agreeing(want: NDArray[np.float64], found: NDArray[np.float64]) -> int:
    return int(np.count_nonzero(np.abs(want - found) <= 1))


def row_sums(codes: Any, rows: int, columns: int) -> NDArray[np.int64]:
    """Sums of the rows of int8 codes [rows, columns], read a few rows at a time. codes: a StoredArray."""
    out = np.empty(rows, np.int64)
    step = max(1, _CHUNK // max(1, columns))
    for a in range(0, rows, step):
        out[a : a + step] = codes.read(a, min(rows, a + step)).sum(1, dtype=np.int64)
    return out
