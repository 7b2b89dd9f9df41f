"""Errors of each layer's outputs: a quantized model and its float original read the same text on the same layer inputs.

Every layer of both models gets the states of the float model, so that an error belongs to one layer and not to earlier
ones. The quantized model computes with the integer activations and caches of its format. Memory: the states of all
windows, float32 [T, hidden].

    error = |y - y_float| / |y_float|        of a linear layer's outputs, or of a layer's residual contribution

Smoothing may scale the channels of an output (v before o, up before down). If per-channel factors explain most of the
difference, the error is the remainder, and the entry is marked `scaled`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyquant.calibration.hessians import Tick
from polyquant.calibration.stages import calibration_windows
from polyquant.errors import InputError
from polyquant.operations import Index, Rows
from polyquant.runtime.decoder import Layer
from polyquant.runtime.linear import Linear
from polyquant.runtime.load import load
from polyquant.runtime.model import Model
from polyquant.types import F32

__all__ = ["LayerErrors", "OutputError", "compare_outputs"]

_Order: TypeAlias = slice | Index
WINDOWS, TOKENS = 16, 256
_SCALED = 0.25  # factors explain more than this only if channels were scaled on purpose


@dataclass(frozen=True, slots=True)
class OutputError:
    """Error relative to the norm of the float output. scaled: up to a factor per channel."""

    error: float
    scaled: bool = False


@dataclass(frozen=True, slots=True)
class LayerErrors:
    """One layer: its linear layers by name in the quantized checkpoint, and the layer as a whole."""

    index: int
    linears: dict[str, OutputError]
    layer: float


class _Sums:
    """Per-channel squares and products of two outputs, float64 [N]."""

    def __init__(self, size: int) -> None:
        self.aa, self.bb, self.ab = (np.zeros(size) for _ in range(3))

    def add(self, a: F32, b: F32) -> None:
        """Add outputs a of the float model and b of the other, [T, N]."""
        for total, x, y in ((self.aa, a, a), (self.bb, b, b), (self.ab, a, b)):
            np.add(total, np.einsum("ti,ti->i", x, y, dtype=np.float64), out=total)

    @property
    def error(self) -> OutputError:
        """The relative error, up to a factor per channel if that explains most of it."""
        total = self.aa.sum()
        if not total > 0:
            return OutputError(0.0 if not self.bb.any() else float("inf"))
        plain = max(0.0, (self.aa - 2 * self.ab + self.bb).sum() / total)
        fitted = max(
            0.0, (self.aa - np.divide(self.ab**2, self.bb, out=np.zeros_like(self.ab), where=self.bb > 0)).sum() / total
        )
        scaled = bool(plain > 1e-4 and fitted < _SCALED**2 * plain)
        return OutputError(float(np.sqrt(fitted if scaled else plain)), scaled)


def compare_outputs(
    reference: str | os.PathLike[str],
    candidate: str | os.PathLike[str],
    text: str | os.PathLike[str],
    *,
    windows: int = WINDOWS,
    tokens: int = TOKENS,
    tick: Tick | None = None,
) -> list[LayerErrors]:
    """Errors of all layers of `candidate` against the float model `reference` on a UTF-8 text.

    The text may also be samples, see calibration_windows. Raises InputError for models of different shape or too little
    text, UnsupportedError for models that the decoder does not run.
    """
    exact, model = load(reference, activations="float"), load(candidate)
    if (exact.decoder.hyper.layers, exact.decoder.hyper.hidden) != (
        model.decoder.hyper.layers,
        model.decoder.hyper.hidden,
    ):
        raise InputError(
            "not the same model as the reference",
            file=candidate,
            expected=f"{exact.decoder.hyper.layers} layers of {exact.decoder.hyper.hidden}",
            found=f"{model.decoder.hyper.layers} of {model.decoder.hyper.hidden}",
        )
    inputs = calibration_windows(exact, text, windows=windows, tokens=tokens)
    states = [next(exact.decoder.states(ids, exact.decoder.cache())).copy() for ids in inputs]
    out = []
    for index in range(exact.decoder.hyper.layers):
        out.append(_layer(exact, model, index, states))
        if tick is not None:
            tick((index + 1) / exact.decoder.hyper.layers)
    return out


def _layer(exact: Model, model: Model, index: int, states: list[F32]) -> LayerErrors:
    """Errors of one layer; `states` advance through the float model."""
    sums: dict[str, _Sums] = {}
    orders = _orders(exact, model, index)
    missed = added = 0.0
    for i, x in enumerate(states):
        wanted, y = _outputs(exact, index, x)
        actual, z = _outputs(model, index, x)
        for (name, a), b, (first, second) in zip(wanted.items(), actual.values(), orders, strict=True):
            sums.setdefault(name, _Sums(a.shape[1])).add(a[:, first], b[:, second])
        missed += float(np.square(z - y, dtype=np.float64).sum())
        added += float(np.square(y - x, dtype=np.float64).sum())
        states[i] = y
    errors = dict(zip(_names(model, index), (s.error for s in sums.values()), strict=True))
    return LayerErrors(index, errors, float(np.sqrt(missed / added)) if added else 0.0)


def _orders(exact: Model, model: Model, index: int) -> list[tuple[_Order, _Order]]:
    """Orders of the outputs of each linear, in both models, that make them equal: GGUF permutes rows of q and k."""
    names = zip(_names(exact, index), _names(model, index), strict=True)
    if exact.checkpoint.naming == model.checkpoint.naming:
        return [(slice(None), slice(None)) for _ in names]
    return [(_order(exact, model, b), _order(model, exact, a)) for a, b in names]


def _names(model: Model, index: int) -> list[str]:
    """Names of a layer's matrices, in the order of their outputs."""
    return [w.name for place in model.decoder.layers[index].places for w in place.linear.weights]


def _order(own: Model, other: Model, name: str) -> _Order:
    """The order in which the outputs of `own` are those of the tensor `name` of `other`."""
    change = own.architecture.change(name) if other.checkpoint.naming == "gguf" else None
    if change is None or (weight := other.checkpoint.weights.get(name)) is None or len(weight.shape) != 2:
        return slice(None)
    op = change.operation(own.decoder.hyper, change.source(own.decoder.hyper, weight.shape))
    return op.order if isinstance(op, Rows) and op.axis == 0 else slice(None)


def _outputs(model: Model, index: int, x: F32) -> tuple[dict[str, F32], F32]:
    """Outputs of the linear layers [T, N], by place, and of the layer, for input x [T, hidden]."""
    seen: dict[str, F32] = {}
    with _watched(model.decoder.layers[index], seen):
        return seen, model.decoder.run_layer(index, x, model.decoder.cache()).copy()


@contextmanager
def _watched(layer: Layer, seen: dict[str, NDArray[np.float32]]) -> Iterator[None]:
    """Record the outputs of the layer's linears in `seen` within the block."""
    linears = [(place, place.linear) for place in layer.places]

    def watch(number: int, linear: Linear, x: F32) -> Sequence[F32]:
        y = linear(x)
        seen.update({f"{number}.{i}": out.copy() for i, out in enumerate(y)})
        return y

    for number, (place, linear) in enumerate(linears):
        place.put(lambda x, number=number, linear=linear: watch(number, linear, x))
        seen.update({f"{number}.{i}": np.empty((0, 0), np.float32) for i in range(len(linear.weights))})
    try:
        yield
    finally:
        for place, linear in linears:
            place.put(linear)
