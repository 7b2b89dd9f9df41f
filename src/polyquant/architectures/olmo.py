"""OLMo (Groeneveld et al. 2024): Llama with layer norms without weights; q, k and v may be clipped. Rows of q and k are
stored interleaved.

h = x + O attention(rope(clip(Q norm(x))), rope(clip(K norm(x))), clip(V norm(x)))
y = h + D (silu(G norm(h)) * U norm(h))

Source: modeling_olmo.py of transformers; llama.cpp's converter.
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.llama import LLAMA, LLAMA_NAMES
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import BARE, Attention, Ends, FeedForward, Layer
from polyquant.architectures.record import Bias

__all__ = ["OLMO"]

OLMO = replace(
    LLAMA,
    name="olmo",
    model_type="olmo",
    class_name="OlmoForCausalLM",
    reads=("olmo",),
    names=NameTable(
        {hf: gguf for hf, gguf in LLAMA_NAMES.items() if not gguf.endswith("_norm")},
        top={"model.embed_tokens": "token_embd", "lm_head": "output"},
    ),
    hyper=replace(
        USUAL.changed(norm_eps={"config": (), "gguf": "attention.layer_norm_epsilon", "default": 1e-5}).plus(
            Key(
                "clip", ("clip_qkv",), "attention.clamp_kqv", default=0.0, kind="real", write="where set",
                entries=lambda value: {"clip_qkv": value or None},
            )
        ),
        tied=False,
    ),
    layer=Layer(Attention(norm=BARE, clip=True), FeedForward(norm=BARE)),
    ends=Ends(bare=True),
    norm="layer",
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output"), "attention_bias"),),
)  # fmt: skip
