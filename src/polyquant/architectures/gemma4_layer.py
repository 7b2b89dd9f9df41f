"""The layer of Gemma 4, as parts (parts.py).

The diagram is in runtime/gemma4.py. Sizes come from Hyper.at: layers with a sliding window have their own heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from polyquant.architectures.hyper import Hyper
from polyquant.architectures.parts import Feed, FeedForward, Layer, Part
from polyquant.types import Shape

__all__ = ["Gemma4Attention", "Gemma4FeedForward", "Gemma4Layer"]


@dataclass(frozen=True, slots=True)
class Gemma4Attention:
    """Norms on the heads of q, k and v, and a norm after the output.

    Layers without a window may have no V; the last layers reuse the keys and values of an earlier one.
    """

    runtime: ClassVar[str] = "polyquant.runtime.gemma4:Attention"

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """See parts.Part. Values are normed, so no scale can be moved through them."""
        return Feed("attn_norm", ("attn_q", "attn_k", "attn_v"), "norm"), Feed("attn_q", ("attn_output",), "activation")

    def lender(self, hyper: Hyper, index: int) -> int | None:
        """Return the layer whose keys and values layer `index` reads (the last of its kind that stores them), None for
        its own."""
        first = hyper.layers - hyper.count("shared_kv_layers")
        if index < first:
            return None
        return next((i for i in reversed(range(first)) if hyper.slides(i) == hyper.slides(index)), None)

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See parts.Part."""
        sizes, hidden = hyper.at(index), hyper.hidden
        size, wide, kv = sizes.head_size, sizes.query_width, sizes.value_width
        out: dict[str, Shape] = {"attn_norm": (hidden,), "attn_q": (wide, hidden), "attn_q_norm": (size,)}
        if self.lender(hyper, index) is None:
            out |= {"attn_k": (kv, hidden), "attn_k_norm": (size,)}
            if hyper.slides(index) or not hyper.count("values_are_keys"):
                out["attn_v"] = (kv, hidden)
        return out | {"attn_output": (hidden, wide), "post_attention_norm": (hidden,)}


@dataclass(frozen=True, slots=True)
class Gemma4FeedForward:
    """A feed-forward part, with parallel experts and their own norms in models that have them; a norm after both."""

    dense: FeedForward = field(default_factory=FeedForward)
    runtime: ClassVar[str] = "polyquant.runtime.gemma4:FeedForward"

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """See parts.Part. The router reads the residual stream through its own norm."""
        return (
            *self.dense.feeds,
            Feed("", ("ffn_gate_inp",), "stream"),
            Feed("pre_ffw_norm_2", ("ffn_gate_up_exps",), "norm"),
            Feed("ffn_gate_up_exps", ("ffn_down_exps",), "activation"),
        )

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See parts.Part."""
        hidden, experts, wide = hyper.hidden, hyper.count("experts"), hyper.count("expert_feed_forward")
        out = self.dense.shapes(hyper.at(index), index)
        if experts:
            out |= {
                "post_ffw_norm_1": (hidden,),
                "pre_ffw_norm_2": (hidden,),
                "ffn_gate_inp": (experts, hidden),
                "ffn_gate_up_exps": (experts, 2 * wide, hidden),
                "ffn_down_exps": (experts, hidden, wide),
                "post_ffw_norm_2": (hidden,),
            }
        return out | {"post_ffw_norm": (hidden,)}

    def parameters(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See parts.Part: factors on the router's input and on each expert's weight."""
        experts = hyper.count("experts")
        return {"ffn_gate_inp.scale": (hyper.hidden,), "ffn_down_exps.scale": (experts,)} if experts else {}


@dataclass(frozen=True, slots=True)
class Gemma4Layer(Layer):
    """Both parts in sequence, then the per-layer input of the token in models that have it, then a factor."""

    attention: Part = field(default_factory=Gemma4Attention)
    feed_forward: Part = field(default_factory=Gemma4FeedForward)
    runtime: ClassVar[str] = "polyquant.runtime.gemma4:Gemma4Layer"

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """Return the feeds of all parts."""
        inputs = Feed("", ("inp_gate",), "stream"), Feed("inp_gate", ("proj",), "activation")
        return (*super(Gemma4Layer, self).feeds, *inputs)

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """Return the tensors of all parts."""
        out, size = super(Gemma4Layer, self).shapes(hyper, index), hyper.count("per_layer_input")
        if size:
            out |= {"inp_gate": (size, hyper.hidden), "proj": (hyper.hidden, size), "post_norm": (hyper.hidden,)}
        return out

    def parameters(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """Return the parameters of all parts, and the final factor."""
        return {**super(Gemma4Layer, self).parameters(hyper, index), "layer_output_scale.weight": (1,)}
