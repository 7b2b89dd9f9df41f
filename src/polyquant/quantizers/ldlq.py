"""Quantization with a calibration Hessian: damping, and fallbacks for unusable Hessians.

H = mean of x x^T + damping * mean(diag) * I. Damping makes a Hessian from few inputs positive definite and accounts for
unseen inputs. Source: Frantar et al. 2023 (arXiv 2210.17323), Chee et al. 2023 (arXiv 2307.13304); the damping values
are QTIP's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from polyquant.capabilities import FitsInputs
from polyquant.types import F32

__all__ = ["DAMPING", "Quantized", "quantize_trellis"]

DAMPING = (0.025, 0.1, 0.4)
"""Damping values, tried in order until the Hessian is positive definite."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """Codes of the codec's form, and a note on them; empty if all went as planned."""

    codes: Any
    note: str = ""


def quantize_trellis(codec: FitsInputs, w: F32, hessian: F32 | None) -> Quantized:
    """Quantize a weight [N, K]. Raises CodecError.

    hessian: mean of x x^T over inputs, [K, K]; or its diagonal [K]; None: minimise the weight error. A Hessian that is
    zero, not finite, or that no damping makes positive definite is ignored, and the note tells so.
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
