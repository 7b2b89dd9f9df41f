"""Granite 3: Llama with four factors: on the embedding, on each part's output, on attention scores, and a divisor of
the logits.

granite       dense
granitemoe    experts in fused stacks; some models add a shared expert

Source: modeling_granite.py, modeling_granitemoe.py and modeling_granitemoeshared.py of transformers; llama.cpp's
converter.
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.fused import Fused
from polyquant.architectures.keys import expert_keys, granite_keys, shared_expert_key
from polyquant.architectures.llama import LLAMA, LLAMA_NAMES
from polyquant.architectures.mixture import Mixture
from polyquant.architectures.moves import halves
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Ends, Layer
from polyquant.architectures.record import Bias

__all__ = ["FUSED", "GRANITE", "GRANITE_MOE", "GRANITE_MOE_SHARED"]

GRANITE = replace(
    LLAMA,
    name="granite",
    model_type="granite",
    class_name="GraniteForCausalLM",
    reads=("granite",),
    hyper=LLAMA.hyper.plus(*granite_keys()),
    ends=Ends(divided=True),
)
_STEMS = {
    **{stem: name for stem, name in LLAMA_NAMES.items() if not stem.startswith("mlp.")},
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.output_linear": "ffn_down_exps",
}
FUSED = Fused(
    "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.switch_mlp",
    "block_sparse_moe.experts.{e}.{part}",
    ("w1", "w3", "w2"),
)
"""Granite's experts; separate ones have Mixtral's names."""
GRANITE_MOE = replace(
    GRANITE,
    name="granitemoe",
    model_type="granitemoe",
    class_name="GraniteMoeForCausalLM",
    reads=("granitemoe",),
    names=NameTable(_STEMS),
    moves=(halves("block_sparse_moe.input_linear.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight"),),
    fused=FUSED,
    hyper=GRANITE.hyper.plus(*expert_keys("num_local_experts", feed_forward=None)),
    layer=Layer(feed_forward=Mixture(gating="softmax_after_topk")),
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output"), "attention_bias"),),
)
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    model_type="granitemoeshared",
    class_name="GraniteMoeSharedForCausalLM",
    reads=("granitemoeshared",),
    gguf_requires=("expert_shared_feed_forward_length",),
    names=NameTable({**_STEMS, "shared_mlp.output_linear": "ffn_down_shexp"}),
    moves=(
        *GRANITE_MOE.moves,
        halves("shared_mlp.input_linear.weight", "ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    ),
    hyper=GRANITE_MOE.hyper.plus(shared_expert_key("shared_intermediate_size")),
    layer=Layer(feed_forward=Mixture(gating="softmax_after_topk", shared=True)),
)
