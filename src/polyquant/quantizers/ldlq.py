"""A weight to codes of least error on the inputs it was seen with: damping of the Hessian, and what to do where it is no use.

H = mean of x x^T + damping * mean(diag) * I. The damping makes a Hessian of few inputs definite, and stands for those not seen.
Source: Frantar et al. 2023 (arXiv 2210.17323), Chee et al. 2023 (arXiv 2307.13304); the figures are QTIP's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from polyquant.capabilities import FitsInputs
from polyquant.types import F32

__all__ = ["DAMPING", "Quantized", "quantize_trellis"]

DAMPING = (0.025, 0.1, 0.4)
"""Tried one after the other until the Hessian is positive definite."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """Codes of the codec's form, and what to say about them: empty where all went as planned."""

    codes: Any
    note: str = ""


def quantize_trellis(codec: FitsInputs, w: F32, hessian: F32 | None) -> Quantized:
    """A weight [N, K] -> codes. hessian: mean of x x^T over inputs, [K, K]; its diagonal [K]; or None: least error of the weight itself.

    A Hessian that holds no numbers or that no damping makes positive definite is left aside, and the note says so. Raises CodecError.
    """
    if hessian is None:
        return Quantized(codec.quantize(w))
    h = np.diag(hessian) if hessian.ndim == 1 else hessian
    mean = float(h.trace(dtype=np.float64)) / len(h)
    if not np.isfinite(mean) or mean <= 0 or not np.isfinite(h).all():
        return Quantized(codec.quantize(w), "not calibrated: its inputs are zero or not finite")
    for damping in DAMPING:
        damped = h.astype(np.float32)
        damped[np.diag_indices(len(damped))] += np.float32(damping * mean)
        try:
            codes = codec.quantize_for(w, damped)
        except np.linalg.LinAlgError:
            continue
        return Quantized(codes, "" if damping == DAMPING[0] else f"Hessian damped by {damping}")
    return Quantized(codec.quantize(w), "not calibrated: its Hessian is not positive definite")
