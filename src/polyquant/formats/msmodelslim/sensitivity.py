"""Find linear layers of an msModelSlim folder that should stay float: `--keep auto`.

Each layer alone is quantized with its type, weights and inputs, in the float model, and the mean KL divergence of the
next-token distribution from the float model's is measured on the first calibration tokens. Such small divergences are
nearly additive; so the worst layers stay float until the sum over the rest is below the limit. The sum is then compared
with all of the rest quantized at once, and more layers stay float if that divergence is larger.
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
from polyquant.ops.arithmetic import matmul
from polyquant.quantizers.affine import input_grid, quantize_linear
from polyquant.runtime.linear import Linear
from polyquant.runtime.load import load
from polyquant.runtime.model import Model
from polyquant.types import F32, Checkpoint, Weight

__all__ = ["LIMIT", "Proposal", "propose_keep"]

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
LIMIT = 0.01
"""Default limit of the mean KL divergence in nats: about 1% of perplexity."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """The proposed layers.

    keep: names of linear layers (without `.weight`) that stay float, worst first. alone: divergence from quantizing
    each layer alone, in nats; before, after: of the model with all of them quantized, and with all except `keep`.
    """

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
    """Choose the layers to keep float so that the rest causes at most `limit` nats. targets: codecs of the source's
    weights to be quantized.

    Raises PlanError without a calibration text or for a limit that is not positive, UnsupportedError for a model that
    the decoder does not run.
    """
    if options.calibration is None:
        raise PlanError("--keep auto needs calibration", hint="add --calibration FILE")
    if not limit > 0:
        raise PlanError("--keep-error must be positive", expected="a divergence above 0, in nats", found=limit)
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
        raise UnsupportedError("the decoder uses none of these weights", file=source.path, hint="omit --keep auto")
    probe.rewind()
    return _proposal(rounder, probe, alone, limit)


def _proposal(rounder: _Rounder, probe: Probe, alone: Mapping[str, float], limit: float) -> Proposal:
    """Keep the worst layers, first by the sum, then by the divergence of all the rest together."""
    units: dict[str, list[str]] = {}
    for name in alone:
        units.setdefault(_fused(name), []).append(name)
    together = {unit: sum(alone[n] for n in members) for unit, members in units.items()}
    worst = sorted(units, key=lambda u: (-together[u], u))
    rest = np.cumsum([together[u] for u in reversed(worst)])[::-1]  # divergence of the layers from i on
    with rounder.rounded(set(alone)):
        before = probe.divergence(0)
    kept, after = 0, before
    while after > limit and kept < len(worst):
        more = after / max(float(rest[kept]), 1e-30)  # actual divergence relative to the sum
        kept = next((i for i in range(kept + 1, len(worst)) if more * rest[i] <= limit), len(worst))
        with rounder.rounded({n for u in worst[kept:] for n in units[u]}):
            after = probe.divergence(0)
    keep = tuple(n.removesuffix(".weight") for u in worst[:kept] for n in units[u])
    return Proposal(keep, {n.removesuffix(".weight"): d for n, d in alone.items()}, before, after)


def _fused(name: str) -> str:
    """The same name for layers that runtimes fuse to one matrix."""
    module, last = name.removesuffix(".weight").rpartition(".")[::2]
    return next((f"{module}.{'+'.join(family)}" for family in _FUSED if last in family), name)


class _Rounder:
    """A model whose linear layers can be quantized within a block. names: quantizable weights per layer."""

    def __init__(self, model: Model, targets: Mapping[str, MsModelSlim], prepared: Prepared | None) -> None:
        self._model, self._targets, self._prepared = model, targets, prepared
        self._places = [[(place, place.linear) for place in layer.places] for layer in model.decoder.layers]
        self.names = [[w.name for _, v in places for w in v.weights if w.name in targets] for places in self._places]

    @contextmanager
    def rounded(self, names: set[str]) -> Iterator[None]:
        """Quantize these weights and their inputs within the block."""
        changed = []
        for place, linear in (pair for layer in self._places for pair in layer):
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
    """One weight [N, K] as codes of one byte per element."""

    def __init__(self, weight: Weight, codec: MsModelSlim, seen: tuple[float, float] | None) -> None:
        self.codec, self.seen = codec, seen
        self.codes = quantize_linear(codec, weight.dequantize(), input_range=seen)

    def __call__(self, x: F32, bias: F32 | None) -> F32:
        """x [T, K] -> [T, N]."""
        held = self.codes
        w = affine.decode(held.codes, held.scale, held.offset, np.empty(held.codes.shape, np.float32))
        y = matmul(self._inputs(x), w.T)
        return y if bias is None else np.asarray(y + bias, np.float32)

    def _inputs(self, x: F32) -> F32:
        """Quantize x on its grid: static, per token, or not at all."""
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
    """A linear layer with some quantized weights."""

    def __init__(self, linear: Linear, multipliers: Sequence[_Multiplier | None]) -> None:
        self.linear, self.multipliers = linear, multipliers

    def __call__(self, x: F32) -> Sequence[F32]:
        """Call the linear layer."""
        plain: Sequence[F32 | None] = self.linear(x) if None in self.multipliers else [None] * len(self.multipliers)
        out = []
        for y, multiply, bias in zip(plain, self.multipliers, self.linear.bias, strict=True):
            product = multiply(x, bias) if multiply is not None else y
            assert product is not None
            out.append(product)
        return out
