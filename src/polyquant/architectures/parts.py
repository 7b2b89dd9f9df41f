"""The parts of a decoder layer, as values: their tensors with shapes, and which output feeds which linears.

A part names the class that computes it (`runtime`, "module:attribute"), loaded when the decoder is built. A new kind of
attention is thus a class here or next to its record, and one in the runtime; code that reads parts does not change.
Tensors are called by their GGUF stems.
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
"""x / rms(x) * weight + bias, or the same of x - mean(x); biases if there are bias tensors."""
BARE = "*"
"""The stem of a norm without weights."""
NAMELESS = ("", BARE)
"""The stems of a norm without tensors: no norm at all, or a bare one."""


@dataclass(frozen=True, slots=True)
class Feed:
    """The linear layers `readers` read the output of `source`.

    kind: "norm": output of a norm. "values": weighted sums of the last rows of a linear, one set of rows per key/value
    head, shared by its group. "product": the last rows of a linear, times the gate. "activation": a function of a
    linear through which no scale can be moved. "stream": the residual stream, without a source.
    """

    source: str
    readers: tuple[str, ...]
    kind: Literal["norm", "values", "product", "activation", "stream"]


class Part(Protocol):
    """A part of a layer."""

    @property
    def runtime(self) -> str:
        """ "module:attribute" of the class that computes the part, constructed from (part, Site)."""

    @property
    def feeds(self) -> Sequence[Feed]:
        """Return the feeds; every linear of the part is a reader of exactly one."""

    def shapes(self, hyper: Hyper, index: int) -> Mapping[str, Shape]:
        """Return stem -> weight shape of the linears and norms in layer `index`, in computation order.

        A part with other tensors (convolution kernels, decays) also has a method `parameters`: full name inside a layer
        -> shape.
        """


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention after a norm.

    fused: q, k and v in one matrix, in this order. norm: stem of the norm before it, "" for none, BARE for one without
    weights.
    head_norms: a norm on each head of q and k. width_norms: one over all heads together.
    sub_norm: a norm before the output matrix. post_norm: one after it.
    each_norm: models may have QK norms with separate weights for each head. optional_norms: some models lack QK norms.
    late_norms: QK norms come after RoPE.
    rope: the layers that rotate: "all"; "none"; "windowed", those with a window if the model has any; "if_enabled", all
    if Hyper's `rotates` is not 0.
    no_rope_every: every n-th layer does not rotate, 0 for none; Hyper's `rotating` lists layers individually.
    alibi: ALiBi instead of RoPE. alibi_at: only in models with this many layers.
    clip: q, k and v are clipped to Hyper's `clip`, if it is not 0.
    gated: q has twice the rows per head; the sigmoid of the second half scales the head's output.
    chunk: rotating layers see nothing before the last multiple of it, 0 for all positions.
    unit_heads: rotating layers divide q and k by their root mean square if Hyper's `unit_heads` is not 0.
    sinks: each head has an extra score without a position.

    Scores are divided by the square root of the head size, or multiplied by Hyper's attention_scale, and capped at its
    attention_softcap.
    """

    fused: bool = False
    head_norms: bool = False
    sub_norm: bool = False
    width_norms: bool = False
    post_norm: bool = False
    norm: str = "attn_norm"
    rope: Literal["all", "windowed", "none", "if_enabled"] = "all"
    no_rope_every: int = 0
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
        """Return the matrices that read the layer's input."""
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
    """activation(gate) * up after a norm, or activation(up) if not gated.

    fused: gate and up in one matrix, in this order, called ffn_up. sub_norm: a norm before the last matrix. post_norm:
    one after it. norm: stem of the norm before it: that of attention if both read the same, "" for none, BARE for one
    without weights. activations: the supported ones, as config.json names them. width: the row of Hyper with the width
    (per layer if it is a list), unless it is 0; "" for the usual width.
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
        """Return the matrices that read the layer's input."""
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
        width = hyper.more.get(self.width, 0)
        width = width[index] if isinstance(width, tuple) else width
        return int(width) if isinstance(width, int) and width else hyper.feed_forward


@dataclass(frozen=True, slots=True)
class Layer:
    """Sequential parts, each added to its input: h = x + attention(x);  y = h + feed_forward(h).

    The parts' outputs are multiplied by Hyper's residual_scale, if present.
    """

    attention: Part = Attention()
    feed_forward: Part = FeedForward()
    runtime: ClassVar[str] = "polyquant.runtime.layer:SequentialLayer"

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts in computation order."""
        return self.attention, self.feed_forward

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """Return the feeds of all parts; parts that read the same norm share one feed."""
        feeds = [feed for part in self.parts for feed in part.feeds]
        return tuple(_joined(feed, feeds) for i, feed in enumerate(feeds) if not _shared(feed, feeds[:i]))

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """Return the tensors of all parts."""
        return {stem: shape for part in self.parts for stem, shape in part.shapes(hyper, index).items()}

    def parameters(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """Return the parameters of all parts that have them."""
        return {name: shape for part in self.parts for name, shape in parameters(part, hyper, index).items()}


@dataclass(frozen=True, slots=True)
class ParallelLayer(Layer):
    """Parallel parts: y = x + attention(x) + feed_forward(x).

    flag: a hyper-parameter that is 0 if the model computes them sequentially, "" if it never does. shared: parallel
    parts share one norm, that of attention.
    """

    flag: str = ""
    shared: bool = False
    runtime: ClassVar[str] = "polyquant.runtime.layer:ParallelLayer"


@dataclass(frozen=True, slots=True)
class Ends:
    """The operations before the first layer and after the last.

    positions: learned position embeddings are added (position_embd). types: the first token type embedding is added
    (token_types).
    norm: a norm of the embeddings (token_embd_norm). last: a norm after the layers. last_stem: its stem. bare: it has
    no weights.
    root: embeddings are multiplied by the square root of their size; otherwise by Hyper's embedding_scale, if present.
    divided: logits are divided by Hyper's logit_scale; otherwise multiplied by it. Its logit_softcap is applied last.
    unit_rows: in models with this vocabulary size, the rows of the head are normalized to unit length.
    layer_inputs: layers read per-layer embeddings of Hyper's per_layer_input dimensions, if it is not 0
    (runtime/ends.py).
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
    """The layers of an architecture that can be converted but not run."""

    runtime: ClassVar[str] = ""

    @property
    def parts(self) -> tuple[Part, ...]:
        """No parts."""
        return ()


def parameters(part: Part, hyper: Hyper, index: int) -> dict[str, Shape]:
    """Return full name inside layer `index` -> shape, of a part's tensors that are neither linears nor norms."""
    method = getattr(part, "parameters", None)
    return {} if method is None else dict(method(hyper, index))


def _input(norm: str, readers: tuple[str, ...]) -> Feed:
    """Return the feed of a part's first matrices."""
    return Feed("", readers, "stream") if norm in NAMELESS else Feed(norm, readers, "norm")


def _shared(feed: Feed, others: Sequence[Feed]) -> bool:
    return feed.kind == "norm" and any(f.kind == "norm" and f.source == feed.source for f in others)


def _joined(feed: Feed, feeds: Sequence[Feed]) -> Feed:
    """Return the feed, merged with the readers of all other feeds from its norm."""
    if feed.kind != "norm":
        return feed
    readers = [r for f in feeds if f.kind == "norm" and f.source == feed.source for r in f.readers]
    return Feed(feed.source, tuple(readers), "norm")
