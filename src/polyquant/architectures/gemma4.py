"""Gemma 4 (text): Gemma 3's order of norms, without the offset of 1.

Full-attention layers have their own head size, fewer key/value heads, no V (it is K before its norm), and partial
rotary embeddings. Mixtures add experts in parallel to the feed-forward part; small models have per-layer embeddings.
Scores are not scaled.
Source: modeling_gemma4.py and configuration_gemma4.py of transformers; llama.cpp's converter.
"""

from __future__ import annotations

from polyquant.architectures.fused import Fused
from polyquant.architectures.gemma import FOUR_NORMS, GELU
from polyquant.architectures.gemma4_hyper import GEMMA4_TABLE
from polyquant.architectures.gemma4_layer import Gemma4FeedForward, Gemma4Layer
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Ends, FeedForward
from polyquant.architectures.record import Architecture, has

__all__ = ["GEMMA4"]

_NAMES = {
    **FOUR_NORMS,
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
_EXACT = {
    "layer_scalar": "layer_output_scale.weight",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
_TOP = {
    "model.embed_tokens": "token_embd",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def _shares_k(tensors: frozenset[str]) -> bool:
    """True if some layers have no V."""
    return any(n.endswith(".attn_k.weight") and n.replace("attn_k", "attn_v") not in tensors for n in tensors)


GEMMA4 = Architecture(
    name="gemma4",
    model_type="gemma4_text",
    class_name="Gemma4ForCausalLM",
    reads=("gemma4_text",),
    names=NameTable(_NAMES, exact=_EXACT, top=_TOP),
    fused=Fused("experts.gate_up_proj", "experts.down_proj", "experts.switch_glu", "experts.{e}.{part}"),
    hyper=GEMMA4_TABLE,
    layer=Gemma4Layer(feed_forward=Gemma4FeedForward(FeedForward(activations=GELU))),
    ends=Ends(root=True, layer_inputs=True),
    switches={"attention_k_eq_v": _shares_k, "enable_moe_block": has("ffn_gate_inp.weight")},
)  # fmt: skip
