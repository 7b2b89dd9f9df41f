"""OLMo 2: norms after attention and feed-forward instead of before them, and full-width QK norms.

OLMo 3 has a sliding window in three layers of four, whose RoPE is not scaled; GGUF calls both `olmo2`.

h = x + norm(O attention(rope(norm(Q x)), rope(norm(K x)), V x));  y = h + norm(D (silu(G h) * U h))

Source: modeling_olmo2.py and modeling_olmo3.py of transformers; llama.cpp's converter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyquant.architectures.hyper import Hyper
from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.keys import sliding_layers_key, sliding_window
from polyquant.architectures.llama import LLAMA_NAMES
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, FeedForward, Layer
from polyquant.architectures.record import Architecture, Bias
from polyquant.architectures.windows import all_but_every, listed_types, listed_windows, where_listed

__all__ = ["OLMO2", "OLMO3"]

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
    layer=Layer(Attention(norm="", width_norms=True, post_norm=True), FeedForward(norm="", post_norm=True)),
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output"), "attention_bias"),),
)

_PERIOD = 4


def _two_ropes(hyper: Hyper) -> dict[str, Any]:
    plain = {"rope_type": "default", "rope_theta": hyper.rope_theta}
    return {"rope_parameters": {"full_attention": {**plain, **hyper.rope}, "sliding_attention": plain}}


OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    class_name="Olmo3ForCausalLM",
    reads=("olmo3",),
    gguf_requires=("attention.sliding_window",),
    hyper=replace(
        OLMO2.hyper.changed(rope_theta={"default": 500000.0}).plus(
            sliding_window(default=4096),
            sliding_layers_key(_PERIOD),
            Key("rope_theta_swa", (), "rope.freq_base_swa", default="rope_theta", kind="real"),
        ),
        tied=False,
        windows=where_listed(all_but_every(_PERIOD)),
        gguf_windows=listed_windows,
        more_config=lambda hyper: {**listed_types(hyper), **_two_ropes(hyper)},
    ),
)
