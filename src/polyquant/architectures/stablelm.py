"""StableLM: Llama's block with layer norms; a quarter of each head rotates.

StableLM 2 12B has QK norms with separate weights per head, and attention and feed-forward in parallel after one norm
(`use_parallel_residual`).

Source: modeling_stablelm.py of transformers; llama.cpp's converter.
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.keys import layer_norm_eps, no_head_dim
from polyquant.architectures.llama import LLAMA_NAMES
from polyquant.architectures.moves import Experts
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, FeedForward, ParallelLayer
from polyquant.architectures.record import Architecture, Bias, has

__all__ = ["STABLELM"]

STABLELM = Architecture(
    name="stablelm",
    model_type="stablelm",
    class_name="StableLmForCausalLM",
    reads=("stablelm",),
    names=NameTable(LLAMA_NAMES),
    moves=tuple(
        Experts(f"self_attn.{x}_layernorm.norms.{{e}}.weight", f"attn_{x}_norm.weight") for x in "qk"
    ),  # one norm per head
    hyper=replace(
        USUAL.changed(
            rope_theta={"write": "unless default"},
            norm_eps=layer_norm_eps("layer_norm_eps"),
            head_dim=no_head_dim(),
            rotated={"config": ("partial_rotary_factor", "rope_pct"), "default": 0.25, "write": "always"},
        ).plus(Key("parallel", ("use_parallel_residual",), "use_parallel_residual", kind="flag", default=0)),
        tied=False,
    ),
    layer=ParallelLayer(Attention(each_norm=True), FeedForward(), flag="parallel", shared=True),
    norm="layer",
    biases=(Bias(("attn_q", "attn_k", "attn_v"), "use_qkv_bias"),),
    switches={"qk_layernorm": has("attn_q_norm.weight")},
)
