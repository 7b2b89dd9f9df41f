"""A gated feed-forward part behind an RMS norm: D [norm] (activation(gate) * up), [gate, up] = GU norm(x)."""

from __future__ import annotations

import numpy as np

from polyquant.architectures import parts
from polyquant.errors import UnsupportedError
from polyquant.ops.decoder import relu2_gate, swiglu
from polyquant.runtime.site import Site
from polyquant.types import F32

__all__ = ["FeedForward"]

_GATES = {"silu": swiglu, "swish": swiglu, "relu2": relu2_gate}


class FeedForward:
    """The feed-forward part of one layer. Raises UnsupportedError for an activation that the architecture does not have."""

    linears = ("gate_up", "down")

    def __init__(self, part: parts.FeedForward, site: Site) -> None:
        activation = site.hyper.activation
        if activation not in part.activations or activation not in _GATES:
            raise UnsupportedError(
                f"activation '{activation}' is not run in this architecture", file=site.tensors.checkpoint.path
            )
        self.gated, self.fused = _GATES[activation], part.fused
        self.norm = site.norm("ffn_norm")
        self.gate_up = site.linear(*part.inputs)
        self.sub_norm = site.norm("ffn_sub_norm") if part.sub_norm else None
        self.down = site.linear("ffn_down")

    def __call__(self, x: F32) -> F32:
        """x [T, hidden] -> [T, hidden]."""
        both = self.gate_up(self.norm(x))
        gate, up = np.split(both[0], 2, axis=1) if self.fused else both
        h = self.gated(gate, up)
        (out,) = self.down(h if self.sub_norm is None else self.sub_norm(h))
        return out
