"""The layer of Gemma 4 (Google 2026), built from architectures/gemma4_layer.py and a checkpoint's tensors.

    h = x + norm(attention(norm(x)))            heads of q, k and v are normed, v without weights; scores are not scaled
    f = D (gelu(G norm(h)) * U norm(h))
    f = norm_1(f) + norm_2(experts(norm(h)))    with experts; their router reads norm(h) scale / sqrt(hidden)
    g = h + norm(f)
    y = (g + norm(P (gelu(W g) * t))) s         t: the token's per-layer embedding (runtime/ends.py), in some models

    Without V, values are K before its norm. The last layers may have neither: they reuse those of the last layer of
    their kind.
Source: modeling_gemma4.py of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from polyquant.architectures import gemma4_layer as records
from polyquant.errors import InputError, UnsupportedError
from polyquant.ops.activations import ACTIVATIONS, gated
from polyquant.ops.decoder import add, concatenated
from polyquant.ops.experts import Routing
from polyquant.runtime import feed_forward
from polyquant.runtime.experts import Experts
from polyquant.runtime.kv_cache import INPUTS, LayerCache
from polyquant.runtime.layer import SequentialLayer
from polyquant.runtime.mixture import stacks
from polyquant.runtime.norm import Norm, bare_norm
from polyquant.runtime.rotary import Rotation
from polyquant.runtime.site import Place, Site
from polyquant.runtime.state import StateSpec
from polyquant.types import F32

__all__ = ["Attention", "FeedForward", "Gemma4Layer"]


class Attention:
    """The attention of one layer. lender: the layer whose keys and values it reuses, None for its own."""

    linears = ("qkv", "o")

    def __init__(self, part: records.Gemma4Attention, site: Site) -> None:
        hyper, file = site.hyper.at(site.index), site.tensors.checkpoint.path
        if site.c8 is not None:
            raise UnsupportedError(
                "a C8 cache is not supported in this architecture", file=file, hint="choose another cache: f16, int8"
            )
        self.index, self.lender, self.size = site.index, part.lender(site.hyper, site.index), hyper.head_size
        if self.lender is None and site.index >= hyper.layers - hyper.count("shared_kv_layers"):
            raise InputError("no earlier layer has keys for this one", file=file, tensor=f"blk.{site.index}.attn_q")
        self.window = hyper.windows[site.index] if hyper.windows else 0
        self.rotation_index = int(hyper.slides(site.index) and hyper.real("rope_theta_swa", 0.0) > 0)
        self.scale = hyper.real("attention_scale", 1.0)
        self.norm, self.q_norm = site.norm("attn_norm"), site.norm("attn_q_norm")
        self.state_spec = StateSpec() if self.lender is not None else StateSpec(rows=(hyper.kv_heads, hyper.head_size))
        stems = ["attn_q"]
        if self.lender is None:
            stems += ["attn_k", "attn_v"] if hyper.slides(site.index) or "attn_v" in site else ["attn_k"]
            self.k_norm, self.v_norm = site.norm("attn_k_norm"), bare_norm(self.size, hyper.norm_eps)
        self.qkv = site.linear(*stems)
        self.o = site.linear("attn_output")
        self.post_norm = site.norm("post_attention_norm")

    def __call__(self, x: F32, rotations: Sequence[Rotation], cache: LayerCache) -> F32:
        """x [T, hidden] -> [T, hidden]; keys and values of these T tokens go to the cache and to later layers."""
        rotation = rotations[self.rotation_index]
        q, *kv = (y.reshape(len(x), -1, self.size) for y in self.qkv(self.norm(x)))  # [T, heads, size]
        q = rotation(self.q_norm(q))
        if self.lender is None:
            k, v = rotation(self.k_norm(kv[0])), self.v_norm(kv[-1])
            cache.passing[self.index] = (k, v)
            a = cache.attend(self.index, q, k, v, scale=self.scale, window=self.window)
        else:
            k, v = cache.passing[self.lender]
            a = cache.again(self.lender, q, k, v, scale=self.scale, window=self.window)
        (out,) = self.o(a.reshape(len(x), -1))
        return self.post_norm(out)


class FeedForward:
    """The feed-forward part of one layer, with its experts, if any."""

    linears = ()

    def __init__(self, part: records.Gemma4FeedForward, site: Site) -> None:
        self.dense = feed_forward.FeedForward(part.dense, site)
        self.experts = _Experts(site) if site.hyper.count("experts") else None
        self.post_norm = site.norm("post_ffw_norm")
        self.nested: tuple[object, ...] = (self.dense,)
        self.recordable = True
        if self.experts is not None:
            self.first_norm, self.second_norm = site.norm("post_ffw_norm_1"), site.norm("post_ffw_norm_2")
            self.nested = (self.dense, self.experts)
            self.recordable = self.experts.recordable

    def __call__(self, x: F32) -> F32:
        """x [T, hidden] -> [T, hidden]."""
        out = self.dense(x)
        if self.experts is not None:
            out = add(self.first_norm(out), self.second_norm(self.experts(x)))
        return self.post_norm(out)


class _Experts(Experts):
    """The routed experts, after a norm; the router has a separate norm, and each expert a factor."""

    linears = ("router",)
    stacks = ("gate_up", "down")

    def __init__(self, site: Site) -> None:
        hyper, count = site.hyper, site.hyper.count("experts")
        wide, hidden = hyper.count("expert_feed_forward"), hyper.hidden
        super().__init__(
            site.linear("ffn_gate_inp"),
            Routing(count, hyper.count("experts_used"), norm=True),
            stacks(site, {"ffn_gate_up_exps": (count, 2 * wide, hidden)}, "ffn_gate_up_exps"),
            stacks(site, {"ffn_down_exps": (count, hidden, wide)}, "ffn_down_exps"),
            activation=partial(gated, ACTIVATIONS[hyper.activation]),
            halves=True,
            factors=site.array("ffn_down_exps.scale", (count,)),
        )
        self.norm = site.norm("pre_ffw_norm_2")
        scale = site.array("ffn_gate_inp.scale", (hidden,))
        self.router_norm = Norm(scale * np.float32(hidden**-0.5), hyper.norm_eps)
        self.recordable = self.gate_up.kernel == "packed" and self.down.kernel == "packed"

    def __call__(self, x: F32) -> F32:
        """x [T, hidden] -> [T, hidden]."""
        return self.computed(self.norm(x), *self.chosen(self.router_norm(x)))


class Gemma4Layer(SequentialLayer):
    """The whole layer. The factor s is folded into the last norm's weights, and applied to the residual."""

    def __init__(self, layer: records.Gemma4Layer, site: Site) -> None:
        super().__init__(layer, site)
        self.index = site.index
        self.factor = float(site.array("layer_output_scale.weight", (1,))[0])
        self.gate = self.projection = None
        if site.hyper.count("per_layer_input"):
            self.activation = partial(gated, ACTIVATIONS[site.hyper.activation])
            self.gate, self.projection = site.linear("inp_gate"), site.linear("proj")
            self.post_norm = _scaled(site.norm("post_norm"), self.factor)
        else:
            self.feed_forward.post_norm = _scaled(self.feed_forward.post_norm, self.factor)

    def __call__(self, x: F32, rotations: Sequence[Rotation], cache: LayerCache) -> F32:  # type: ignore[override]
        """See decoder.Layer."""
        x = add(x, self.attention(x, rotations, cache))
        out = self.feed_forward(x)
        if self.gate is None or self.projection is None:
            return add(out, x, self.factor)
        x = add(x, out)
        (inputs,) = cache.passing[INPUTS]
        (gate,) = self.gate(x)
        (out,) = self.projection(self.activation(gate, concatenated(inputs[:, self.index])))
        return add(self.post_norm(out), x, self.factor)

    @property
    def places(self) -> tuple[Place, ...]:
        """See decoder.Layer."""
        own = (Place(self, "gate"), Place(self, "projection")) if self.gate is not None else ()
        return (*super().places, *own)


def _scaled(norm: Norm, factor: float) -> Norm:
    bias = None if norm.bias is None else norm.bias * np.float32(factor)
    return Norm(norm.weight * np.float32(factor), norm.eps, bias, norm.kind)
