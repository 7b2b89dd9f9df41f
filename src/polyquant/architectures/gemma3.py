"""Gemma 3 (text): Gemma 2 with QK norms and without capping.

Five layers of six have a sliding window, with their own RoPE base; RoPE scaling applies only to the others.

Source: modeling_gemma3.py of transformers; llama.cpp's converter.
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.changes import Plus
from polyquant.architectures.gemma import FOUR_NORMS, GELU, GEMMA2, GEMMA_TABLE, NORMS, attention_scale, query_scalar
from polyquant.architectures.hyper_table import Key
from polyquant.architectures.keys import sliding_window, softcap_key, theta_of, two_ropes
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, FeedForward, Layer
from polyquant.architectures.windows import all_but_every, gguf_windows, layer_types, where_listed

__all__ = ["GEMMA3", "LOCAL_THETA"]


LOCAL_THETA = Key(
    "rope_theta_swa", ("rope_local_base_freq",), "rope.freq_base_swa", default=10000.0, kind="real",
    read=theta_of("sliding_attention", "rope_local_base_freq"),
)  # fmt: skip
"""The RoPE base of layers with a sliding window."""


_SCALE, _WARNING = attention_scale(62)

GEMMA3 = replace(
    GEMMA2,
    name="gemma3",
    model_type="gemma3_text",
    class_name="Gemma3ForCausalLM",
    reads=("gemma3_text",),
    names=NameTable({**FOUR_NORMS, "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}),
    changes=dict.fromkeys((*NORMS, "attn_q_norm", "attn_k_norm"), Plus(1.0)),
    layer=Layer(Attention(head_norms=True, post_norm=True), FeedForward(activations=GELU, post_norm=True)),
    hyper=replace(
        GEMMA_TABLE.changed(
            rope_theta={"default": 1e6, "write": "always"},
            context={"default": 131072},
            heads={"read": lambda config: config.get("num_attention_heads", 8)},
            kv_heads={"read": lambda config: config.get("num_key_value_heads", 4)},
        ).plus(
            LOCAL_THETA,
            softcap_key("logit_softcap", 0.0),
            sliding_window(default=4096),
            _SCALE,
        ),
        tied=True,
        always={"use_bidirectional_attention": False},  # EmbeddingGemma is another architecture
        windows=where_listed(all_but_every(6)),
        gguf_windows=gguf_windows(all_but_every(6)),
        more_config=lambda hyper: {**layer_types(hyper), **query_scalar(hyper), **two_ropes(hyper)},
        gguf_warning=_WARNING,
    ),
)
