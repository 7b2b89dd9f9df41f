"""OLMo 2: norms behind attention and feed-forward part instead of before them, and over all of q and all of k.

h = x + norm(O attention(rope(norm(Q x)), rope(norm(K x)), V x));  y = h + norm(D (silu(G h) * U h))

Source: modeling_olmo2.py of transformers; llama.cpp's converter.
"""

from __future__ import annotations

from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.llama import LLAMA_NAMES
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import ConvertedOnly
from polyquant.architectures.record import Architecture, Bias

__all__ = ["OLMO2"]

_NAMES = {hf: gguf for hf, gguf in LLAMA_NAMES.items() if not hf.endswith("layernorm")}

OLMO2 = Architecture(
    name="olmo2",
    model_type="olmo2",
    class_name="Olmo2ForCausalLM",
    reads=("olmo2",),
    names=NameTable(
        {
            **_NAMES,
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
            "post_attention_layernorm": "post_attention_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
    ),
    hyper=USUAL.changed(norm_eps={"default": 1e-5}),
    layer=ConvertedOnly(),
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output"), "attention_bias"),),
)
