"""Qwen3-Next (Qwen 2025): gated delta rule (Yang et al. 2024) in three of four layers, attention with an output gate in
the fourth.

Qwen3-Next has one matrix for q, k, v and z, grouped by key head, and one for b and a; Qwen3.5 (qwen35.py) has separate
ones. Norms are stored as an offset from 1, except that of the delta rule. Multi-token prediction (MTP) layers are not
converted.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from polyquant.architectures.changes import Decay, Plus, Squeezed
from polyquant.architectures.delta_rule import DeltaRule, delta_sizes, delta_table
from polyquant.architectures.hybrid import attention_or
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.hyper_table import Key
from polyquant.architectures.keys import expert_keys, shared_expert_key, silent
from polyquant.architectures.llama import LLAMA_NAMES
from polyquant.architectures.mixture import Mixture
from polyquant.architectures.moves import Make, Move, rows_together
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, FeedForward, Layer
from polyquant.architectures.qwen_moe import EXPERTS, SHARED
from polyquant.architectures.record import Architecture, Bias
from polyquant.errors import InputError
from polyquant.operations import Operation, Rows, Slice, chain
from polyquant.types import Shape

__all__ = [
    "ATTENTION_STEMS",
    "EXACT",
    "EXPERTS_BEHIND",
    "EXPERT_KEYS",
    "EXPERT_STEMS",
    "FROM_ONE",
    "GATED",
    "QWEN3_NEXT",
]


def _qkvz(part: int) -> Make:
    """Return part 0: all q, all k, all v; or part 1: all z."""

    def make(hyper: Hyper, shape: Shape) -> Operation:
        keys, key, each, value = delta_sizes(hyper)
        wide = each * value
        group = np.arange(keys * 2 * (key + wide), dtype=np.int64).reshape(keys, -1)
        if shape[0] != group.size:
            raise InputError("rows do not fit the heads of the configuration", expected=group.size, found=list(shape))
        ends = (0, key, 2 * key, 2 * key + wide, group.shape[1])
        order = np.concatenate([group[:, a:b].reshape(-1) for a, b in pairwise(ends)])
        cut = keys * (2 * key + wide)
        return chain(Rows(order), Slice(0, cut) if part == 0 else Slice(cut, group.size))

    return make


_QKVZ = Move(
    "linear_attn.in_proj_qkvz.weight",
    {"attn_qkv.weight": _qkvz(0), "attn_gate.weight": _qkvz(1)},
    rows_together,
)

ATTENTION_STEMS = {
    **{stem: name for stem, name in LLAMA_NAMES.items() if not stem.startswith("mlp.")},
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
EXACT = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
FROM_ONE = dict.fromkeys(("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm"), Plus(1.0))
EXPERT_STEMS = {**SHARED, "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp"}
EXPERT_KEYS = (*expert_keys("num_experts"), shared_expert_key("shared_expert_intermediate_size"))

GATED = Attention(head_norms=True, gated=True)
EXPERTS_BEHIND = Mixture(
    FeedForward(norm="post_attention_norm"), "post_attention_norm", normed=True, shared=True, shared_gate=True
)

_WARNING = Key("expert_norm", ("norm_topk_prob",), kind="flag", default=1)

QWEN3_NEXT = Architecture(
    name="qwen3next",
    model_type="qwen3_next",
    class_name="Qwen3NextForCausalLM",
    reads=("qwen3_next",),
    names=NameTable({**ATTENTION_STEMS, **EXPERT_STEMS, "linear_attn.in_proj_ba": "ssm_ba"}, exact=EXACT),
    hyper=replace(
        delta_table(*EXPERT_KEYS, _WARNING),
        always={"decoder_sparse_step": 1, "mlp_only_layers": []},
        gguf_warning=silent(_WARNING),
    ),
    changes={**FROM_ONE, "ssm_a": Decay(column=False), "ssm_conv1d": Squeezed},
    moves=(_QKVZ, *EXPERTS),
    layer=Layer(attention_or(GATED, DeltaRule()), EXPERTS_BEHIND),
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output"), "attention_bias"),),
    unused={r"(model\.)?mtp\..*": "multi-token prediction (MTP) layers are not converted"},
)
