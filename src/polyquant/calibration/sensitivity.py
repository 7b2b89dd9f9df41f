"""Sensitivity of the model to quantizing each tensor alone: the probe of `--target-bpw`.

Each weight is quantized to 3 bits while the rest stays float, and the mean KL divergence of the next-token distribution
from the float model's is measured on the first calibration tokens. For other bits the divergence is scaled by the ratio
of the codes' distortions, since small errors contribute by their energy. Layers before the weight are not run again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from polyquant.calibration.hessians import Hessians
from polyquant.calibration.stages import DecoderStages, calibration_windows
from polyquant.codecs.trellis import Trellis
from polyquant.ops.arithmetic import defined_order, exp
from polyquant.quantizers.ldlq import quantize_trellis
from polyquant.registry import codec
from polyquant.rows import in_memory
from polyquant.runtime.kv_cache import Passing
from polyquant.runtime.linear import Linear
from polyquant.runtime.load import load
from polyquant.runtime.model import Model
from polyquant.runtime.scoring import log_sum_exp
from polyquant.types import F32, Floats, Weight

__all__ = ["PROBE_BITS", "Probe", "divergences"]

PROBE_BITS = 3
_LOGITS = 1 << 26
_MOST, _LEAST = 2048, 256
"""Bounds on the tokens of the probe, whose reference logits should fit into 256 MB."""


def divergences(
    path: str | os.PathLike[str],
    text: str | os.PathLike[str],
    wanted: Mapping[str, Trellis],
    *,
    calibrated: bool,
    on_tensor: Callable[[int, int, str], None] | None = None,
) -> dict[str, float]:
    """Mean KL divergence in nats of each tensor's probe. wanted: tensor name in the checkpoint -> codec of the planned
    kind.

    calibrated: quantize with the Hessian. Tensors that the decoder does not use are omitted. Raises InputError,
    UnsupportedError.
    """
    model = load(path, activations="float")
    stages = DecoderStages(model, calibration_windows(model, text))
    probe = Probe(model, stages.windows)
    hessians = Hessians(stages, wanted) if calibrated else None
    out: dict[str, float] = {}
    for index, layer in enumerate(model.decoder.layers):
        for place in layer.places:
            linear = place.linear
            for i, weight in enumerate(linear.weights):
                if weight.name not in wanted:
                    continue
                h = hessians.of(weight.name)[0] if hessians is not None else None
                place.put(_with_probe(linear, i, wanted[weight.name], h))
                out[weight.name] = probe.divergence(index)
                place.put(linear)
                if on_tensor is not None:
                    on_tensor(len(out), len(wanted), weight.name)
        probe.advance(index)
    return out


def _with_probe(linear: Linear, index: int, kind: Trellis, h: F32 | None) -> Linear:
    """The linear with one weight quantized at PROBE_BITS."""
    weight, plain = linear.weights[index], codec("f32")
    grid = kind.codebook == "grid"
    coded = kind.configure(bits=PROBE_BITS, window_bits=PROBE_BITS if grid else min(12, kind.window_bits))
    parts = coded.pack(quantize_trellis(coded, weight.dequantize(), h).codes)
    decoded = coded.dequantize(parts, weight.shape)
    arrays = in_memory(plain.pack(Floats(decoded)))
    weights = list(linear.weights)
    weights[index] = Weight(weight.name, weight.shape, plain, arrays)
    return Linear(weights, linear.bias, linear.rounding)


class Probe:
    """The first calibration tokens, advancing layer by layer through the float model."""

    def __init__(self, model: Model, windows: Sequence[np.ndarray]) -> None:
        self.decoder = model.decoder
        budget = min(_MOST, max(_LEAST, _LOGITS // model.vocab))
        length = min(budget, max(64, budget // 4), len(windows[0]))
        count = max(1, budget // length)
        spread = np.linspace(0, len(windows) - 1, min(count, len(windows))).astype(int)
        tokens = [windows[i][:length] for i in spread]
        self._tokens = tokens
        self.rewind()
        self.reference = [self._log_probs(x) for x in self._through(0)]

    def rewind(self) -> None:
        """Return to the first layer."""
        caches = [self.decoder.cache() for _ in self._tokens]
        with defined_order():
            self.states: list[F32] = [
                next(self.decoder.states(t, c)).copy() for t, c in zip(self._tokens, caches, strict=True)
            ]
        self.passing: list[Passing] = [c.passing for c in caches]

    def advance(self, index: int) -> None:
        """Advance through a float layer."""
        pairs = zip(self.states, self.passing, strict=True)
        self.states = [self._alone(index, x.copy(), passing) for x, passing in pairs]

    def divergence(self, index: int) -> float:
        """Mean KL divergence of the current model, whose layers before `index` are float."""
        total = count = 0.0
        for x, p in zip(self._through(index), self.reference, strict=True):
            q = self._log_probs(x)
            with defined_order():
                total += float((exp(p) * (p - q)).sum(dtype=np.float64))
            count += len(x)
        return max(total / count, 1e-12)

    def _through(self, index: int) -> list[F32]:
        """The states [T, hidden] of each window after the layers from `index` on."""
        out = []
        for state, before in zip(self.states, self.passing, strict=True):
            x, passing = state.copy(), dict(before)
            for i in range(index, len(self.decoder.layers)):
                x = self._alone(i, x, passing)
            out.append(x)
        return out

    def _alone(self, index: int, x: F32, passing: Passing) -> F32:
        cache = self.decoder.cache()
        cache.passing = passing
        with defined_order():
            return self.decoder.run_layer(index, x, cache)

    def _log_probs(self, x: F32) -> F32:
        with defined_order():
            logits = self.decoder.logits(self.decoder.norm(x))
            return logits - log_sum_exp(logits)[:, None].astype(np.float32)
