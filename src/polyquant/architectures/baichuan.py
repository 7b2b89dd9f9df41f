"""Baichuan and Baichuan 2: Llama with q, k and v in one matrix. The modeling code is on the hub, not in transformers.

The 7B models use RoPE; the 13B models use ALiBi, which readers of GGUF infer from their 40 layers. Baichuan 2
normalizes the rows of lm_head to unit length; GGUF stores lm_head unnormalized.
Source: modeling_baichuan.py of baichuan-inc/Baichuan2-7B-Base and Baichuan2-13B-Base; llama.cpp's converter.
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.changes import PairedRows
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.keys import no_head_dim
from polyquant.architectures.llama import LLAMA_NAMES
from polyquant.architectures.moves import Make, Move, rows_together
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, Ends, Layer
from polyquant.architectures.record import Architecture
from polyquant.gguf_values import string
from polyquant.operations import Operation, Slice
from polyquant.types import Shape

__all__ = ["BAICHUAN"]

_SECOND_VOCABULARY = 125696
"""The vocabulary size of Baichuan 2; the first Baichuan has 64000. No other entry of config.json distinguishes them."""


def _third(index: int) -> Make:
    def make(hyper: Hyper, shape: Shape) -> Operation:
        rows = shape[0] // 3
        return Slice(index * rows, (index + 1) * rows)

    return make


def _gguf_warning(hyper: Hyper) -> str | None:
    if hyper.vocab != _SECOND_VOCABULARY:
        return None
    return "GGUF cannot express that Baichuan 2 divides the rows of lm_head by their lengths: runtimes will not"


BAICHUAN = Architecture(
    name="baichuan",
    model_type="baichuan",
    class_name="BaichuanForCausalLM",
    reads=("baichuan",),
    names=NameTable({hf: gguf for hf, gguf in LLAMA_NAMES.items() if hf[-6:] not in ("q_proj", "k_proj", "v_proj")}),
    moves=(
        Move(
            "self_attn.W_pack.weight",
            {"attn_q.weight": _third(0), "attn_k.weight": _third(1), "attn_v.weight": _third(2)},
            rows_together,
        ),
    ),
    changes={"attn_q": PairedRows("heads"), "attn_k": PairedRows("heads")},
    hyper=replace(
        USUAL.changed(
            context={"config": ("max_position_embeddings", "model_max_length")},
            kv_heads={"config": (), "write": "never"},
            rope_theta={"config": (), "write": "never"},
            head_dim=no_head_dim(),
            rotated={"config": (), "write": "always"},
        ),
        metadata={"tensor_data_layout": string("Meta AI original pth")},
        tied=False,
        gguf_warning=_gguf_warning,
    ),
    layer=Layer(Attention(alibi_at=40)),
    ends=Ends(unit_rows=_SECOND_VOCABULARY),
)
