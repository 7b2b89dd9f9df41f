"""StarCoder 2: layer norms, biases everywhere, ungated feed-forward: y = h + D gelu(U norm(h)). GGUF does not store its
sliding window.

Source: modeling_starcoder2.py of transformers; llama.cpp's converter.
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.keys import layer_norm_eps, no_head_dim
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, FeedForward, Layer
from polyquant.architectures.record import Architecture, Bias
from polyquant.architectures.windows import in_every_layer

__all__ = ["STARCODER2"]

STARCODER2 = Architecture(
    name="starcoder2",
    model_type="starcoder2",
    class_name="Starcoder2ForCausalLM",
    reads=("starcoder2",),
    names=NameTable(
        {
            "input_layernorm": "attn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "mlp.c_fc": "ffn_up",
            "mlp.c_proj": "ffn_down",
        }
    ),
    hyper=replace(
        USUAL.changed(
            norm_eps=layer_norm_eps("norm_epsilon"),
            head_dim=no_head_dim(),
            rotated={"config": ()},
            activation={"default": "gelu_pytorch_tanh"},
        ),
        windows=in_every_layer,
        written={"sliding_window": None},
        tied=True,
    ),
    layer=Layer(Attention(), FeedForward(gated=False, activations=("gelu_pytorch_tanh", "gelu_new", "gelu"))),
    norm="layer",
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"), "use_bias"),),
)
