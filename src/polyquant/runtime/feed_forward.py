"""A feed-forward part: [norm] D [norm] (activation(gate) * up), [gate, up] = GU [norm] x; ungated: D activation(U x).

See parts.FeedForward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from polyquant.architectures import parts
from polyquant.errors import UnsupportedError
from polyquant.ops.activations import ACTIVATIONS, activate, gated, xielu
from polyquant.runtime.site import Site
from polyquant.types import F32

__all__ = ["FeedForward"]


class FeedForward:
    """The feed-forward part of one layer.

    Raises UnsupportedError for an activation that the architecture does not support.
    """

    linears = ("gate_up", "down")

    def __init__(self, part: parts.FeedForward, site: Site) -> None:
        activation = site.hyper.activation
        if activation not in part.activations:
            raise UnsupportedError(
                f"activation '{activation}' is not supported in this architecture", file=site.tensors.checkpoint.path
            )
        self.middle = _middle(part, site)
        self.fused = part.fused
        self.norm = site.norm(part.norm) if part.norm else None
        self.gate_up = site.linear(*part.inputs)
        self.sub_norm = site.norm("ffn_sub_norm") if part.sub_norm else None
        self.down = site.linear("ffn_down")
        self.post_norm = site.norm("post_ffw_norm") if part.post_norm else None

    def __call__(self, x: F32) -> F32:
        """x [T, hidden] -> [T, hidden]."""
        outputs: Sequence[F32] = self.gate_up(x if self.norm is None else self.norm(x))
        h: F32 = self.middle(*(np.split(outputs[0], 2, axis=1) if self.fused else outputs))
        (out,) = self.down(h if self.sub_norm is None else self.sub_norm(h))
        return out if self.post_norm is None else self.post_norm(out)


def _middle(part: parts.FeedForward, site: Site) -> Callable[..., F32]:
    """Return the function between the matrices. xIELU applies softplus to its two learned scalars (Huang and Schlag
    2024)."""
    activation = site.hyper.activation
    if activation != "xielu":
        return partial(gated if part.gated else activate, ACTIVATIONS[activation])
    positive, negative, beta, eps = (site.number(f"xielu.{key}") for key in ("alpha_p", "alpha_n", "beta", "eps"))
    return partial(xielu, positive=_softplus(positive), negative=beta + _softplus(negative), beta=beta, eps=eps)


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
