"""InternLM2: Llama with q, k and v in one matrix, ordered by group: [groups, q .. q k v, d]. The modeling code is on
the hub, not in transformers.

h = x + O attention(rope(Q norm(x)), rope(K norm(x)), V norm(x));  y = h + W2 (silu(W1 norm(h)) * W3 norm(h))

GGUF has three matrices, with interleaved rows of q and k. A scaling called dynamic takes effect beyond the configured
context only.

Source: modeling_internlm2.py of internlm/internlm2-7b; llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyquant.architectures import rope
from polyquant.architectures.changes import PairedRows
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.keys import no_head_dim
from polyquant.architectures.moves import Make, Move, rows_together
from polyquant.architectures.names import NameTable
from polyquant.architectures.record import Architecture
from polyquant.errors import InputError
from polyquant.operations import Operation, Reshape, Slice, chain
from polyquant.types import Shape

__all__ = ["INTERNLM2"]


def _part(index: int) -> Make:
    """Return q (0), k (1) or v (2) of all groups."""

    def make(hyper: Hyper, shape: Shape) -> Operation:
        groups, size = hyper.kv_heads, hyper.head_size
        share = hyper.heads // max(groups, 1)
        if len(shape) != 2 or shape[0] != groups * (share + 2) * size:
            raise InputError(
                "rows do not fit the heads of the configuration",
                expected=groups * (share + 2) * size,
                found=list(shape),
            )
        first, last = (0, share) if index == 0 else (share + index - 1, share + index)
        width = shape[1]
        return chain(
            Reshape((groups, share + 2, size * width)),
            Slice(first, last, axis=1),
            Reshape((groups * (last - first) * size, width)),
        )

    return make


def _dynamic(config: Mapping[str, Any]) -> float:
    """Return the factor of a dynamic scaling, 0 for a model without one."""
    parameters = rope.parameters(config, None)
    factor = parameters.get("factor") if parameters.get("rope_type", parameters.get("type")) == "dynamic" else None
    return float(factor) if isinstance(factor, int | float) and not isinstance(factor, bool) else 0.0


def _gguf_warning(hyper: Hyper) -> str | None:
    lost = "GGUF cannot express dynamic RoPE scaling beyond the context: runtimes will not scale"
    return lost if hyper.more["dynamic"] else None


INTERNLM2 = Architecture(
    name="internlm2",
    model_type="internlm2",
    class_name="InternLM2ForCausalLM",
    reads=("internlm2",),
    names=NameTable(
        {
            "attention_norm": "attn_norm",
            "attention.wo": "attn_output",
            "ffn_norm": "ffn_norm",
            "feed_forward.w1": "ffn_gate",
            "feed_forward.w3": "ffn_up",
            "feed_forward.w2": "ffn_down",
        },
        top={"model.tok_embeddings": "token_embd", "model.norm": "output_norm", "output": "output"},
    ),
    moves=(
        Move(
            "attention.wqkv.weight",
            {"attn_q.weight": _part(0), "attn_k.weight": _part(1), "attn_v.weight": _part(2)},
            rows_together,
        ),
    ),
    changes={"attn_q": PairedRows("heads"), "attn_k": PairedRows("kv_heads")},
    hyper=replace(
        USUAL.changed(head_dim=no_head_dim()).plus(Key("dynamic", (), default=0.0, kind="real", read=_dynamic)),
        always={"bias": False},
        tied=False,
        scaling=lambda config, said, file: {} if _dynamic(config) else rope.of_config(config, said, file),
        gguf_warning=_gguf_warning,
    ),
)  # fmt: skip
