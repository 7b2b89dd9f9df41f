"""Scale the inputs of linear layers before quantization so that channels with large inputs lose less (AWQ).

    s = mean|x| ^ a, divided by sqrt(max s * min s)        a from 0 (no scaling) to 1 in steps of 0.1

The columns of the layers that read an input are multiplied by s, and what feeds them is divided: the model computes the
same (formats/smoothing.py). The exponent is the one with which the quantized weights have the least error, weighted
with the mean squares of the inputs. Source: Lin et al. 2023 (arXiv 2306.00978); there the error is that of the layer's
outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from polyquant.calibration.statistics import InputSizes
from polyquant.codecs.affine_codec import AffineCodec, decoded_rows
from polyquant.codecs.keeping import Integers
from polyquant.formats.smoothing import Smoothing, floats
from polyquant.ops import exact
from polyquant.quantizers.grouped import quantize
from polyquant.types import F32

__all__ = ["Scaling"]

_STEPS = 10
_ROWS = 256
"""Rows of a matrix on which an exponent is judged."""
_LEAST = 1e-4


@dataclass(slots=True)
class Scaling(Smoothing):
    """Factors by tensor name. codecs: of the quantized weights, by the name of their source."""

    codecs: Mapping[str, AffineCodec] = field(default_factory=dict)

    def _scale(self, readers: Sequence[str], inputs: InputSizes) -> tuple[F32, F32 | None]:
        magnitudes, squares = inputs.means
        judged = [r for r in readers if r in self.codecs]
        rows = {name: self._rows(name) for name in judged}
        best, least = np.ones(len(magnitudes), np.float32), np.inf
        for step in range(_STEPS + 1) if judged else ():
            scale = _scales(magnitudes, step / _STEPS)
            error = sum(_error(self.codecs[name].integers, w, scale, squares) for name, w in rows.items())
            if error < least:
                best, least = scale, error
        return best, None

    def _rows(self, name: str) -> F32:
        """Evenly spaced rows of a weight, with the row factors so far."""
        n = self.source[name].shape[0]
        index = np.unique(np.linspace(0, n - 1, min(n, _ROWS)).astype(np.int64))
        weight = self.source[name]
        if not weight.codec.row_sliced:
            return self.weight(name, floats(weight, slice(0, n))[index], index)
        w = np.concatenate([floats(weight, slice(int(i), int(i) + 1)) for i in index])
        return self.weight(name, w, index)


def _scales(magnitudes: F32, exponent: float) -> F32:
    """s [K], with the geometric mean of its extremes 1."""
    wide = np.maximum(magnitudes.astype(np.float64), _LEAST)
    scale = exact.power(wide, exponent)
    return np.asarray(scale / np.sqrt(scale.max() * scale.min()), np.float32)


def _error(traits: Integers, w: F32, scale: F32, squares: F32) -> float:
    """Sum of squares of x (W' - W) for inputs of these mean squares, W' being quantized after scaling."""
    codes = quantize(traits, w * scale, np.asarray(squares / np.square(scale), np.float32))
    return float((np.square(decoded_rows(codes) / scale - w, dtype=np.float64) * squares).sum())
