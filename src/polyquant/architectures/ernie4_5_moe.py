"""ERNIE 4.5 (Baidu 2025) with experts: softmax router with a selection bias, fused shared experts, leading dense
layers, adjacent pairs rotate.

The experts with the highest softmax(router) + bias are selected; their weights are softmax(router), scaled to sum to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from polyquant.architectures.deepseek import SHARED_EXPERTS
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.keys import constant, expert_keys
from polyquant.architectures.llama import LLAMA_NAMES
from polyquant.architectures.mixture import Mixture
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Layer
from polyquant.architectures.qwen_moe import EXPERTS
from polyquant.architectures.record import Architecture, Bias
from polyquant.gguf_values import u32
from polyquant.types import Meta

__all__ = ["ERNIE4_5_MOE"]


def _shared(hyper: Hyper) -> Mapping[str, Meta]:
    """Return the combined width of all shared experts."""
    width = hyper.count("shared_experts") * hyper.count("expert_feed_forward")
    return {"expert_shared_feed_forward_length": u32(width)} if width else {}


ERNIE4_5_MOE = Architecture(
    name="ernie4_5-moe",
    model_type="ernie4_5_moe",
    class_name="Ernie4_5_MoeForCausalLM",
    reads=("ernie4_5_moe",),
    names=NameTable(
        {**LLAMA_NAMES, **SHARED_EXPERTS, "mlp.gate": "ffn_gate_inp"},
        exact={"mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias"},
    ),
    moves=EXPERTS,
    hyper=replace(
        USUAL.plus(
            *expert_keys("moe_num_experts", used="moe_k"),
            Key("shared_experts", ("moe_num_shared_experts",), "expert_shared_count", default=0, low=0,
                write="where set"),
            Key("first_dense", ("moe_layer_start_index",), "leading_dense_block_count", default=1, low=0),
            Key("expert_step", ("moe_layer_interval",), "interleave_moe_layer_step", default=1),
            constant("expert_norm", 1),
        ),
        more_metadata=_shared,
        more_config=lambda hyper: {"moe_layer_end_index": hyper.layers - 1},
    ),
    layer=Layer(feed_forward=Mixture(normed=True, least=1e-12, shared=True)),
    pairs=True,
    unused={r"model\.mtp_.*": "multi-token prediction (MTP), which ernie4_5-moe does not run"},
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), "use_bias"),),
)  # fmt: skip
