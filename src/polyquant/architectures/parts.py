"""The parts that a decoder layer is composed of, as values: which tensors each has, of which shapes, and what feeds what.

A part names the class that computes it (`runtime`, "module:attribute"), which the decoder loads when it is built. So a new kind of attention is
a class here or beside its record, and one in the runtime; what reads parts does not change. Tensors are called by their GGUF stems.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias

from polyquant.architectures.hyper import Hyper
from polyquant.types import Shape

__all__ = [
    "BARE",
    "NAMELESS",
    "Attention",
    "ConvertedOnly",
    "Ends",
    "Feed",
    "FeedForward",
    "Layer",
    "NormKind",
    "ParallelLayer",
    "Part",
    "parameters",
]

NormKind: TypeAlias = Literal["rms", "layer"]
"""x / rms(x) * weight + bias, or the same of x - mean(x); biases where there are tensors of them."""
BARE = "*"
"""Stem of a norm without numbers of its own."""
NAMELESS = ("", BARE)
"""What a part says of its norm where it has no tensor: no norm at all, or a bare one."""


@dataclass(frozen=True, slots=True)
class Feed:
    """What `readers`, linear layers, read is the output of `source`.

    kind: "norm": of a norm. "values": weighted sums of the last rows of a linear, one set of rows a key/value head, shared by the heads of its
    group. "product": the last rows of a linear, times the gate. "activation": a function of a linear that no scale goes through. "stream": the layer's
    input as it is, of no source.
    """

    source: str
    readers: tuple[str, ...]
    kind: Literal["norm", "values", "product", "activation", "stream"]


class Part(Protocol):
    """A part of a layer."""

    @property
    def runtime(self) -> str:
        """ "module:attribute" of the class that computes it, made from (part, Site)."""

    @property
    def feeds(self) -> Sequence[Feed]:
        """Every linear of the part among the readers of exactly one."""

    def shapes(self, hyper: Hyper, index: int) -> Mapping[str, Shape]:
        """Stem -> shape of its weight in layer `index`, in the order of the computation: of linears and norms. A part with other tensors, kernels of
        convolutions and decays, has a method `parameters` of the same kind: whole name inside a layer -> shape."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention behind a norm.

    fused: q, k and v in one matrix, in this order. head_norms: a norm on each head of q and k; width_norms: one on all heads together. sub_norm: one
    before the output matrix; post_norm: one behind it. norm: the stem of the norm before it, "" for none, BARE for one without numbers. rope: which layers rotate: "all", "none",
    "windowed", those with a window where the model has any, or "asked", all where Hyper's `rotates` is not 0. still: each still-th layer does not, 0 for none; Hyper's `rotating` says it layer by layer. each_norm:
    models may have norms of the heads of q and k, another for each head. optional_norms: some models lack the norms of q and k. late_norms: those of heads come
    behind the rotation. alibi: a score falls with the distance instead, alibi_at: in models of that many layers. clip: q, k and v stay within Hyper's `clip`,
    where it is not 0.
    gated: q has as many rows again of each head, whose sigmoid the head's output is multiplied with.
    chunk: layers that rotate see nothing before the last multiple of it, 0 for all. unit_heads: they divide q and k by their root mean square where Hyper's
    `unit_heads` is not 0.
    sinks: each head has a score of its own that no position has. Scores are divided by the root of the
    head's size, or multiplied with Hyper's attention_scale, and capped at its attention_softcap.
    """

    fused: bool = False
    head_norms: bool = False
    sub_norm: bool = False
    width_norms: bool = False
    post_norm: bool = False
    norm: str = "attn_norm"
    rope: Literal["all", "windowed", "none", "asked"] = "all"
    still: int = 0
    each_norm: bool = False
    optional_norms: bool = False
    late_norms: bool = False
    alibi: bool = False
    chunk: int = 0
    unit_heads: bool = False
    alibi_at: int = 0
    clip: bool = False
    sinks: bool = False
    gated: bool = False
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
        return _input(self.norm, self.inputs), last

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See Part."""
        wide, kv = hyper.query_width, hyper.value_width
        rows = (wide + 2 * kv,) if self.fused else (wide * (1 + self.gated), kv, kv)
        out: dict[str, Shape] = {self.norm: (hyper.hidden,)} if self.norm not in NAMELESS else {}
        out |= {stem: (n, hyper.hidden) for stem, n in zip(self.inputs, rows, strict=True)}
        if self.head_norms or self.width_norms:
            q, k = (hyper.head_size, hyper.head_size) if self.head_norms else (wide, kv)
            out |= {"attn_q_norm": (q,), "attn_k_norm": (k,)}
        if self.sinks:
            out["attn_sinks"] = (hyper.heads,)
        if self.sub_norm:
            out["attn_sub_norm"] = (wide,)
        out["attn_output"] = (hyper.hidden, wide)
        return out | ({"post_attention_norm": (hyper.hidden,)} if self.post_norm else {})


@dataclass(frozen=True, slots=True)
class FeedForward:
    """activation(gate) * up behind a norm, or activation(up) where it is not gated.

    fused: gate and up in one matrix, in this order, called ffn_up. sub_norm: a norm before the last matrix; post_norm: one behind it. norm: the stem of
    the norm before it: that of attention where both read the same, "" for none, BARE for one without numbers. activations: those that are computed, as config.json names them.
    width: the row of Hyper that says how wide it is, of each layer if it is a list, where that is not 0; "" for the usual one.
    """

    fused: bool = False
    sub_norm: bool = False
    activations: tuple[str, ...] = ("silu", "swish")
    gated: bool = True
    post_norm: bool = False
    norm: str = "ffn_norm"
    width: str = ""
    runtime: ClassVar[str] = "polyquant.runtime.feed_forward:FeedForward"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The matrices that read the layer's input."""
        return ("ffn_gate", "ffn_up") if self.gated and not self.fused else ("ffn_up",)

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """See Part."""
        last = Feed("ffn_up", ("ffn_down",), "product" if self.gated else "activation")
        if self.sub_norm:
            last = Feed("ffn_sub_norm", ("ffn_down",), "norm")
        return _input(self.norm, self.inputs), last

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See Part."""
        wide = self._wide(hyper, index)
        rows = (2 * wide,) if self.fused else (wide,) * len(self.inputs)
        out: dict[str, Shape] = {self.norm: (hyper.hidden,)} if self.norm not in NAMELESS else {}
        out |= {stem: (n, hyper.hidden) for stem, n in zip(self.inputs, rows, strict=True)}
        if self.sub_norm:
            out["ffn_sub_norm"] = (wide,)
        out["ffn_down"] = (hyper.hidden, wide)
        return out | ({"post_ffw_norm": (hyper.hidden,)} if self.post_norm else {})

    def _wide(self, hyper: Hyper, index: int) -> int:
        said = hyper.more.get(self.width, 0)
        said = said[index] if isinstance(said, tuple) else said
        return int(said) if isinstance(said, int) and said else hyper.feed_forward


@dataclass(frozen=True, slots=True)
class Layer:
    """One part after the other, each added to what it read: y = h + feed_forward(h) with h = x + attention(x). What is added is multiplied with
    Hyper's residual_scale, if it has one."""

    attention: Part = Attention()
    feed_forward: Part = FeedForward()
    runtime: ClassVar[str] = "polyquant.runtime.layer:SequentialLayer"

    @property
    def parts(self) -> tuple[Part, ...]:
        """In the order of the computation."""
        return self.attention, self.feed_forward

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """Of all parts; what two parts read from one norm is one feed."""
        found = [feed for part in self.parts for feed in part.feeds]
        return tuple(_joined(feed, found) for i, feed in enumerate(found) if not _shared(feed, found[:i]))

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """Of all parts."""
        return {stem: shape for part in self.parts for stem, shape in part.shapes(hyper, index).items()}

    def parameters(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """Of all parts that have some."""
        return {name: shape for part in self.parts for name, shape in parameters(part, hyper, index).items()}


@dataclass(frozen=True, slots=True)
class ParallelLayer(Layer):
    """Both parts beside each other: y = x + attention(x) + feed_forward(x). flag: a hyper-parameter that is 0 where a model computes them one after the
    other, "" if none does; shared: beside each other they read one norm, that of attention."""

    flag: str = ""
    shared: bool = False
    runtime: ClassVar[str] = "polyquant.runtime.layer:ParallelLayer"


@dataclass(frozen=True, slots=True)
class Ends:
    """What stands before the first layer and behind the last.

    positions: an embedding for each position is added (position_embd). types: that of the first kind of text is (token_types). norm: one of the embeddings
    (token_embd_norm). last: one behind the layers (output_norm). root: embeddings are
    multiplied with the root of their size; else with Hyper's embedding_scale, if it has one. divided: logits are divided by Hyper's logit_scale, else
    multiplied with it. Its logit_softcap comes last. bare: the last norm has no numbers. unit_rows: in models of that many tokens the rows of the head
    are divided by their lengths. last_stem: what the norm behind the layers is called. layer_inputs: each layer reads as many numbers of a token as Hyper's
    per_layer_input says, if it is not 0 (runtime/ends.py).
    """

    positions: bool = False
    types: bool = False
    norm: bool = False
    last: bool = True
    root: bool = False
    divided: bool = False
    bare: bool = False
    unit_rows: int = 0
    last_stem: str = "output_norm"
    layer_inputs: bool = False


@dataclass(frozen=True, slots=True)
class ConvertedOnly(Layer):
    """The layers of an architecture that is converted and not run."""

    runtime: ClassVar[str] = ""

    @property
    def parts(self) -> tuple[Part, ...]:
        """None."""
        return ()


def parameters(part: Part, hyper: Hyper, index: int) -> dict[str, Shape]:
    """Whole name inside layer `index` -> shape, of a part's tensors that are no linears and no norms. Few parts have any."""
    found = getattr(part, "parameters", None)
    return {} if found is None else dict(found(hyper, index))


def _input(norm: str, readers: tuple[str, ...]) -> Feed:
    """What the first matrices of a part read."""
    return Feed("", readers, "stream") if norm in NAMELESS else Feed(norm, readers, "norm")


def _shared(feed: Feed, others: Sequence[Feed]) -> bool:
    return feed.kind == "norm" and any(f.kind == "norm" and f.source == feed.source for f in others)


def _joined(feed: Feed, found: Sequence[Feed]) -> Feed:
    """The feed, with the readers of all others from its norm."""
    if feed.kind != "norm":
        return feed
    readers = [r for f in found if f.kind == "norm" and f.source == feed.source for r in f.readers]
    return Feed(feed.source, tuple(readers), "norm")
