"""GPT-2 (Radford et al. 2019): learned positions, layer norms, fused QKV; its linears are Conv1D, stored [in, out].

h = x + O attention(q, k, v), [q, k, v] = QKV norm(x);  y = h + D gelu(U norm(h))
"""

from __future__ import annotations

from polyquant.architectures.changes import Transposed
from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.keys import four_times, layer_norm_eps
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, Ends, FeedForward, Layer
from polyquant.architectures.record import Architecture

__all__ = ["GPT2"]

GPT2 = Architecture(
    name="gpt2",
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    reads=("gpt2",),
    names=NameTable(
        {
            "ln_1": "attn_norm",
            "attn.c_attn": "attn_qkv",
            "attn.c_proj": "attn_output",
            "ln_2": "ffn_norm",
            "mlp.c_fc": "ffn_up",
            "mlp.c_proj": "ffn_down",
        },
        top={
            "transformer.wte": "token_embd",
            "transformer.wpe": "position_embd",
            "transformer.ln_f": "output_norm",
            "lm_head": "output",
        },
        prefix="transformer.h.",
    ),
    changes=dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), Transposed),
    hyper=USUAL.changed(
        layers={"config": ("n_layer",)},
        context={"config": ("n_positions", "n_ctx")},
        hidden={"config": ("n_embd",)},
        feed_forward=four_times("n_inner", "n_embd"),
        heads={"config": ("n_head",)},
        kv_heads={"config": (), "write": "never"},
        norm_eps=layer_norm_eps("layer_norm_epsilon"),
        rope_theta={"config": (), "write": "never"},
        rotated={"config": (), "write": "never"},
        head_dim={"config": (), "write": "never"},
        activation={"config": ("activation_function",), "default": "gelu_new"},
    ),
    layer=Layer(
        Attention(fused=True, rope="none"),
        FeedForward(gated=False, activations=("gelu_new", "gelu_pytorch_tanh", "gelu", "relu", "silu")),
    ),
    ends=Ends(positions=True),
    norm="layer",
)
