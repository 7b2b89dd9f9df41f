"""Tensor names, both directions.

| Hugging Face | GGUF |
|---|---|
| model.embed_tokens.weight | token_embd.weight |
| model.layers.7.self_attn.q_proj.weight | blk.7.attn_q.weight |
| model.norm.weight | output_norm.weight |
| lm_head.weight | output.weight |

A name is prefix + layer + stem + suffix (`.weight`, `.bias`); only the stem is looked up, in the table of its family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyquant.types import Meta

__all__ = ["ATTENTION", "LINEARS", "TOP", "Family", "to_gguf_name", "to_hf_name"]

TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LINEARS = frozenset({"attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down"})

_IN_LAYER = re.compile(r"([0-9]{1,5})\.(.+)\.(weight|bias)")
_GGUF_BLOCK = re.compile(r"blk\.([0-9]{1,5})\.(.+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Family:
    """Architectures that share names, and what else tells them apart.

    architecture: general.architecture. model_type, class_name: of the config.json that is written. blocks: stem of a layer's tensor,
    Hugging Face -> GGUF; also_read: further Hugging Face stems for the same. interleaved: llama.cpp rotates pairs (2i, 2i+1) for this
    architecture where transformers rotates (i, i + d/2), so rows of q and k change places. pairs: both rotate pairs (2i, 2i+1), no row
    moves. says_sizes: the converter writes vocab_size and rope.dimension_count. fixed: metadata that this architecture always has.
    settings: entries of config.json, from the set of GGUF tensor names. top, layers: Hugging Face names outside the layers, and the
    prefix of those inside. reads: this family's config.json (and its path, for errors) -> the usual keys (raises InputError, UnsupportedError for variants that are not this
    architecture); writes: back.
    """

    architecture: str
    model_type: str
    class_name: str
    blocks: Mapping[str, str]
    also_read: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    pairs: bool = False
    ternary: bool = False
    says_sizes: bool = False
    default_theta: float = 10000.0
    fixed: Mapping[str, Meta] = field(default_factory=dict)
    settings: Callable[[frozenset[str]], dict[str, Any]] = lambda tensors: {}
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    layers: str = "model.layers."
    reads: Callable[[Mapping[str, Any], object], Mapping[str, Any]] = lambda config, file: config
    writes: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config

    @property
    def linears(self) -> frozenset[str]:
        """GGUF stems of a layer's matrices."""
        return LINEARS & frozenset(self.blocks.values())


def to_gguf_name(family: Family, name: str) -> str | None:
    """The GGUF name of a Hugging Face tensor; None if the family has no such tensor."""
    root = family.layers.partition(".")[0] + "."
    if not name.startswith((root, *(f"{stem}." for stem in family.top))):
        name = root + name  # checkpoints of the bare decoder, without its head
    if name.startswith(family.layers) and (block := _IN_LAYER.fullmatch(name.removeprefix(family.layers))):
        layer, stem, suffix = block.groups()
        found = family.blocks.get(stem) or family.also_read.get(stem)
        return f"blk.{int(layer)}.{found}.{suffix}" if found else None
    stem, _, suffix = name.rpartition(".")
    return f"{family.top[stem]}.{suffix}" if stem in family.top and suffix in ("weight", "bias") else None


def to_hf_name(family: Family, name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None if the family has no such tensor."""
    if block := _GGUF_BLOCK.fullmatch(name):
        layer, stem, suffix = block.groups()
        found = next((hf for hf, gguf in family.blocks.items() if gguf == stem), None)
        return f"{family.layers}{int(layer)}.{found}.{suffix}" if found else None
    stem, _, suffix = name.rpartition(".")
    found = next((hf for hf, gguf in family.top.items() if gguf == stem), None)
    return f"{found}.{suffix}" if found and suffix in ("weight", "bias") else None
