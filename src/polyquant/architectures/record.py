"""An architecture is one record in one file: all that tells it from others. Translation, quantizers and the runtime read it.

To add one: write its record, and name it in registry.ARCHITECTURES, or, outside this repository, as an entry point of the group
`polyquant.architectures`. polyquant.testing.architectures checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyquant.architectures.hyper_table import USUAL, HyperTable
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Feed, Layer
from polyquant.architectures.transforms import PairedRows

__all__ = ["Architecture", "Bias", "Ternary"]


@dataclass(frozen=True, slots=True)
class Bias:
    """Linears that have biases. key: the entry of config.json that says whether they do, None where they always do. The first one tells
    whether the entry is written as true."""

    stems: tuple[str, ...]
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Ternary:
    """The linears were trained ternary: float ones are master weights. tokens_in_gguf: those who run its GGUF files round activations with one
    scale a token, as it was trained; else with one a block."""

    tokens_in_gguf: bool = True


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model family.

    name: general.architecture. model_type, class_name: of the config.json that is written. reads: model types whose config.json means this
    architecture, if it has all keys of `told_by`; claims: classes that mean it whatever the model type says. names: of tensors. hyper: of
    config.json and GGUF. layer: the parts of a decoder layer. transforms: GGUF stem -> what its rows go through. pairs: transformers rotates
    neighbours (2i, 2i + 1) of a head, not (i, i + d/2). biases: which linears have some. ternary: None for an ordinary model.
    """

    name: str
    model_type: str
    class_name: str
    names: NameTable
    reads: tuple[str, ...] = ()
    told_by: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    hyper: HyperTable = USUAL
    layer: Layer = field(default_factory=Layer)
    transforms: Mapping[str, PairedRows] = field(default_factory=dict)
    pairs: bool = False
    biases: tuple[Bias, ...] = ()
    ternary: Ternary | None = None

    @property
    def linears(self) -> frozenset[str]:
        """GGUF stems of a layer's matrices."""
        return frozenset(stem for feed in self.layer.feeds for stem in feed.readers)

    def behind(self, norm: str) -> tuple[str, ...]:
        """Stems of the linears that read a norm's output, () for an unknown norm."""
        return next((f.readers for f in self.feeds("norm") if f.source == norm), ())

    def feeds(self, *kinds: str) -> tuple[Feed, ...]:
        """The feeds of a layer that are of these kinds."""
        return tuple(feed for feed in self.layer.feeds if feed.kind in kinds)

    def rotates_pairs(self, *, gguf: bool) -> bool:
        """True if rotation takes neighbours (2i, 2i + 1) of a head as the rows lie in a GGUF file, or in a folder."""
        return self.pairs or (gguf and "attn_q" in self.transforms)

    def has_bias(self, config: Mapping[str, Any], stem: str) -> bool:
        """True if a linear of a model with this config.json has a bias."""
        return any(stem in b.stems and (b.key is None or bool(config.get(b.key))) for b in self.biases)

    def bias_entries(self, tensors: frozenset[str]) -> dict[str, bool]:
        """Entries of config.json about biases, from the names of all GGUF tensors."""
        return {b.key: f"blk.0.{b.stems[0]}.bias" in tensors for b in self.biases if b.key is not None}
