"""Attention: a + [norm] O [norm] attention(rope([norm] q), rope([norm] k), v), [q, k, v] = QKV [norm] x.

parts.Attention defines which norms are present.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from polyquant.architectures import parts
from polyquant.architectures.hyper import Hyper
from polyquant.ops.decoder import PLAIN, Scores
from polyquant.ops.recurrent import sigmoid
from polyquant.runtime.norm import Norm, bare_norm
from polyquant.runtime.rotary import Rotation
from polyquant.runtime.site import Site
from polyquant.runtime.state import StateSpec
from polyquant.types import F32

__all__ = ["Attention", "Keys", "alibi_slopes", "rotation_index"]


class Keys(Protocol):
    """The keys and values that queries attend to: a decoder's cache, or the current input of an encoder."""

    def attend(
        self, layer: int, q: F32, k: F32, v: F32, *, scale: float, window: int = 0, scores: Scores = PLAIN
    ) -> F32:
        """Attend with q [T, H, D] to k, v [T, G, D] of the same positions -> [T, H, D]."""


class Attention:
    """The attention of one layer."""

    linears = ("qkv", "o")

    def __init__(self, part: parts.Attention, site: Site) -> None:
        hyper = site.hyper
        self.index, self.size, self.c8 = site.index, hyper.head_size, site.c8
        self.state_spec = StateSpec(rows=(hyper.kv_heads, hyper.head_size))
        self.window = hyper.windows[site.index] if hyper.windows else 0
        self.rotation_index = rotation_index(part, hyper, site.index)
        self.scale = hyper.real("attention_scale", self.size**-0.5)
        self.scores = Scores(
            hyper.real("attention_softcap", 0.0),
            alibi_slopes(hyper.heads) if _sloped(part, hyper) else None,
            site.vector("attn_sinks") if part.sinks else None,
            part.chunk if self.rotation_index is not None else 0,
        )
        self.scaling = 1 if self.rotation_index is None and hyper.real("temperature", 0.0) else None
        self.clip = np.float32(hyper.real("clip", 0.0) if part.clip else 0.0)
        self.gated = part.gated
        self.recordable = not (self.clip or self.gated)
        self.norm = site.norm(part.norm) if part.norm else None
        self.qkv = site.linear(*part.inputs)
        wide = hyper.query_width
        self.cuts = (wide, wide + hyper.value_width) if part.fused else None
        normed = (part.head_norms or part.width_norms) and (not part.optional_norms or "attn_q_norm" in site)
        self.late_norms, self.wide_norms = part.late_norms, part.width_norms
        self.q_norm: Norm | None = site.norm("attn_q_norm") if normed else None
        self.k_norm: Norm | None = site.norm("attn_k_norm") if normed else None
        if part.each_norm and "attn_q_norm" in site:
            self.q_norm, self.k_norm = (
                Norm(site.matrix(f"attn_{x}_norm", (n, self.size)), hyper.norm_eps, None, "layer")
                for x, n in (("q", hyper.heads), ("k", hyper.kv_heads))
            )
        if part.unit_heads and self.rotation_index is not None and hyper.count("unit_heads"):
            self.q_norm = self.k_norm = bare_norm(self.size, hyper.norm_eps)
        self.sub_norm = site.norm("attn_sub_norm") if part.sub_norm else None
        self.o = site.linear("attn_output")
        self.post_norm = site.norm("post_attention_norm") if part.post_norm else None

    def __call__(self, x: F32, rotations: Sequence[Rotation], cache: Keys) -> F32:
        """x [T, hidden] -> [T, hidden]; the keys and values of these T tokens are added to the cache."""
        return self.after_norm(x if self.norm is None else self.norm(x), rotations, cache)

    def after_norm(self, x: F32, rotations: Sequence[Rotation], cache: Keys) -> F32:
        """Compute the attention of a normed input x [T, hidden]."""
        tokens, size = len(x), self.size
        q, k, v = self.split(self.qkv(x))
        gate: F32 | None = None
        if self.gated:
            q, gate = (np.ascontiguousarray(y) for y in np.split(q.reshape(tokens, -1, 2 * size), 2, axis=2))
        if self.clip:
            q, k, v = (np.clip(y, -self.clip, self.clip) for y in (q, k, v))
        if self.c8 is not None:
            k, v = (
                y.reshape(tokens, -1)
                for y in self.c8.rounded(self.index, *(y.reshape(tokens, -1, size) for y in (k, v)))
            )
        if self.wide_norms:
            q, k = self._normed(q, k)
        q, k, v = (y.reshape(tokens, -1, size) for y in (q, k, v))  # [T, heads, size]
        if not (self.wide_norms or self.late_norms):
            q, k = self._normed(q, k)
        if self.rotation_index is not None:
            rotation = rotations[self.rotation_index]
            q, k = rotation(q), rotation(k)
        elif self.scaling is not None:
            q = rotations[self.scaling](q)
        if self.late_norms:
            q, k = self._normed(q, k)
        a = cache.attend(self.index, q, k, v, scale=self.scale, window=self.window, scores=self.scores).reshape(
            tokens, -1
        )
        if gate is not None:
            a = a * sigmoid(gate.reshape(tokens, -1))
        (out,) = self.o(a if self.sub_norm is None else self.sub_norm(a))
        return out if self.post_norm is None else self.post_norm(out)

    def _normed(self, q: F32, k: F32) -> tuple[F32, F32]:
        return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))

    def split(self, qkv: Sequence[F32]) -> Sequence[F32]:
        """Split the output of the linear `qkv` into q [T, heads * size], k and v [T, kv_heads * size]."""
        return qkv if self.cuts is None else np.split(qkv[0], self.cuts, axis=1)


def rotation_index(part: parts.Attention, hyper: Hyper, index: int) -> int | None:
    """Return the index of the rotation that layer `index` uses: 0, 1 if sliding-window layers have their own base, None
    for none."""
    windowed = bool(hyper.windows and hyper.windows[index])
    rotating = hyper.more.get("rotating")
    if part.rope == "if_enabled" and not hyper.count("rotates"):
        return None
    if part.rope == "none" or _sloped(part, hyper) or (part.rope == "windowed" and any(hyper.windows) and not windowed):
        return None
    if isinstance(rotating, tuple) and rotating:
        return 0 if rotating[index] else None
    if part.no_rope_every and (index + 1) % part.no_rope_every == 0:
        return None
    return int(windowed and hyper.real("rope_theta_swa", 0.0) > 0)


def _sloped(part: parts.Attention, hyper: Hyper) -> bool:
    """True if the layer uses ALiBi."""
    return part.alibi or part.alibi_at == hyper.layers


def alibi_slopes(heads: int) -> F32:
    """Return the slopes [heads] (Press et al. 2021, section 3 and their code).

    A geometric sequence ending at 2^-8 for a power of two; otherwise the slopes of the next lower power of two, and
    every second slope of the next higher one.
    """
    below = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8.0 * (i + 1) / below) for i in range(below)]
    return np.array(first + [2.0 ** (-4.0 * (2 * i + 1) / below) for i in range(heads - below)], np.float32)
