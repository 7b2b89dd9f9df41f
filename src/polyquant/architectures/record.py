"""An architecture is one record in one file, read by translation, quantizers and the runtime.

To add one, write its record and list it in registry.ARCHITECTURES, or, in another package, as an entry point of the
group `polyquant.architectures`. polyquant.testing.architectures checks it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyquant.architectures.changes import PairedRows, ValueChange
from polyquant.architectures.fused import Fused
from polyquant.architectures.hyper_table import USUAL, HyperTable
from polyquant.architectures.moves import Move
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Ends, Feed, Layer, NormKind
from polyquant.types import Shape

__all__ = ["Architecture", "Bias", "LayerNumber", "Ternary", "has"]


@dataclass(frozen=True, slots=True)
class Bias:
    """Linears with biases.

    key: the config.json entry that enables them, None if always present. The first stem determines whether the entry is
    written as true.
    """

    stems: tuple[str, ...]
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Ternary:
    """The linears were trained ternary: float weights are master weights.

    tokens_in_gguf: whether runtimes of its GGUF files round activations with one scale per token, as in training, or
    one per block.
    """

    tokens_in_gguf: bool = True


def has(inside: str) -> Callable[[frozenset[str]], bool]:
    """Return a predicate: True if a layer has a GGUF tensor of this name. Used in `switches`."""
    return lambda tensors: any(name.startswith("blk.") and name.split(".", 2)[-1] == inside for name in tensors)


@dataclass(frozen=True, slots=True)
class LayerNumber:
    """A scalar per layer: the full GGUF key of the list over layers, and the shape of its Hugging Face tensor."""

    key: str
    shape: Shape = ()


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model family.

    Identification
        name                 general.architecture of GGUF
        model_type, class_name    of the config.json that is written
        reads, requires       model types read with this record, if all entries of `requires` are present and not 0
        claims               classes that select it regardless of the model type
        gguf_requires         GGUF keys, or "key=value", that distinguish it from a record of the same name
    Headers
        hyper                hyper-parameters in config.json and GGUF
        biases, switches     config.json entries that declare which tensors exist; switches: entry -> predicate on the
                             names of all GGUF tensors
        lacks                a sentence: what a folder made from a GGUF file lacks
    Tensors, Hugging Face -> GGUF; the inverse is derived
        names                tensors with one-to-one names
        changes              GGUF stem, or full name inside a layer -> change of its values
        moves                tensors that are split, joined or stacked; after a split, `changes` apply
        fused                how folders store experts that are fused: their other layouts follow from it
        layer_numbers        Hugging Face name inside a layer -> the GGUF metadata list that holds it
        unused               patterns of tensors that GGUF does not store, with the reason
        beyond_last          the reason for dropping tensors of layers beyond num_hidden_layers
    Computation
        layer, ends, norm    the parts of a layer; the operations before and after the layers; the kind of all norms
        pairs                transformers rotates adjacent pairs (2i, 2i + 1) of a head, not (i, i + d/2)
        ternary              how its linears were trained ternary, None for an ordinary model
        encoder              produces embeddings, not logits; files next to the weights specify the pooling
    """

    name: str
    model_type: str
    class_name: str
    names: NameTable
    reads: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    gguf_requires: tuple[str, ...] = ()
    hyper: HyperTable = USUAL
    layer: Layer = field(default_factory=Layer)
    ends: Ends = field(default_factory=Ends)
    norm: NormKind = "rms"
    changes: Mapping[str, ValueChange] = field(default_factory=dict)
    moves: tuple[Move, ...] = ()
    fused: Fused | None = None
    pairs: bool = False
    biases: tuple[Bias, ...] = ()
    unused: Mapping[str, str] = field(default_factory=dict)
    beyond_last: str = ""
    layer_numbers: Mapping[str, LayerNumber] = field(default_factory=dict)
    switches: Mapping[str, Callable[[frozenset[str]], bool]] = field(default_factory=dict)
    ternary: Ternary | None = None
    encoder: bool = False
    lacks: str = ""

    @property
    def runs(self) -> bool:
        """True if the runtime can run it."""
        return bool(self.layer.runtime)

    @property
    def has_experts(self) -> bool:
        """True if its configuration has a number of experts."""
        return any(key.name == "experts" for key in self.hyper.keys)

    @property
    def linears(self) -> frozenset[str]:
        """Return the GGUF stems of a layer's matrices."""
        return frozenset(stem for feed in self.layer.feeds for stem in feed.readers)

    def readers_of(self, norm: str) -> tuple[str, ...]:
        """Return the stems of the linears that read a norm's output, () for an unknown norm."""
        return next((f.readers for f in self.feeds("norm") if f.source == norm), ())

    def feeds(self, *kinds: str) -> tuple[Feed, ...]:
        """Return the feeds of a layer of these kinds."""
        return tuple(feed for feed in self.layer.feeds if feed.kind in kinds)

    def rotates_pairs(self, *, gguf: bool) -> bool:
        """True if adjacent pairs (2i, 2i + 1) of a head rotate, with rows in GGUF or Hugging Face order."""
        return self.pairs or (gguf and isinstance(self.changes.get("attn_q"), PairedRows))

    def change(self, name: str) -> ValueChange | None:
        """Return the value change of a GGUF tensor of this name."""
        inside = name.split(".", 2)[2] if name.startswith("blk.") and name.count(".") > 1 else name
        if (change := self.changes.get(inside)) is not None:
            return change
        stem, _, suffix = inside.rpartition(".")
        change = self.changes.get(stem)
        return change if change is not None and (suffix == "weight" or change.biases) else None

    def left_out(self, name: str, layers: int) -> str | None:
        """Return why GGUF does not store this Hugging Face tensor of a model with `layers` layers; None if it does."""
        if self.beyond_last and (place := self.names.within(name)) is not None and place[0] >= layers:
            return self.beyond_last
        return next((reason for pattern, reason in self.unused.items() if re.fullmatch(pattern, name)), None)

    def has_bias(self, config: Mapping[str, Any], stem: str) -> bool:
        """True if a linear of a model with this config.json has a bias."""
        return any(stem in b.stems and (b.key is None or bool(config.get(b.key))) for b in self.biases)

    def bias_entries(self, tensors: frozenset[str]) -> dict[str, bool]:
        """Return the config.json entries for biases and other optional tensors, from the names of all GGUF tensors."""
        inside = {name.split(".", 2)[-1] for name in tensors if name.startswith("blk.")}
        biased = {b.key: f"{b.stems[0]}.bias" in inside for b in self.biases if b.key is not None}
        return biased | {key: predicate(tensors) for key, predicate in self.switches.items()}
