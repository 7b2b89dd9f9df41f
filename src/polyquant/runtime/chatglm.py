"""ChatGLM2 (Zeng et al. 2023, GLM-130B; THUDM/chatglm2-6b): q, k, v in one matrix with bias, gate and up in another, half of each head rotates.

h = x + O attention(rope(q), rope(k), v), [q, k, v] = W norm(x) + b
y = h + D (silu(gate) * up), [gate, up] = U norm(h)
"""

from __future__ import annotations

import numpy as np

from polyquant.architectures.hyper import Hyper
from polyquant.ops.decoder import add, rotate, swiglu
from polyquant.runtime.c8 import C8
from polyquant.runtime.kv_cache import KVCache
from polyquant.runtime.norm import read_norm
from polyquant.runtime.rotary import Rotary
from polyquant.runtime.tensors import Tensors
from polyquant.types import F32

__all__ = ["ChatGLMLayer"]


class ChatGLMLayer:
    """One layer of the decoder."""

    recordable = True

    def __init__(self, tensors: Tensors, hyper: Hyper, index: int, c8: C8 | None = None) -> None:
        self.index, self.eps, self.size, self.c8 = index, hyper.rms_eps, hyper.head_size, c8
        hidden, wide, kv = hyper.hidden, hyper.heads * hyper.head_size, hyper.kv_heads * hyper.head_size
        blk = f"blk.{index}."
        self.cuts = (wide, wide + kv)
        self.attn_norm = read_norm(tensors, f"{blk}attn_norm", hidden, self.eps, [f"{blk}attn_qkv"])
        self.qkv = tensors.linear(hidden, [(f"{blk}attn_qkv", wide + 2 * kv)])
        self.o = tensors.linear(wide, [(f"{blk}attn_output", hidden)])
        self.ffn_norm = read_norm(tensors, f"{blk}ffn_norm", hidden, self.eps, [f"{blk}ffn_up"])
        self.gate_up = tensors.linear(hidden, [(f"{blk}ffn_up", 2 * hyper.feed_forward)])
        self.down = tensors.linear(hyper.feed_forward, [(f"{blk}ffn_down", hidden)])

    def __call__(self, x: F32, cos: F32, sin: F32, rotary: Rotary, cache: KVCache) -> F32:
        """x [T, hidden] -> [T, hidden]; the keys and values of these T tokens go into the cache."""
        tokens, size = len(x), self.size
        h = self.attn_norm(x)
        (qkv,) = self.qkv(h)  # [T, (H + 2 G) D]
        q, k, v = (y.reshape(tokens, -1, size) for y in np.split(qkv, self.cuts, axis=1))
        if self.c8 is not None:
            k, v = self.c8.rounded(self.index, k, v)
        q = rotate(q, cos, sin, interleaved=rotary.interleaved)
        k = rotate(k, cos, sin, interleaved=rotary.interleaved)
        a = cache.attend(self.index, q, k, v, scale=size**-0.5)
        (o,) = self.o(a.reshape(tokens, -1))
        x = add(x, o)
        h = self.ffn_norm(x)
        (both,) = self.gate_up(h)  # [T, 2 F]
        gate, up = np.split(both, 2, axis=1)
        (down,) = self.down(swiglu(gate, up))
        return add(x, down)
