"""gpt-oss (OpenAI 2025): attention with sinks, sliding windows in every second layer from the first, biases everywhere.

The router's softmax is over the selected experts, which compute (clip(u) + 1) * g sigmoid(1.702 g), g = clip(G n),
clipped at 7.

Float experts are stored [experts, in, out] with interleaved gate and up columns; MXFP4 experts [experts, out, in] with
interleaved gate and up rows. YaRN's correction range is not rounded to integers (`truncate`).
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.fused import Fused
from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.keys import constant, expert_keys, experts_as_wide, sliding_window
from polyquant.architectures.mixtral import ATTENTION_NAMES
from polyquant.architectures.mixture import Mixture
from polyquant.architectures.moves import Move, halves
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, Layer
from polyquant.architectures.record import Architecture, Bias
from polyquant.architectures.windows import all_but_every, gguf_windows, layer_types, where_listed
from polyquant.operations import SAME, Transpose

__all__ = ["GPT_OSS"]

_EXPERTS = "mlp.experts."
_PACKED = ("mxfp4", "hf_mxfp4")


_GATE_UP = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
_GATE_UP_BIAS = ("ffn_gate_exps.bias", "ffn_up_exps.bias")

GPT_OSS = Architecture(
    name="gpt-oss",
    model_type="gpt_oss",
    class_name="GptOssForCausalLM",
    reads=("gpt_oss",),
    names=NameTable(
        {**ATTENTION_NAMES, "post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
        exact={
            "self_attn.sinks": "attn_sinks.weight",
            f"{_EXPERTS}down_proj_bias": "ffn_down_exps.bias",
        },
    ),
    moves=(
        halves(f"{_EXPERTS}gate_up_proj_blocks", *_GATE_UP, interleaved=True, codecs=_PACKED),
        Move(
            f"{_EXPERTS}down_proj_blocks", {"ffn_down_exps.weight": lambda hyper, shape: SAME},
            lambda hyper, shapes: shapes[0], _PACKED
        ),
        Move(
            f"{_EXPERTS}down_proj",
            {"ffn_down_exps.weight": lambda hyper, shape: Transpose()},
            lambda hyper, shapes: (*shapes[0][:-2], shapes[0][-1], shapes[0][-2]),
        ),
        halves(f"{_EXPERTS}gate_up_proj", *_GATE_UP, interleaved=True, transposed=True),
        halves(f"{_EXPERTS}gate_up_proj_bias", *_GATE_UP_BIAS, axis=-1, interleaved=True),
    ),
    fused=Fused(
        f"{_EXPERTS}gate_up_proj",
        f"{_EXPERTS}down_proj",
        "mlp.experts",
        f"{_EXPERTS}{{e}}.{{part}}",
        transposed=True,
        alternate=True,
    ),
    hyper=replace(
        USUAL.changed(norm_eps={"default": 1e-5}, rotated={"config": (), "gguf": None}).plus(
            *expert_keys("num_local_experts", feed_forward=None),
            experts_as_wide(),
            sliding_window(default=128),
            constant("gating", 3),
        ),
        windows=where_listed(all_but_every(2), size=128),
        gguf_windows=gguf_windows(all_but_every(2)),
        yarn={"truncate": False},
        written={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        more_config=layer_types,
    ),
    layer=Layer(
        Attention(sinks=True),
        Mixture(norm="post_attention_norm", gating="softmax_after_topk", clamped=True),
    ),
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output"), "attention_bias"),),
)  # fmt: skip
