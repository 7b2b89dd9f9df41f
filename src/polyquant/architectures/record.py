"""An architecture is one record in one file: all that tells it from others. Translation, quantizers and the runtime read it.

To add one: write its record, and name it in registry.ARCHITECTURES, or, outside this repository, as an entry point of the group
`polyquant.architectures`. polyquant.testing.architectures checks it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyquant.architectures.changes import PairedRows, ValueChange
from polyquant.architectures.hyper_table import USUAL, HyperTable
from polyquant.architectures.moves import Move
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Ends, Feed, Layer, NormKind
from polyquant.types import Shape

__all__ = ["Architecture", "Bias", "LayerNumber", "Ternary", "has"]


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


def has(inside: str) -> Callable[[frozenset[str]], bool]:
    """True where a layer has a GGUF tensor of this name: an entry of `switches`."""
    return lambda tensors: any(name.startswith("blk.") and name.split(".", 2)[-1] == inside for name in tensors)


@dataclass(frozen=True, slots=True)
class LayerNumber:
    """One number of a layer: the GGUF key, whole, of the list of all layers, and the shape of its Hugging Face tensor."""

    key: str
    shape: Shape = ()


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model family.

    Which model it is
        name                 general.architecture of GGUF
        model_type, class_name    of the config.json that is written
        reads, told_by       model types whose config.json means this record, if all entries of `told_by` are there and not 0
        claims               classes that mean it whatever the model type says
        gguf_told_by         keys of GGUF, or "key=value", that tell it from a record of the same name
    Its headers
        hyper                hyper-parameters in config.json and GGUF
        biases, switches     entries of config.json that say which tensors there are; switches: entry -> whether the names of all GGUF tensors say it is true
        lacks                what a folder made of a GGUF file is without, a sentence
    Its tensors, Hugging Face -> GGUF; the way back is derived
        names                of those with one name on each side
        changes              GGUF stem, or whole name inside a layer -> what its values go through
        moves                tensors that are split, joined or stacked; what is split goes through `changes` after
        layer_numbers        Hugging Face name inside a layer -> the list in GGUF's metadata that holds it
        unused, behind_last  patterns of tensors that GGUF does not store, with the reason; the reason for those of layers that num_hidden_layers does not count
    What it computes
        layer, ends, norm    the parts of a layer; what stands before and behind the layers; the kind of all norms
        pairs                transformers rotates neighbours (2i, 2i + 1) of a head, not (i, i + d/2)
        ternary              how its linears were trained ternary, None for an ordinary model
        encoder              it gives embeddings of texts and no logits; files beside the weights say how they are pooled
    """

    name: str
    model_type: str
    class_name: str
    names: NameTable
    reads: tuple[str, ...] = ()
    told_by: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    gguf_told_by: tuple[str, ...] = ()
    hyper: HyperTable = USUAL
    layer: Layer = field(default_factory=Layer)
    ends: Ends = field(default_factory=Ends)
    norm: NormKind = "rms"
    changes: Mapping[str, ValueChange] = field(default_factory=dict)
    moves: tuple[Move, ...] = ()
    pairs: bool = False
    biases: tuple[Bias, ...] = ()
    unused: Mapping[str, str] = field(default_factory=dict)
    behind_last: str = ""
    layer_numbers: Mapping[str, LayerNumber] = field(default_factory=dict)
    switches: Mapping[str, Callable[[frozenset[str]], bool]] = field(default_factory=dict)
    ternary: Ternary | None = None
    encoder: bool = False
    lacks: str = ""

    @property
    def runs(self) -> bool:
        """True if the decoder computes it."""
        return bool(self.layer.runtime)

    @property
    def has_experts(self) -> bool:
        """True if its configuration counts experts."""
        return any(key.name == "experts" for key in self.hyper.keys)

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
        return self.pairs or (gguf and isinstance(self.changes.get("attn_q"), PairedRows))

    def change(self, name: str) -> ValueChange | None:
        """What the values of a GGUF tensor of this name went through."""
        inside = name.split(".", 2)[2] if name.startswith("blk.") and name.count(".") > 1 else name
        if (found := self.changes.get(inside)) is not None:
            return found
        stem, _, suffix = inside.rpartition(".")
        found = self.changes.get(stem)
        return found if found is not None and (suffix == "weight" or found.biases) else None

    def left_out(self, name: str, layers: int) -> str | None:
        """Why GGUF does not store a Hugging Face tensor of this name, of a model of so many layers; None if it does."""
        if self.behind_last and (place := self.names.within(name)) is not None and place[0] >= layers:
            return self.behind_last
        return next((why for pattern, why in self.unused.items() if re.fullmatch(pattern, name)), None)

    def has_bias(self, config: Mapping[str, Any], stem: str) -> bool:
        """True if a linear of a model with this config.json has a bias."""
        return any(stem in b.stems and (b.key is None or bool(config.get(b.key))) for b in self.biases)

    def bias_entries(self, tensors: frozenset[str]) -> dict[str, bool]:
        """Entries of config.json about biases and other tensors that a model may lack, from the names of all GGUF tensors."""
        inside = {name.split(".", 2)[-1] for name in tensors if name.startswith("blk.")}
        biased = {b.key: f"{b.stems[0]}.bias" in inside for b in self.biases if b.key is not None}
        return biased | {key: said(tensors) for key, said in self.switches.items()}
