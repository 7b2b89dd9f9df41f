"""GLM-4-0414 (model_type `glm4`): norms before and after each part, gate and up in one matrix; adjacent pairs of half
of each head rotate.

h = x + norm(O attention(rope(Q n), rope(K n), V n)), n = norm(x)
y = h + norm(D (silu(gate) * up)), [gate, up] = U norm(h)
"""

from __future__ import annotations

from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, FeedForward, Layer
from polyquant.architectures.record import Architecture, Bias

__all__ = ["GLM4"]

GLM4 = Architecture(
    name="glm4",
    model_type="glm4",
    class_name="Glm4ForCausalLM",
    reads=("glm4",),
    names=NameTable(
        {
            "input_layernorm": "attn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "post_self_attn_layernorm": "post_attention_norm",
            "post_attention_layernorm": "ffn_norm",
            "mlp.gate_up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
            "post_mlp_layernorm": "post_ffw_norm",
        }
    ),
    hyper=USUAL.changed(rotated={"default": 0.5, "write": "always"}),
    layer=Layer(Attention(post_norm=True), FeedForward(fused=True, post_norm=True)),
    pairs=True,
    biases=(Bias(("attn_q", "attn_k", "attn_v"), "attention_bias"),),
)
