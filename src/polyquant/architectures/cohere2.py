"""Command R7B, Command A (Cohere, 2024): attention and feed-forward in parallel after one norm.

Three layers of four have a sliding window and RoPE; the fourth has full attention without positions.

y = x + O attention(rope(Q n), rope(K n), V n) + D (silu(G n) * U n), n = norm(x);  logits times logit_scale
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.keys import layer_norm_eps, sliding_window
from polyquant.architectures.llama import LLAMA_NAMES
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, FeedForward, ParallelLayer
from polyquant.architectures.record import Architecture, Bias
from polyquant.architectures.windows import all_but_every, gguf_windows, layer_types, where_listed
from polyquant.gguf_values import string

__all__ = ["COHERE2"]

_PERIOD = 4

COHERE2 = Architecture(
    name="cohere2",
    model_type="cohere2",
    class_name="Cohere2ForCausalLM",
    reads=("cohere2",),
    names=NameTable({hf: gguf for hf, gguf in LLAMA_NAMES.items() if gguf != "ffn_norm"}),
    hyper=replace(
        USUAL.changed(
            norm_eps=layer_norm_eps("layer_norm_eps"),
            vocab={"write": "always"},
            rotated={"config": (), "write": "always"},
        ).plus(
            Key("logit_scale", ("logit_scale",), "logit_scale", default=0.0625, kind="real"),
            sliding_window(default=4096),
        ),
        always={"rotary_pct": 1.0, "position_embedding_type": "rope_gptj", "sliding_window_pattern": _PERIOD},
        metadata={"rope.scaling.type": string("none")},
        tied=True,
        windows=where_listed(all_but_every(_PERIOD)),
        gguf_windows=gguf_windows(all_but_every(_PERIOD)),
        more_config=layer_types,
    ),
    layer=ParallelLayer(Attention(rope="windowed"), FeedForward(norm="attn_norm"), shared=True),
    norm="layer",
    pairs=True,
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output"), "attention_bias"),),
)
