"""Tensor names in both directions, for tensors with one-to-one names.

| Hugging Face | GGUF |
|---|---|
| model.embed_tokens.weight | token_embd.weight |
| model.layers.7.self_attn.q_proj.weight | blk.7.attn_q.weight |
| model.layers.7.self_attn.sinks | blk.7.attn_sinks.weight |
| model.norm.weight | output_norm.weight |
| lm_head.weight | output.weight |

A name is prefix + layer + stem + suffix (`.weight`, `.bias`); only the stem is looked up. Tensors with other suffixes
are listed in full (`exact`). polyquant itself uses the GGUF stem. moves.py handles tensors that are split, joined or
stacked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field

__all__ = ["NESTED", "NameTable"]

_IN_LAYER = re.compile(r"([0-9]{1,5})\.(.+)")
_SUFFIXES = ("weight", "bias")
_READ = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}
"""The last two are old names of layer norm parameters."""
NESTED = ("language_model.", "model.language_model.")
"""Name prefixes of the language model inside a multimodal model."""
_MOST_KEPT = 8192
"""Names inside a layer whose translation is kept: all layers share them, with one for each expert."""
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@dataclass(frozen=True, slots=True)
class NameTable:
    """Stems of an architecture's tensors, Hugging Face -> GGUF.

    layer: stems inside a layer. also_read: alternative Hugging Face stems, never written. exact: full names inside a
    layer.
    top: stems outside the layers. prefix: of Hugging Face names inside a layer.
    bare: names may lack the first component of the prefix (checkpoints of the decoder without its head).
    outer: an additional prefix of checkpoints with a head; never written.
    """

    layer: Mapping[str, str]
    also_read: Mapping[str, str] = field(default_factory=dict)
    exact: Mapping[str, str] = field(default_factory=dict)
    top: Mapping[str, str] = field(default_factory=lambda: _TOP)
    prefix: str = "model.layers."
    bare: bool = True
    outer: str = ""
    _roots: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _layer_back: Mapping[str, str] = field(init=False, repr=False, compare=False)
    _exact_back: Mapping[str, str] = field(init=False, repr=False, compare=False)
    _top_back: Mapping[str, str] = field(init=False, repr=False, compare=False)
    _inside: MutableMapping[str, str | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        roots = (self.prefix.partition(".")[0] + ".", *(f"{stem}." for stem in self.top))
        object.__setattr__(self, "_roots", roots)
        object.__setattr__(self, "_inside", {})
        for back, table in (("_layer_back", self.layer), ("_exact_back", self.exact), ("_top_back", self.top)):
            object.__setattr__(self, back, {gguf: hf for hf, gguf in reversed(list(table.items()))})

    def within(self, name: str) -> tuple[int, str] | None:
        """Return (layer, name inside it) of a Hugging Face tensor; None outside the layers."""
        if self.outer or not name.startswith(self.prefix) or name.startswith(NESTED):
            name = self.full(name)
        if not name.startswith(self.prefix):
            return None
        number, _, inside = name[len(self.prefix) :].partition(".")
        # Called for every tensor of a model, several times: twice as fast as a regular expression.
        return (int(number), inside) if inside and len(number) < 6 and number.isascii() and number.isdigit() else None

    def full(self, name: str) -> str:
        """Return the name with the root that bare decoders omit, and without prefixes of models with a head or
        towers."""
        name = name.removeprefix(self.outer)
        if name.startswith(NESTED):
            name = name.replace("language_model.", "", 1)
        if not self.bare or name.startswith(self._roots):
            return name
        return self._roots[0] + name

    def to_gguf(self, name: str) -> str | None:
        """Return the GGUF name of a Hugging Face tensor; None if the architecture has no such tensor."""
        if place := self.within(name):
            layer, inside = place
            target = self._inside.get(inside, "")
            if target == "":
                target = self._inside_to_gguf(inside)
                if len(self._inside) > _MOST_KEPT:
                    self._inside.clear()
                self._inside[inside] = target
            return None if target is None else f"blk.{layer}.{target}"
        stem, _, suffix = self.full(name).rpartition(".")
        return f"{self.top[stem]}.{_READ[suffix]}" if stem in self.top and suffix in _READ else None

    def _inside_to_gguf(self, inside: str) -> str | None:
        """Return the GGUF name inside a layer."""
        if inside in self.exact:
            return self.exact[inside]
        stem, _, suffix = inside.rpartition(".")
        target = self.layer.get(stem) or self.also_read.get(stem)
        return f"{target}.{_READ[suffix]}" if target and suffix in _READ else None

    def to_hf(self, name: str) -> str | None:
        """Return the Hugging Face name of a GGUF tensor; None if the architecture has no such tensor."""
        if name.startswith("blk.") and (block := _IN_LAYER.fullmatch(name.removeprefix("blk."))):
            layer, inside = block.groups()
            if inside in self._exact_back:
                return f"{self.prefix}{int(layer)}.{self._exact_back[inside]}"
            stem, _, suffix = inside.rpartition(".")
            target = self._layer_back.get(stem)
            return f"{self.prefix}{int(layer)}.{target}.{suffix}" if target and suffix in _SUFFIXES else None
        stem, _, suffix = name.rpartition(".")
        target = self._top_back.get(stem)
        return f"{target}.{suffix}" if target and suffix in _SUFFIXES else None
