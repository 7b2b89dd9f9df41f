"""Tensor names, both directions.

| Hugging Face | GGUF |
|---|---|
| model.embed_tokens.weight | token_embd.weight |
| model.layers.7.self_attn.q_proj.weight | blk.7.attn_q.weight |
| model.norm.weight | output_norm.weight |
| lm_head.weight | output.weight |

A name is prefix + layer + stem + suffix (`.weight`, `.bias`); only the stem is looked up. The GGUF stem is what polyquant itself calls a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["NameTable"]

_IN_LAYER = re.compile(r"([0-9]{1,5})\.(.+)\.(weight|bias)")
_GGUF_BLOCK = re.compile(r"blk\.([0-9]{1,5})\.(.+)\.(weight|bias)")
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@dataclass(frozen=True, slots=True)
class NameTable:
    """Stems of an architecture's tensors, Hugging Face -> GGUF.

    layer: of those inside a layer; also_read: further Hugging Face stems for the same, never written. top: of those outside the layers.
    prefix: of Hugging Face names inside.
    """

    layer: Mapping[str, str]
    also_read: Mapping[str, str] = field(default_factory=dict)
    top: Mapping[str, str] = field(default_factory=lambda: _TOP)
    prefix: str = "model.layers."

    def to_gguf(self, name: str) -> str | None:
        """The GGUF name of a Hugging Face tensor; None if the architecture has no such tensor."""
        root = self.prefix.partition(".")[0] + "."
        if not name.startswith((root, *(f"{stem}." for stem in self.top))):
            name = root + name  # checkpoints of the bare decoder, without its head
        if name.startswith(self.prefix) and (block := _IN_LAYER.fullmatch(name.removeprefix(self.prefix))):
            layer, stem, suffix = block.groups()
            found = self.layer.get(stem) or self.also_read.get(stem)
            return f"blk.{int(layer)}.{found}.{suffix}" if found else None
        stem, _, suffix = name.rpartition(".")
        return f"{self.top[stem]}.{suffix}" if stem in self.top and suffix in ("weight", "bias") else None

    def to_hf(self, name: str) -> str | None:
        """The Hugging Face name of a GGUF tensor; None if the architecture has no such tensor."""
        if block := _GGUF_BLOCK.fullmatch(name):
            layer, stem, suffix = block.groups()
            found = next((hf for hf, gguf in self.layer.items() if gguf == stem), None)
            return f"{self.prefix}{int(layer)}.{found}.{suffix}" if found else None
        stem, _, suffix = name.rpartition(".")
        found = next((hf for hf, gguf in self.top.items() if gguf == stem), None)
        return f"{found}.{suffix}" if found and suffix in ("weight", "bias") else None
