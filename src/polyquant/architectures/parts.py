"""The parts that a decoder layer is composed of, as values: which tensors each has, of which shapes, and what feeds what.

A part names the class that computes it (`runtime`, "module:attribute"), which the decoder loads when it is built. So a new kind of attention is
a class here or beside its record, and one in the runtime; what reads parts does not change. Tensors are called by their GGUF stems.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from polyquant.architectures.hyper import Hyper
from polyquant.types import Shape

__all__ = ["Attention", "ConvertedOnly", "Feed", "FeedForward", "Layer", "Part"]


@dataclass(frozen=True, slots=True)
class Feed:
    """What `readers`, linear layers, read is the output of `source`.

    kind: "norm": of a norm. "values": weighted sums of the last rows of a linear, one set of rows a key/value head, shared by the heads of its
    group. "product": the last rows of a linear, times the gate.
    """

    source: str
    readers: tuple[str, ...]
    kind: Literal["norm", "values", "product"]


class Part(Protocol):
    """A part of a layer."""

    @property
    def runtime(self) -> str:
        """ "module:attribute" of the class that computes it, made from (part, Site)."""

    @property
    def feeds(self) -> Sequence[Feed]:
        """Every linear of the part among the readers of exactly one."""

    def shapes(self, hyper: Hyper, index: int) -> Mapping[str, Shape]:
        """Stem -> shape of its weight in layer `index`, in the order of the computation."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention with rotary positions behind an RMS norm.

    fused: q, k and v in one matrix, in this order. head_norms: an RMS norm on each head of q and k. sub_norm: one before the output matrix.
    """

    fused: bool = False
    head_norms: bool = False
    sub_norm: bool = False
    runtime: ClassVar[str] = "polyquant.runtime.attention:Attention"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The matrices that read the layer's input."""
        return ("attn_qkv",) if self.fused else ("attn_q", "attn_k", "attn_v")

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """See Part."""
        last = (
            Feed("attn_sub_norm", ("attn_output",), "norm")
            if self.sub_norm
            else Feed(self.inputs[-1], ("attn_output",), "values")
        )
        return Feed("attn_norm", self.inputs, "norm"), last

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See Part."""
        wide, kv = hyper.query_width, hyper.value_width
        rows = (wide + 2 * kv,) if self.fused else (wide, kv, kv)
        out: dict[str, Shape] = {"attn_norm": (hyper.hidden,)}
        out |= {stem: (n, hyper.hidden) for stem, n in zip(self.inputs, rows, strict=True)}
        if self.head_norms:
            out |= {"attn_q_norm": (hyper.head_size,), "attn_k_norm": (hyper.head_size,)}
        if self.sub_norm:
            out["attn_sub_norm"] = (wide,)
        return out | {"attn_output": (hyper.hidden, wide)}


@dataclass(frozen=True, slots=True)
class FeedForward:
    """activation(gate) * up behind an RMS norm.

    fused: gate and up in one matrix, in this order, called ffn_up. sub_norm: an RMS norm before the last matrix. activations: those that are
    computed, as config.json names them.
    """

    fused: bool = False
    sub_norm: bool = False
    activations: tuple[str, ...] = ("silu", "swish")
    runtime: ClassVar[str] = "polyquant.runtime.feed_forward:FeedForward"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The matrices that read the layer's input."""
        return ("ffn_up",) if self.fused else ("ffn_gate", "ffn_up")

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """See Part."""
        last = (
            Feed("ffn_sub_norm", ("ffn_down",), "norm") if self.sub_norm else Feed("ffn_up", ("ffn_down",), "product")
        )
        return Feed("ffn_norm", self.inputs, "norm"), last

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See Part."""
        wide = hyper.feed_forward
        rows = (2 * wide,) if self.fused else (wide, wide)
        out: dict[str, Shape] = {"ffn_norm": (hyper.hidden,)}
        out |= {stem: (n, hyper.hidden) for stem, n in zip(self.inputs, rows, strict=True)}
        if self.sub_norm:
            out["ffn_sub_norm"] = (wide,)
        return out | {"ffn_down": (hyper.hidden, wide)}


@dataclass(frozen=True, slots=True)
class Layer:
    """One part after the other, each added to what it read: y = h + feed_forward(h) with h = x + attention(x)."""

    attention: Part = Attention()
    feed_forward: Part = FeedForward()
    runtime: ClassVar[str] = "polyquant.runtime.layer:SequentialLayer"

    @property
    def parts(self) -> tuple[Part, ...]:
        """In the order of the computation."""
        return self.attention, self.feed_forward

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """Of all parts."""
        return tuple(feed for part in self.parts for feed in part.feeds)

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """Of all parts."""
        return {stem: shape for part in self.parts for stem, shape in part.shapes(hyper, index).items()}


@dataclass(frozen=True, slots=True)
class ConvertedOnly(Layer):
    """The layers of an architecture that is converted and not run."""

    runtime: ClassVar[str] = ""

    @property
    def parts(self) -> tuple[Part, ...]:
        """None."""
        return ()
