"""Phi-1, Phi-1.5 and Phi-2 (GGUF `phi2`), and Phi-3 and Phi-4 (GGUF `phi3`).

phi2   h = x + O attention(q, k, v) + D gelu(U n), with n = norm(x) as the common input; layer norms, biases everywhere
including the head, partial rotary embeddings
phi3   Llama's block with q, k and v in one matrix and gate and up in another; no rows are permuted; longrope

Source: modeling_phi.py and modeling_phi3.py of transformers; llama.cpp's converter.
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.keys import layer_norm_eps, no_head_dim, sliding_window
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, FeedForward, Layer, ParallelLayer
from polyquant.architectures.record import Architecture, Bias
from polyquant.architectures.windows import gguf_windows, in_every_layer

__all__ = ["PHI2", "PHI3"]

PHI2 = Architecture(
    name="phi2",
    model_type="phi",
    class_name="PhiForCausalLM",
    reads=("phi",),
    names=NameTable(
        {
            "input_layernorm": "attn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.dense": "attn_output",
            "mlp.fc1": "ffn_up",
            "mlp.fc2": "ffn_down",
        },
        top={"model.embed_tokens": "token_embd", "model.final_layernorm": "output_norm", "lm_head": "output"},
    ),
    hyper=replace(
        USUAL.changed(
            rope_theta={"write": "unless default"},
            norm_eps=layer_norm_eps("layer_norm_eps"),
            head_dim=no_head_dim(),
            rotated={"default": 0.5, "write": "always"},
            activation={"default": "gelu_new"},
        ),
        always={"qk_layernorm": False},
        tied=False,
    ),
    layer=ParallelLayer(
        Attention(),
        FeedForward(
            gated=False, norm="attn_norm", activations=("gelu_new", "gelu_pytorch_tanh", "gelu", "relu", "silu")
        ),
        shared=True,
    ),
    norm="layer",
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")),),
)
PHI3 = Architecture(
    name="phi3",
    model_type="phi3",
    class_name="Phi3ForCausalLM",
    reads=("phi3",),
    names=NameTable(
        {
            "input_layernorm": "attn_norm",
            "self_attn.qkv_proj": "attn_qkv",
            "self_attn.o_proj": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "mlp.gate_up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        }
    ),
    hyper=replace(
        USUAL.changed(
            context={"default": 4096},
            norm_eps={"default": 1e-5},
            head_dim=no_head_dim(),
            rotated={"write": "always"},
        ).plus(
            Key(
                "original_context",
                ("original_max_position_embeddings",),
                "rope.scaling.original_context_length",
                default=4096,
                high=(1 << 32) - 1,
            ),
            replace(sliding_window(), write="always"),
        ),
        windows=in_every_layer,
        gguf_windows=gguf_windows(lambda layer: True),
        tied=False,
    ),
    layer=Layer(Attention(fused=True), FeedForward(fused=True)),
)
