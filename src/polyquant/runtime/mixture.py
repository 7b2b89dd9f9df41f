"""A mixture-of-experts part, built from an architecture's record (architectures/mixture.py) and a checkpoint's
tensors."""

from __future__ import annotations

from functools import partial
from typing import get_args

import numpy as np

from polyquant.architectures.keys import GATING
from polyquant.architectures.mixture import Mixture as Record
from polyquant.errors import UnsupportedError
from polyquant.ops.activations import ACTIVATIONS, activate, gated
from polyquant.ops.experts import Gating, Routing, clamped_swiglu
from polyquant.runtime.expert_linear import ExpertLinear
from polyquant.runtime.experts import Activation, Experts, SharedExpert
from polyquant.runtime.feed_forward import FeedForward
from polyquant.runtime.site import Site
from polyquant.types import F32, Shape

__all__ = ["Mixture", "feed_forward", "stacks"]

_GATINGS: dict[int, Gating] = {GATING[name]: name for name in get_args(Gating)}


def feed_forward(part: Record, site: Site) -> FeedForward | Mixture:
    """Return the part of layer `site.index`: experts, or a dense feed-forward part."""
    return Mixture(part, site) if part.has_experts(site.hyper, site.index) else FeedForward(part.dense, site)


class Mixture(Experts):
    """Experts after a norm."""

    def __init__(self, part: Record, site: Site) -> None:
        activation = _activation(part, site)
        shapes = part.shapes(site.hyper, site.index)
        self.norm = site.norm(part.norm)
        self.post_norm = site.norm("post_ffw_norm") if part.post_norm else None
        super().__init__(
            site.linear("ffn_gate_inp"),
            _routing(part, site),
            stacks(site, shapes, *(f"{stem}_exps" for stem in part.inputs)),
            stacks(site, shapes, "ffn_down_exps"),
            bias=site.optional_bias("exp_probs_b", site.hyper.count("experts")),
            activation=activation,
            weighted=part.weighted,
            shared=_shared(part, site, activation) if part.shared else None,
            narrow=site.linear("ffn_latent_down") if "ffn_latent_down" in shapes else None,
            widen=site.linear("ffn_latent_up") if "ffn_latent_up" in shapes else None,
        )
        self.linears = ("router",) if self.narrow is None else ("router", "narrow", "widen")
        self.nested = () if self.shared is None else (self.shared,)
        self.recordable = self.gate_up.kernel == "packed" and self.down.kernel == "packed"

    def __call__(self, x: F32) -> F32:
        """x [T, hidden] -> [T, hidden]."""
        out = super().__call__(self.norm(x))
        return out if self.post_norm is None else self.post_norm(out)


def _activation(part: Record, site: Site) -> Activation:
    name = site.hyper.activation
    if name not in part.activations:
        raise UnsupportedError(
            f"activation '{name}' is not supported in this architecture", file=site.tensors.checkpoint.path
        )
    if part.clamped:
        return clamped_swiglu
    return partial(gated if part.gated else activate, ACTIVATIONS[name])


def _routing(part: Record, site: Site) -> Routing:
    hyper = site.hyper
    normed = bool(hyper.count("expert_norm")) if "expert_norm" in hyper.more else part.normed
    return Routing(
        hyper.count("experts"),
        hyper.count("experts_used"),
        _GATINGS.get(hyper.count("gating"), part.gating),
        norm=normed,
        scale=hyper.real("expert_scale", 1.0),
        groups=max(1, hyper.count("expert_groups")),
        groups_used=max(1, hyper.count("expert_groups_used")),
        group_score=part.group_score,
        eps=part.eps,
        least=part.least,
    )


def stacks(site: Site, shapes: dict[str, Shape], *stems: str) -> ExpertLinear:
    """Return stacks with a common input."""
    stacks = [site.stack(stem, shapes[stem]) for stem in stems]
    biases = [site.optional_bias(stem, *shapes[stem][:2]) for stem in stems]
    return ExpertLinear(stacks, [None if b is None else np.ascontiguousarray(b) for b in biases], site.tensors.rounding)


def _shared(part: Record, site: Site, activation: Activation) -> SharedExpert:
    return SharedExpert(
        site.linear(*(f"{stem}_shexp" for stem in part.inputs)),
        site.linear("ffn_down_shexp"),
        activation=activation,
        gate=site.linear("ffn_gate_inp_shexp") if part.shared_gate else None,
    )
