"""BitNet b1.58: ternary linears, a norm before o_proj and one before down_proj.

| GGUF architecture | who writes it | activation | from |
|---|---|---|---|
| bitnet-b1.58 | bitnet.cpp | squared ReLU | BitNetForCausalLM (the 2B-4T model) |
| bitnet-25 | older bitnet.cpp | squared ReLU | read only |
| bitnet | llama.cpp | SiLU, whatever hidden_act says | BitnetForCausalLM (the 1bitLLM models) |

Rows of q and k keep their order. Runtimes want the embedding as F16; it is a matrix, so the recipe decides.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyquant.architectures.names import ATTENTION, Family
from polyquant.gguf_values import f32, string

__all__ = ["BITNET", "BITNET_25", "BITNET_B158"]


def _relu2(tensors: frozenset[str]) -> dict[str, Any]:
    return {"hidden_act": "relu2", "attention_bias": False}


def _silu(tensors: frozenset[str]) -> dict[str, Any]:
    return {"hidden_act": "silu", "attention_bias": False}


BITNET_B158 = Family(
    architecture="bitnet-b1.58",
    model_type="bitnet",
    class_name="BitNetForCausalLM",
    blocks={**ATTENTION, "self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm"},
    also_read={"self_attn.inner_attn_ln": "attn_sub_norm", "mlp.ffn_layernorm": "ffn_sub_norm"},
    ternary=True,
    says_sizes=True,
    default_theta=500000.0,
    settings=_relu2,
)
BITNET_25 = replace(BITNET_B158, architecture="bitnet-25")
BITNET = replace(
    BITNET_B158,
    architecture="bitnet",
    says_sizes=False,
    fixed={"rope.scaling.type": string("linear"), "rope.scaling.factor": f32(1.0)},
    settings=_silu,
)
