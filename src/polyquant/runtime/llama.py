"""Llama and its relatives: Llama, Mistral, Qwen2 (biases on q, k, v), Qwen3 (a norm on each head of q and k).

h = x + O attention(rope(Q norm(x)), rope(K norm(x)), V norm(x))
y = h + D (silu(G norm(h)) * U norm(h))
"""

from __future__ import annotations

from polyquant.architectures.hyper import Hyper
from polyquant.ops.decoder import add, rms_norm, rotate, swiglu
from polyquant.runtime.c8 import C8
from polyquant.runtime.kv_cache import KVCache
from polyquant.runtime.norm import read_norm
from polyquant.runtime.rotary import Rotary
from polyquant.runtime.tensors import Tensors
from polyquant.types import F32

__all__ = ["LlamaLayer"]


class LlamaLayer:
    """One layer of the decoder."""

    recordable = True

    def __init__(self, tensors: Tensors, hyper: Hyper, index: int, c8: C8 | None = None) -> None:
        self.index, self.eps, self.size, self.c8 = index, hyper.rms_eps, hyper.head_size, c8
        self.window = hyper.windows[index] if hyper.windows else 0
        hidden, wide, kv = hyper.hidden, hyper.heads * hyper.head_size, hyper.kv_heads * hyper.head_size
        blk = f"blk.{index}."
        self.attn_norm = read_norm(tensors, f"{blk}attn_norm", hidden, self.eps, [f"{blk}attn_{x}" for x in "qkv"])
        self.qkv = tensors.linear(hidden, [(f"{blk}attn_q", wide), (f"{blk}attn_k", kv), (f"{blk}attn_v", kv)])
        self.q_norm = self.k_norm = None
        if f"{blk}attn_q_norm.weight" in tensors:
            self.q_norm = tensors.vector(f"{blk}attn_q_norm.weight", self.size)
            self.k_norm = tensors.vector(f"{blk}attn_k_norm.weight", self.size)
        self.o = tensors.linear(wide, [(f"{blk}attn_output", hidden)])
        self.ffn_norm = read_norm(tensors, f"{blk}ffn_norm", hidden, self.eps, [f"{blk}ffn_gate", f"{blk}ffn_up"])
        self.gate_up = tensors.linear(
            hidden, [(f"{blk}ffn_gate", hyper.feed_forward), (f"{blk}ffn_up", hyper.feed_forward)]
        )
        self.down = tensors.linear(hyper.feed_forward, [(f"{blk}ffn_down", hidden)])

    def __call__(self, x: F32, cos: F32, sin: F32, rotary: Rotary, cache: KVCache) -> F32:
        """x [T, hidden] -> [T, hidden]; the keys and values of these T tokens go into the cache."""
        tokens, size = len(x), self.size
        h = self.attn_norm(x)
        q, k, v = (y.reshape(tokens, -1, size) for y in self.qkv(h))
        if self.c8 is not None:
            k, v = self.c8.rounded(self.index, k, v)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps)
        q = rotate(q, cos, sin, interleaved=rotary.interleaved)
        k = rotate(k, cos, sin, interleaved=rotary.interleaved)
        a = cache.attend(self.index, q, k, v, scale=size**-0.5, window=self.window)
        (o,) = self.o(a.reshape(tokens, -1))
        x = add(x, o)
        h = self.ffn_norm(x)
        gate, up = self.gate_up(h)
        (down,) = self.down(swiglu(gate, up))
        return add(x, down)
