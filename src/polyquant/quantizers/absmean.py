"""BitNet b1.58's quantizer: codes = round(w / s) clipped to -1..1, s = mean|w| of the tensor, at least 1e-5.

Source: "The Era of 1-bit LLMs" (2402.17764), eq. 1-3; arithmetic in float32 as in the reference trainer, the mean in
float64. A master weight is read twice in row blocks: once for the mean, once for the codes.
"""

from __future__ import annotations

import numpy as np

from polyquant.types import F32, Ternary, Weight, as_matrix

__all__ = ["absmean_codes", "absmean_floats"]

_BLOCK = 1 << 20


def _inverse_scale(weight: Weight) -> np.float32:
    """Return 1 / mean|w|."""
    rows, k = as_matrix(weight.shape)
    total = 0.0
    for part in _row_blocks(rows, k):
        total += float(np.abs(_block(weight, part, k)).sum(dtype=np.float64))
    return np.float32(1) / np.float32(max(total / max(1, rows * k), 1e-5))


def _row_blocks(rows: int, k: int) -> list[slice]:
    step = max(1, _BLOCK // max(1, k))
    return [slice(a, min(rows, a + step)) for a in range(0, rows, step)]


def _block(weight: Weight, part: slice, k: int) -> F32:
    return weight.codec.dequantize(weight.read(part), (part.stop - part.start, k))


def absmean_codes(weight: Weight) -> Ternary:
    """Return codes int8 [rows, K] and one scale for a float master weight."""
    rows, k = as_matrix(weight.shape)
    inverse = _inverse_scale(weight)
    codes = np.empty((rows, k), np.int8)
    for part in _row_blocks(rows, k):
        codes[part] = np.clip(np.rint(_block(weight, part, k) * inverse), -1, 1)
    return Ternary(codes, np.array([np.float32(1) / inverse], np.float32))


def absmean_floats(weight: Weight) -> F32:
    """Return the ternarized weight, codes * scale, float32 [rows, K]."""
    form = absmean_codes(weight)
    return form.codes.astype(np.float32) * form.scale
