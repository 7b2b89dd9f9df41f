"""Latent attention (MLA, DeepSeek-AI 2024, section 2.1), computed in the latent space.

    [q_n, q_r] = Q norm(x), per head;  [a, k_r] = A norm(x);  c = norm(a)
    score = (q_n K_b c + rope(q_r) rope(k_r)) * scale = [rope(q_r), K_b^T q_n] [rope(k_r), c] * scale
    out = O [V_b (sum of softmax(score) c) of each head]

All heads share one key, [rope(k_r), c], which is also their value: the cache holds rope_head + kv_lora values per
position twice, as key and as value. The rotary dimensions come first, as the rotation expects. Their weighted sum in
the values is ignored.

All heads read c, and errors in the cache persist. So if inputs are rounded to int8, Q and A use an additional int8 term
for the rounding error (runtime/split_input.py), and the inputs of K_b and V_b, which are small, are not rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from polyquant.architectures import latent
from polyquant.architectures.hyper import Hyper
from polyquant.ops.decoder import concatenated
from polyquant.runtime.expert_linear import ExpertLinear
from polyquant.runtime.kv_cache import LayerCache
from polyquant.runtime.linear import Reader
from polyquant.runtime.rotary import Rotation
from polyquant.runtime.site import Site
from polyquant.runtime.split_input import SplitInput
from polyquant.runtime.state import StateSpec
from polyquant.types import F32

__all__ = ["LatentAttention"]


class LatentAttention:
    """The attention of one layer."""

    def __init__(self, part: latent.LatentAttention, site: Site) -> None:
        hyper, shapes = site.hyper, part.shapes(site.hyper, site.index)
        self.index, self.scale = site.index, latent_scale(hyper)
        self.heads, self.rope, self.nope = hyper.heads, hyper.head_size, hyper.count("nope_head")
        self.lora = hyper.count("kv_lora")
        self.state_spec = StateSpec(rows=(1, self.lora + self.rope))
        self.norm = site.norm("attn_norm")
        self.first = site.linear(*part.inputs(hyper))
        self.split_input = SplitInput(self.first)
        self.stepwise = not self.split_input.enabled  # it multiplies two rows per token
        two = "attn_q_a" in shapes
        self.q_norm = site.norm("attn_q_a_norm") if two else None
        self.q_b = site.linear("attn_q_b") if two else None
        self.kv_norm = site.norm("attn_kv_a_norm")
        self.k_b, self.v_b = (
            ExpertLinear([site.stack(stem, shapes[stem])], [None], "none") for stem in ("attn_k_b", "attn_v_b")
        )
        self.o = site.linear("attn_output")
        source = site.source("attn_k_b")
        self.latent = None if source is None else Reader(source)
        self.reads = () if source is None else ("latent",)
        self.linears = ("first", "q_b", "o") if two else ("first", "o")
        self.recordable = self.k_b.kernel == "packed" and self.v_b.kernel == "packed"

    def __call__(self, x: F32, rotations: Sequence[Rotation], cache: LayerCache) -> F32:
        """x [T, hidden] -> [T, hidden]; the latents of these T tokens go to the cache."""
        tokens, rotation = len(x), rotations[0]
        q, kv = self.split_input(self.first, self.norm(x))
        if self.q_b is not None and self.q_norm is not None:
            (q,) = self.q_b(self.q_norm(q))
        rows = q.reshape(tokens * self.heads, -1)  # [T * heads, nope + rope]
        (absorbed,) = self.k_b(concatenated(rows[:, : self.nope]), None)
        queries = concatenated(rows[:, self.nope :], absorbed).reshape(tokens, self.heads, -1)
        c = self.kv_norm(kv[:, : self.lora])
        if self.latent is not None:
            (c,) = self.latent(c)
        keys = concatenated(kv[:, self.lora :], c).reshape(tokens, 1, -1)
        keys = rotation(keys)
        a = cache.attend(self.index, rotation(queries), keys, keys, scale=self.scale)
        (values,) = self.v_b(concatenated(a.reshape(tokens * self.heads, -1)[:, self.rope :]), None)
        (out,) = self.o(values.reshape(tokens, -1))
        return out


def latent_scale(hyper: Hyper) -> float:
    """Return 1 / sqrt(nope + rope), times (0.1 mscale_all_dim ln(factor) + 1)^2 for a YaRN scaling with mscale_all_dim
    (DeepSeek's code)."""
    scale = 1 / math.sqrt(hyper.count("nope_head") + hyper.head_size)
    factor, all_dim = (hyper.rope.get(key) for key in ("factor", "mscale_all_dim"))
    if not isinstance(factor, int | float) or not isinstance(all_dim, int | float) or factor <= 1:
        return scale
    return scale * float(0.1 * all_dim * math.log(factor) + 1) ** 2
