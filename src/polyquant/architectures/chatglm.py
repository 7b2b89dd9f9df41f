"""ChatGLM2, ChatGLM3 and the first GLM-4 (model_type `chatglm`; Zeng et al. 2023, GLM-130B).

q, k and v are one matrix with a bias, gate and up another; pairs (2i, 2i + 1) of the first half of each head rotate.
GGUF architecture `chatglm`; no rows are permuted.

h = x + O attention(rope(q), rope(k), v), [q, k, v] = W norm(x) + b
y = h + D (silu(gate) * up), [gate, up] = U norm(h)

rope_ratio multiplies the base of 10000, as in ChatGLM3 and GLM-4. ChatGLM2-6B-32k divides positions by it instead, but
its config.json is indistinguishable and llama.cpp multiplies the base for it too.
Source: configuration_chatglm.py and modeling_chatglm.py of THUDM/chatglm2-6b; llama.cpp's converter.
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, FeedForward, Layer
from polyquant.architectures.record import Architecture, Bias

__all__ = ["CHATGLM"]

_TABLE = USUAL.changed(
    layers={"config": ("num_layers",)},
    context={"config": ("seq_length",)},
    feed_forward={"config": ("ffn_hidden_size",)},
    kv_heads={"config": ("multi_query_group_num",)},
    rope_theta={"config": ("rope_ratio",), "unit": 10000.0},
    norm_eps={"config": ("layernorm_epsilon",)},
    head_dim={"config": ("kv_channels",)},
    vocab={"config": ("padded_vocab_size", "vocab_size")},
    rotated={"config": (), "default": 0.5},
    activation={"config": ()},
)

CHATGLM = Architecture(
    name="chatglm",
    model_type="chatglm",
    class_name="ChatGLMForConditionalGeneration",
    reads=("chatglm",),
    requires=("padded_vocab_size",),  # the original ChatGLM has the same model_type but another architecture
    names=NameTable(
        {
            "input_layernorm": "attn_norm",
            "self_attention.query_key_value": "attn_qkv",
            "self_attention.dense": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "mlp.dense_h_to_4h": "ffn_up",
            "mlp.dense_4h_to_h": "ffn_down",
        },
        top={
            "transformer.embedding.word_embeddings": "token_embd",
            "transformer.encoder.final_layernorm": "output_norm",
            "transformer.output_layer": "output",
        },
        prefix="transformer.encoder.layers.",
    ),
    hyper=replace(
        _TABLE,
        always={
            "rmsnorm": True,
            "post_layer_norm": True,
            "multi_query_attention": True,
            "apply_residual_connection_post_layernorm": False,
        },
        written={"original_rope": True},
        tied=False,
    ),
    layer=Layer(Attention(fused=True), FeedForward(fused=True)),
    pairs=True,
    biases=(
        Bias(("attn_qkv",), "add_qkv_bias"),
        Bias(("ffn_up", "attn_qkv", "attn_output", "ffn_down"), "add_bias_linear"),
    ),
)
