"""The mixture-of-experts feed-forward part, as a value: see parts.py.

GGUF stacks the experts: [experts, width, hidden] and [experts, hidden, width]. Layers before `first_dense` have no
experts; of the others, every `expert_step`-th has them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from polyquant.architectures.hyper import Hyper
from polyquant.architectures.parts import Feed, FeedForward
from polyquant.types import Shape

__all__ = ["Mixture"]


@dataclass(frozen=True, slots=True)
class Mixture:
    """A router and experts after a norm; a dense feed-forward part in layers without experts.

    dense: the part of layers without experts. norm: stem of the norm before it. post_norm: whether a norm follows.
    gated: experts compute activation(gate) * up, else activation(up). clamped: GPT-OSS's product of gate and up.
    gating, normed: how logits become weights, unless Hyper's `gating` and `expert_norm` specify it.
    eps, least: weights are divided by max(their sum, least) + eps. group_score: the score of a group of experts.
    weighted: whether the weights scale the experts' outputs or inputs.
    shared: whether there is a shared expert for all tokens. shared_gate: whether it is gated.
    latent: whether the routed experts work in a space of Hyper's expert_latent dimensions, with a matrix into it and
    one back.
    """

    dense: FeedForward = field(default_factory=FeedForward)
    norm: str = "ffn_norm"
    post_norm: bool = False
    gated: bool = True
    clamped: bool = False
    activations: tuple[str, ...] = ("silu", "swish")
    gating: Literal["softmax", "sigmoid", "softmax_after_topk"] = "softmax"
    normed: bool = False
    eps: float = 0.0
    least: float = 0.0
    group_score: Literal["max", "top2"] = "max"
    weighted: Literal["outputs", "inputs"] = "outputs"
    shared: bool = False
    shared_gate: bool = False
    latent: bool = False
    runtime: ClassVar[str] = "polyquant.runtime.mixture:feed_forward"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the stems of the first matrices, without `_exps` or `_shexp`."""
        return ("ffn_gate", "ffn_up") if self.gated else ("ffn_up",)

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """See parts.Part: of layers with experts, and of dense ones."""
        kinds = ("exps", "shexp") if self.shared else ("exps",)
        gates: tuple[str, ...] = ("ffn_gate_inp_shexp",) if self.shared_gate else ()
        routed = tuple(f"{stem}_exps" for stem in self.inputs)
        direct = ("ffn_latent_down",) if self.latent else routed
        shared_readers = tuple(f"{stem}_shexp" for stem in self.inputs) if self.shared else ()
        last: Literal["product", "activation"] = "product" if self.gated and not self.clamped else "activation"
        outputs = (Feed(f"ffn_up_{kind}", (f"ffn_down_{kind}",), last) for kind in kinds)
        readers = ("ffn_gate_inp", *gates, *direct, *shared_readers)
        pairs = (("ffn_latent_down", routed), ("ffn_down_exps", ("ffn_latent_up",))) if self.latent else ()
        narrow = (Feed(source, read, "activation") for source, read in pairs)
        return Feed(self.norm, readers, "norm"), *outputs, *narrow, *self.dense.feeds

    def has_experts(self, hyper: Hyper, index: int) -> bool:
        """True if layer `index` has experts: if Hyper lists layer widths, those with an expert's width."""
        widths = hyper.more.get("layer_feed_forward")
        if isinstance(widths, tuple):
            return hyper.count("experts") > 0 and widths[index] == hyper.count("expert_feed_forward")
        step = hyper.count("expert_step") or 1
        return hyper.count("experts") > 0 and index >= hyper.count("first_dense") and (index + 1) % step == 0

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See parts.Part."""
        if not self.has_experts(hyper, index):
            return self.dense.shapes(hyper, index)
        count, hidden = hyper.count("experts"), hyper.hidden
        width = hyper.count("expert_feed_forward") or hyper.feed_forward
        out: dict[str, Shape] = {self.norm: (hidden,), "ffn_gate_inp": (count, hidden)}
        latent = hyper.count("expert_latent") if self.latent else 0
        out |= {"ffn_latent_down": (latent, hidden)} if latent else {}
        out |= {f"{stem}_exps": (count, width, latent or hidden) for stem in self.inputs}
        out |= {"ffn_down_exps": (count, latent or hidden, width)}
        out |= {"ffn_latent_up": (hidden, latent)} if latent else {}
        if self.shared:
            wide = hyper.count("shared_feed_forward") or width * max(1, hyper.count("shared_experts"))
            out |= {f"{stem}_shexp": (wide, hidden) for stem in self.inputs} | {"ffn_down_shexp": (hidden, wide)}
        if self.shared_gate:
            out["ffn_gate_inp_shexp"] = (1, hidden)
        return out | ({"post_ffw_norm": (hidden,)} if self.post_norm else {})
