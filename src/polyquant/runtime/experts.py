"""A mixture-of-experts feed-forward part: sum over the selected experts of weight_e * D_e activation(U_e x), plus a
shared expert.

It comes after the norm and does not depend on architecture records: the code that builds a layer provides its
components. For a single token it runs native steps only, including ids and weights, so a tape can record it
(runtime/step.py) if `ExpertLinear.kernel` is "packed".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from polyquant.errors import InputError
from polyquant.ops.decoder import add, swiglu
from polyquant.ops.experts import Ids, Routing, add_gated, combine, route, scaled_weights, weighted_inputs
from polyquant.runtime.expert_linear import ExpertLinear
from polyquant.runtime.linear import Linear
from polyquant.types import F32

__all__ = ["Activation", "Experts", "SharedExpert"]

Activation = Callable[..., F32]
"""The function between the matrices: from the outputs of the first, [rows, n] each, e.g. gate and up, to the input of
the second."""


class SharedExpert:
    """The expert that all tokens go to: D activation(U x), times sigmoid(gate x) if there is a gate [1, hidden]."""

    def __init__(
        self,
        gate_up: Linear,
        down: Linear,
        *,
        activation: Activation = swiglu,
        gate: Linear | None = None,
    ) -> None:
        self.gate_up, self.down, self.activation, self.gate = gate_up, down, activation, gate
        self.linears = ("gate_up", "down") if gate is None else ("gate_up", "down", "gate")

    def added(self, y: F32, x: F32) -> F32:
        """Return y plus this expert's output for x; [T, hidden] each."""
        (out,) = self.down(self.activation(*self.gate_up(x)))
        if self.gate is None:
            return add(y, out)
        (gate,) = self.gate(x)
        return add_gated(y, out, gate)


class Experts:
    """x [T, hidden] -> [T, hidden].

    router: returns logits [T, E], including its bias. bias: float32 [E], applies to the selection only.
    gate_up: stacks whose outputs the activation takes: gate and up, one fused stack (halves: gate first), or up only.
    weighted: the weights scale the experts' "outputs" or "inputs" (Llama 4).
    narrow, widen: projections before the routed experts and after their sum.
    factors: float32 [E], on the weight of each expert.

    Raises InputError if router, experts and routing are inconsistent.
    """

    stacks = ("gate_up", "down")

    def __init__(
        self,
        router: Linear,
        routing: Routing,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        *,
        bias: F32 | None = None,
        activation: Activation = swiglu,
        halves: bool = False,
        weighted: Literal["outputs", "inputs"] = "outputs",
        shared: SharedExpert | None = None,
        narrow: Linear | None = None,
        widen: Linear | None = None,
        factors: F32 | None = None,
    ) -> None:
        counts = [router.weights[0].shape[0], gate_up.experts, down.experts]
        if any(n != routing.experts for n in counts):
            raise InputError("router and experts are inconsistent", expected=f"{routing.experts} experts", found=counts)
        self.router, self.routing, self.bias = router, routing, bias
        self.gate_up, self.down, self.shared = gate_up, down, shared
        self.activation, self.halves, self.weighted, self.factors = activation, halves, weighted, factors
        self.narrow, self.widen = narrow, widen

    def __call__(self, x: F32) -> F32:
        """Return the sum of the selected experts: [T, hidden] -> [T, hidden]."""
        return self.computed(x, *self.chosen(x))

    def chosen(self, x: F32) -> tuple[Ids, F32]:
        """Route x [T, hidden]: ids and weights [T, used]."""
        (logits,) = self.router(x)
        ids, weights = route(logits, self.routing, self.bias)
        return ids, weights if self.factors is None else scaled_weights(weights, self.factors, ids)

    def computed(self, x: F32, ids: Ids, weights: F32) -> F32:
        """Return the combined output of these experts for x [T, hidden]."""
        inner = x if self.narrow is None else self.narrow(x)[0]
        outputs = self.gate_up(inner if self.weighted == "outputs" else weighted_inputs(inner, weights), ids)
        h = self.activation(*(np.split(outputs[0], 2, axis=1) if self.halves else outputs))
        (y,) = self.down(h, ids)
        out = combine(y, self.routing.used, weights if self.weighted == "outputs" else None)
        out = out if self.widen is None else self.widen(out)[0]
        return out if self.shared is None else self.shared.added(out, x)
