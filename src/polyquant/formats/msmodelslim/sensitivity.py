"""Which linear layers of an msModelSlim folder had better stay float: `--keep auto`.

Each layer alone is rounded as its type says, weights and inputs, in the float model, and the mean KL divergence of the next token's distribution from
the float model's is measured on the first calibration tokens. Such small errors add up nearly by their divergences; so the worst layers stay float
until what the rest does, summed up, is below the limit. The sum is then checked against all the rest rounded at once, and more layers stay float where
that finds more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from polyquant.calibration.sensitivity import Probe
from polyquant.calibration.stages import calibration_windows
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import PlanError, UnsupportedError
from polyquant.formats.msmodelslim.options import MsModelSlimOptions
from polyquant.formats.msmodelslim.prepare import Prepared, prepare
from polyquant.ops import affine
from polyquant.quantizers.affine import input_grid, quantize_linear
from polyquant.runtime.linear import Linear
from polyquant.runtime.load import load
from polyquant.runtime.model import Model
from polyquant.types import F32, Checkpoint, Weight

__all__ = ["LIMIT", "Proposal", "propose_keep"]

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
LIMIT = 0.01
"""Mean KL divergence in nats that a folder may be off by: about 1% of perplexity."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """keep: names of linear layers (without `.weight`) that stay float, worst first. alone: divergence that each layer's rounding does by itself, in
    nats; before, after: of the whole model with all of them rounded, and with all but `keep`."""

    keep: tuple[str, ...]
    alone: Mapping[str, float]
    before: float
    after: float


def propose_keep(
    source: Checkpoint,
    targets: Mapping[str, MsModelSlim],
    options: MsModelSlimOptions,
    limit: float = LIMIT,
    on_tensor: Callable[[int, int, str], None] | None = None,
) -> Proposal:
    """The layers to keep float so that the rest does at most `limit` nats. targets: codecs of the source's weights that would become codes.

    Raises PlanError without a calibration text or for a limit that is no positive number, UnsupportedError for a model that our decoder does not run.
    """
    if options.calibration is None:
        raise PlanError("--keep auto needs to see what the model computes", hint="add --calibration FILE")
    if not limit > 0:
        raise PlanError("no such limit of the error", expected="a divergence above 0, in nats", found=limit)
    model = load(source.path, activations="float")
    plain = replace(options, smooth=None, kv=None, effort=None)
    static = any(c.static for c in targets.values())
    prepared = prepare(source, plain, targets.items(), lambda _: None) if static else None
    probe = Probe(model, calibration_windows(model, options.calibration))
    rounder = _Rounder(model, targets, prepared)
    alone: dict[str, float] = {}
    for index in range(len(model.decoder.layers)):
        for name in rounder.names[index]:
            with rounder.rounded({name}):
                alone[name] = probe.divergence(index)
            if on_tensor is not None:
                on_tensor(len(alone), len(targets), name)
        probe.advance(index)
    if not alone:
        raise UnsupportedError(
            "the decoder multiplies with none of these weights", file=source.path, hint="leave out --keep auto"
        )
    probe.rewind()
    return _proposal(rounder, probe, alone, limit)


def _proposal(rounder: _Rounder, probe: Probe, alone: Mapping[str, float], limit: float) -> Proposal:
    """Keep the worst, first by their sum, then by what all the rest together does."""
    units: dict[str, list[str]] = {}
    for name in alone:
        units.setdefault(_fused(name), []).append(name)
    together = {unit: sum(alone[n] for n in members) for unit, members in units.items()}
    worst = sorted(units, key=lambda u: (-together[u], u))
    rest = np.cumsum([together[u] for u in reversed(worst)])[::-1]  # what the layers from i on do
    with rounder.rounded(set(alone)):
        before = probe.divergence(0)
    kept, after = 0, before
    while after > limit and kept < len(worst):
        more = after / max(float(rest[kept]), 1e-30)  # than their sum they really do
        kept = next((i for i in range(kept + 1, len(worst)) if more * rest[i] <= limit), len(worst))
        with rounder.rounded({n for u in worst[kept:] for n in units[u]}):
            after = probe.divergence(0)
    keep = tuple(n.removesuffix(".weight") for u in worst[:kept] for n in units[u])
    return Proposal(keep, {n.removesuffix(".weight"): d for n, d in alone.items()}, before, after)


def _fused(name: str) -> str:
    """The same for layers that runtimes make one matrix of."""
    module, last = name.removesuffix(".weight").rpartition(".")[::2]
    return next((f"{module}.{'+'.join(family)}" for family in _FUSED if last in family), name)


class _Rounder:
    """A model whose linears can be rounded within a block. names: of the weights of each layer that can."""

    def __init__(self, model: Model, targets: Mapping[str, MsModelSlim], prepared: Prepared | None) -> None:
        self._model, self._targets, self._prepared = model, targets, prepared
        self._places = [[(place, place.linear) for place in layer.places] for layer in model.decoder.layers]
        self.names = [[w.name for _, v in found for w in v.weights if w.name in targets] for found in self._places]

    @contextmanager
    def rounded(self, names: set[str]) -> Iterator[None]:
        """Within the block these weights are rounded, and the inputs that they read."""
        changed = []
        for place, linear in (found for layer in self._places for found in layer):
            if names & {w.name for w in linear.weights}:
                changed.append((place, linear))
                place.put(_Rounded(linear, [self._multiplier(w, names) for w in linear.weights]))
        try:
            yield
        finally:
            for place, linear in changed:
                place.put(linear)

    def _multiplier(self, weight: Weight, names: set[str]) -> _Multiplier | None:
        if weight.name not in names:
            return None
        codec = self._targets[weight.name]
        seen = None if self._prepared is None else self._prepared.input_range(weight.name)
        return _Multiplier(weight, codec, seen)


class _Multiplier:
    """One weight [N, K] as its codes: a byte a number."""

    def __init__(self, weight: Weight, codec: MsModelSlim, seen: tuple[float, float] | None) -> None:
        self.codec, self.seen = codec, seen
        self.codes = quantize_linear(codec, weight.dequantize(), input_range=seen)

    def __call__(self, x: F32, bias: F32 | None) -> F32:
        """x [T, K] -> [T, N]."""
        held = self.codes
        w = affine.decode(held.codes, held.scale, held.offset, np.empty(held.codes.shape, np.float32))
        y = self._inputs(x) @ w.T
        return y if bias is None else np.asarray(y + bias, np.float32)

    def _inputs(self, x: F32) -> F32:
        """x as its grid has it: fixed, of each token, or as it is."""
        if self.codec.static:
            assert self.seen is not None
            scale, offset = input_grid(self.seen, np.dtype(np.float32))
            return np.asarray((np.clip(np.rint(x / scale + offset), -128, 127) - offset) * scale, np.float32)
        if not self.codec.kind.endswith(".dynamic"):
            return x
        step = np.abs(x).max(1, keepdims=True) / np.float32(127)
        step[step == 0] = 1
        return np.asarray(np.rint(x / step) * step, np.float32)


class _Rounded:
    """A linear some of whose weights are rounded."""

    def __init__(self, linear: Linear, multipliers: Sequence[_Multiplier | None]) -> None:
        self.linear, self.multipliers = linear, multipliers

    def __call__(self, x: F32) -> Sequence[F32]:
        """As the linear."""
        plain: Sequence[F32 | None] = self.linear(x) if None in self.multipliers else [None] * len(self.multipliers)
        out = []
        for y, multiply, bias in zip(plain, self.multipliers, self.linear.bias, strict=True):
            found = multiply(x, bias) if multiply is not None else y
            assert found is not None
            out.append(found)
        return out
