"""BitNet b1.58 (Ma et al. 2024; BitNet b1.58 2B4T, 2025): ternary linears, a norm before o and one before down, squared ReLU.

    h = x + O norm(attention(...));  y = h + D norm(relu(G norm(h))^2 * U norm(h))

Activations of the linears are rounded to int8 per token: the model was trained so. The older 1bitLLM models gate with SiLU; llama.cpp's
`bitnet` architecture does so whatever hidden_act says, and rounds activations per block.
"""

from __future__ import annotations

from polyquant.architectures.hyper import Hyper
from polyquant.ops.decoder import add, relu2_gate, rms_norm, rotate, swiglu
from polyquant.runtime.kv_cache import KVCache
from polyquant.runtime.rotary import Rotary
from polyquant.runtime.tensors import Tensors
from polyquant.types import F32

__all__ = ["BitNetLayer"]


class BitNetLayer:
    """One layer. silu: gate with SiLU instead of squared ReLU."""

    recordable = True

    def __init__(self, tensors: Tensors, hyper: Hyper, index: int, *, silu: bool) -> None:
        self.index, self.eps, self.size = index, hyper.rms_eps, hyper.head_size
        hidden, wide, kv, ffn = (
            hyper.hidden,
            hyper.heads * hyper.head_size,
            hyper.kv_heads * hyper.head_size,
            hyper.feed_forward,
        )
        blk = f"blk.{index}."
        self.attn_norm = tensors.vector(f"{blk}attn_norm.weight", hidden)
        self.qkv = tensors.linear(hidden, [(f"{blk}attn_q", wide), (f"{blk}attn_k", kv), (f"{blk}attn_v", kv)])
        self.attn_sub_norm = tensors.vector(f"{blk}attn_sub_norm.weight", wide)
        self.o = tensors.linear(wide, [(f"{blk}attn_output", hidden)])
        self.ffn_norm = tensors.vector(f"{blk}ffn_norm.weight", hidden)
        self.gate_up = tensors.linear(hidden, [(f"{blk}ffn_gate", ffn), (f"{blk}ffn_up", ffn)])
        self.ffn_sub_norm = tensors.vector(f"{blk}ffn_sub_norm.weight", ffn)
        self.down = tensors.linear(ffn, [(f"{blk}ffn_down", hidden)])
        self.gated = swiglu if silu else relu2_gate

    def __call__(self, x: F32, cos: F32, sin: F32, rotary: Rotary, cache: KVCache) -> F32:
        """x [T, hidden] -> [T, hidden]; the keys and values of these T tokens go into the cache."""
        tokens, size = len(x), self.size
        h = rms_norm(x, self.attn_norm, self.eps)
        q, k, v = (y.reshape(tokens, -1, size) for y in self.qkv(h))
        q = rotate(q, cos, sin, interleaved=rotary.interleaved)
        k = rotate(k, cos, sin, interleaved=rotary.interleaved)
        a = cache.attend(self.index, q, k, v, scale=size**-0.5)
        a = rms_norm(a.reshape(tokens, -1), self.attn_sub_norm, self.eps)
        (o,) = self.o(a)
        x = add(x, o)
        h = rms_norm(x, self.ffn_norm, self.eps)
        gate, up = self.gate_up(h)
        h = rms_norm(self.gated(gate, up), self.ffn_sub_norm, self.eps)
        (down,) = self.down(h)
        return add(x, down)
