"""Ranges of linear layer inputs and of cached keys and values, gathered per window of the calibration text.

A window is a sample. Minimum and maximum of every channel are kept per sample, so that ranges can be taken over all
samples or as means of samples, also for inputs that are scaled or shifted per channel later. Memory: 8 bytes per
channel and sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError
from polyquant.types import F32

__all__ = ["CacheRanges", "Extremes", "InputRanges", "InputSizes"]


class Extremes:
    """Minimum and maximum of every channel over all inputs, float32 [K] each; None before the first ones."""

    def __init__(self, k: int = 0) -> None:
        del k  # as other gatherers are made
        self.low: F32 | None = None
        self.high: F32 | None = None

    def add(self, x: NDArray[Any]) -> None:
        """Add inputs x [T, ...]; the last axes are channels."""
        if not len(x):
            return
        low, high = (f(x.reshape(len(x), -1), axis=0).astype(np.float32) for f in (np.min, np.max))
        self.low = low if self.low is None else np.minimum(self.low, low)
        self.high = high if self.high is None else np.maximum(self.high, high)

    def merge(self, other: Extremes) -> None:
        """Add what another one has gathered."""
        if other.low is not None and other.high is not None:
            self.low = other.low if self.low is None else np.minimum(self.low, other.low)
            self.high = other.high if self.high is None else np.maximum(self.high, other.high)

    def parts(self) -> dict[str, Any]:
        """See calibration/shared.py: Kept."""
        return {"low": self.low, "high": self.high}

    @classmethod
    def restored(cls, parts: Mapping[str, Any]) -> Extremes:
        """See calibration/shared.py: Kept."""
        out = cls()
        out.low, out.high = parts["low"], parts["high"]
        return out


class InputRanges:
    """Ranges of the inputs [T, K] of a linear layer.

    low, high: float32 [K] per sample; total: sum of inputs, float64 [K]; count: tokens.
    """

    def __init__(self, k: int) -> None:
        self.low: list[F32] = []
        self.high: list[F32] = []
        self.total, self.count = np.zeros(k), 0

    def add(self, x: F32) -> None:
        """Add the inputs of one sample, [T, K]."""
        if len(x):
            self.low.append(x.min(0))
            self.high.append(x.max(0))
            self.total += x.sum(0, dtype=np.float64)
            self.count += len(x)

    def merge(self, other: InputRanges) -> None:
        """Add what another one has gathered from later windows."""
        self.low += other.low
        self.high += other.high
        self.total, self.count = self.total + other.total, self.count + other.count

    def parts(self) -> dict[str, Any]:
        """See calibration/shared.py: Kept."""
        return {"low": list(self.low), "high": list(self.high), "total": self.total, "count": self.count}

    @classmethod
    def restored(cls, parts: Mapping[str, Any]) -> InputRanges:
        """See calibration/shared.py: Kept."""
        out = cls(len(parts["total"]))
        out.low, out.high, out.total, out.count = parts["low"], parts["high"], parts["total"], parts["count"]
        return out

    @property
    def extremes(self) -> tuple[F32, F32]:
        """Minimum and maximum of every channel over all samples, [K] each.

        Raises InputError if missing or not finite.
        """
        if not self.low:
            raise InputError("not calibrated: no inputs seen", hint="give a longer text, or --keep this layer")
        low, high = np.min(self.low, axis=0), np.max(self.high, axis=0)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise InputError("activations of the float model are not finite on the calibration text")
        return low, high

    @property
    def mean(self) -> F32:
        """Mean of every channel over all tokens, [K]."""
        return np.asarray(self.total / max(1, self.count), np.float32)

    def range(self, scale: F32 | None, shift: F32 | None, *, mean: bool) -> tuple[float, float]:
        """Minimum and maximum of (x - shift) / scale, both [K] and scale > 0: over all samples, or means over samples.

        Raises InputError.
        """
        self.extremes  # noqa: B018 - raises if there are no inputs
        low, high = np.stack(self.low), np.stack(self.high)
        if shift is not None:
            low, high = low - shift, high - shift
        if scale is not None:
            low, high = low / scale, high / scale
        if not mean:
            return float(low.min()), float(high.max())
        return float(low.min(1).mean(dtype=np.float64)), float(high.max(1).mean(dtype=np.float64))


class InputSizes:
    """Mean magnitudes of the inputs [T, K] of a linear layer.

    magnitudes, squares: sums of |x| and x^2, float64 [K]; count: tokens.
    """

    def __init__(self, k: int) -> None:
        self.magnitudes, self.squares, self.count = np.zeros(k), np.zeros(k), 0

    def add(self, x: F32) -> None:
        """Add the inputs of one sample, [T, K]."""
        self.magnitudes += np.abs(x).sum(0, dtype=np.float64)
        self.squares += np.square(x, dtype=np.float64).sum(0)
        self.count += len(x)

    def merge(self, other: InputSizes) -> None:
        """Add what another one has gathered from later windows."""
        self.magnitudes, self.squares = self.magnitudes + other.magnitudes, self.squares + other.squares
        self.count += other.count

    def parts(self) -> dict[str, Any]:
        """See calibration/shared.py: Kept."""
        return {"magnitudes": self.magnitudes, "squares": self.squares, "count": self.count}

    @classmethod
    def restored(cls, parts: Mapping[str, Any]) -> InputSizes:
        """See calibration/shared.py: Kept."""
        out = cls(len(parts["magnitudes"]))
        out.magnitudes, out.squares, out.count = parts["magnitudes"], parts["squares"], parts["count"]
        return out

    @property
    def means(self) -> tuple[F32, F32]:
        """Mean |x| and mean x^2 of every channel, [K] each. Raises InputError if missing or not finite."""
        if not self.count:
            raise InputError("not calibrated: no inputs seen", hint="give a longer text")
        if not np.isfinite(self.squares).all():
            raise InputError("activations of the float model are not finite on the calibration text")
        return tuple(np.asarray(x / self.count, np.float32) for x in (self.magnitudes, self.squares))  # type: ignore[return-value]


class CacheRanges:
    """Ranges of the keys and values [T, C] of one attention.

    before: keys as the linear layer outputs them, before norm and rotation; else as cached.
    """

    def __init__(self, *, before: bool) -> None:
        self.before = before
        self._keys, self._values = Extremes(), Extremes()

    def add(self, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Add one sample: [T, ...] each; the last axes are channels."""
        self._keys.add(keys)
        self._values.add(values)

    def merge(self, other: CacheRanges) -> None:
        """Add what another one has gathered."""
        self._keys.merge(other._keys)
        self._values.merge(other._values)

    def parts(self) -> dict[str, Any]:
        """See calibration/shared.py: Kept."""
        return {"before": self.before, "keys": self._keys.parts(), "values": self._values.parts()}

    @classmethod
    def restored(cls, parts: Mapping[str, Any]) -> CacheRanges:
        """See calibration/shared.py: Kept."""
        out = cls(before=parts["before"])
        out._keys, out._values = Extremes.restored(parts["keys"]), Extremes.restored(parts["values"])
        return out

    @property
    def keys(self) -> tuple[F32, F32]:
        """Minimum and maximum of every channel, [C] each. Raises InputError."""
        return _cached(self._keys)

    @property
    def values(self) -> tuple[F32, F32]:
        """Minimum and maximum of every channel, [C] each. Raises InputError."""
        return _cached(self._values)


def _cached(found: Extremes) -> tuple[F32, F32]:
    """The range of keys or values. Raises InputError if missing or not finite."""
    if found.low is None or found.high is None:
        raise InputError("not calibrated: the model filled no cache")
    if not (np.isfinite(found.low).all() and np.isfinite(found.high).all()):
        raise InputError("the float model's own keys or values are not finite on the calibration text")
    return found.low, found.high
