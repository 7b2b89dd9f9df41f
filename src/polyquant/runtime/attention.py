"""Attention with rotary positions behind an RMS norm: a + O [norm] attention(rope([norm] q), rope([norm] k), v), [q, k, v] = QKV norm(x)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polyquant.architectures import parts
from polyquant.ops.decoder import rms_norm, rotate
from polyquant.runtime.kv_cache import KVCache
from polyquant.runtime.rotary import Rotary
from polyquant.runtime.site import Site
from polyquant.types import F32

__all__ = ["Attention"]


class Attention:
    """The attention of one layer."""

    linears = ("qkv", "o")

    def __init__(self, part: parts.Attention, site: Site) -> None:
        hyper = site.hyper
        self.index, self.eps, self.size, self.c8 = site.index, hyper.norm_eps, hyper.head_size, site.c8
        self.window = hyper.windows[site.index] if hyper.windows else 0
        self.norm = site.norm("attn_norm")
        self.qkv = site.linear(*part.inputs)
        wide = hyper.query_width
        self.cuts = (wide, wide + hyper.value_width) if part.fused else None
        self.q_norm = site.vector("attn_q_norm") if part.head_norms else None
        self.k_norm = site.vector("attn_k_norm") if part.head_norms else None
        self.sub_norm = site.norm("attn_sub_norm") if part.sub_norm else None
        self.o = site.linear("attn_output")

    def __call__(self, x: F32, cos: F32, sin: F32, rotary: Rotary, cache: KVCache) -> F32:
        """x [T, hidden] -> [T, hidden]; the keys and values of these T tokens go into the cache."""
        tokens, size = len(x), self.size
        q, k, v = (y.reshape(tokens, -1, size) for y in self.split(self.qkv(self.norm(x))))  # [T, heads, size]
        if self.c8 is not None:
            k, v = self.c8.rounded(self.index, k, v)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps)
        q = rotate(q, cos, sin, interleaved=rotary.interleaved)
        k = rotate(k, cos, sin, interleaved=rotary.interleaved)
        a = cache.attend(self.index, q, k, v, scale=size**-0.5, window=self.window).reshape(tokens, -1)
        (out,) = self.o(a if self.sub_norm is None else self.sub_norm(a))
        return out

    def split(self, qkv: Sequence[F32]) -> Sequence[F32]:
        """What the linear `qkv` gives -> q [T, heads * size], k and v [T, kv_heads * size]."""
        return qkv if self.cuts is None else np.split(qkv[0], self.cuts, axis=1)
