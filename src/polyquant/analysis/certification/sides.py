"""Both checkpoints as tensors under common names: the expected values of each tensor, and those that are stored.

A Hugging Face folder is translated to GGUF's names if the other side is a GGUF file, or if both are folders whose names
differ. Folders with equal names are compared directly, which needs no configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from polyquant.analysis.side import Side
from polyquant.architectures import translate
from polyquant.architectures.find import of_config, of_metadata
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.record import Architecture
from polyquant.errors import PolyquantError
from polyquant.registry import codec
from polyquant.rows import in_memory
from polyquant.runtime import identity
from polyquant.types import F32, Checkpoint, Floats, Weight, as_matrix

__all__ = ["Pair", "architecture_of", "constant", "hyper_of", "pair_up"]


@dataclass(frozen=True, slots=True)
class Pair:
    """The tensors of both checkpoints by common name. dropped: source tensors without a counterpart, with the reason.

    failed: why a checkpoint could not be translated, by checkpoint.
    """

    expected: Mapping[str, Side]
    actual: Mapping[str, Side]
    translated: bool
    dropped: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)


def pair_up(source: Checkpoint, target: Checkpoint, *, translate_both: bool = False) -> Pair:
    """Give the tensors of both sides the same names. translate_both: use GGUF's names although both are folders.

    Raises PolyquantError for a checkpoint that does not fit its configuration.
    """
    same = source.naming == target.naming
    folders = same and source.naming != "gguf"
    known = folders and architecture_of(source) is not None and architecture_of(target) is not None
    if known and (translate_both or set(source) != set(target)):
        try:
            return _translated(source, target)
        except PolyquantError:
            if translate_both:
                raise  # the caller has the plain pair
    if same:
        dropped: dict[str, str] = {}
        if known and set(source) != set(target):
            dropped = dict(translate.to_gguf(source, with_tokenizer=False).dropped)
        return Pair(_plain(source), _plain(target), translated=False, dropped=dropped)
    return _translated(source, target)


def _translated(source: Checkpoint, target: Checkpoint) -> Pair:
    sides, dropped = [], dict[str, str]()
    for checkpoint in (source, target):
        if checkpoint.naming == "gguf":
            sides.append(_plain(checkpoint))
            continue
        translation = translate.to_gguf(checkpoint, with_tokenizer=False)
        maps = {
            t.target: Side(tuple(checkpoint[n] for n in t.sources), t.shape, t.op, t.ternarize)
            for t in translation.tensors
        }
        sides.append(maps | {name: constant(name, values) for name, values in translation.constants.items()})
        dropped |= dict(translation.dropped)
    return Pair(sides[0], sides[1], translated=True, dropped=dropped)


def _plain(checkpoint: Checkpoint) -> dict[str, Side]:
    return {w.name: Side((w,), w.shape) for w in checkpoint.values()}


def constant(name: str, values: F32) -> Side:
    """A tensor that follows from the configuration."""
    f32 = codec("f32")
    x = np.ascontiguousarray(values, np.float32)
    parts = f32.pack(Floats(x.reshape(as_matrix(x.shape))))
    return Side((Weight(name, x.shape, f32, in_memory(parts)),), x.shape)


def architecture_of(checkpoint: Checkpoint) -> Architecture | None:
    """The record of a checkpoint, None if unknown."""
    return of_metadata(checkpoint.metadata) if checkpoint.naming == "gguf" else of_config(checkpoint.config)


def hyper_of(checkpoint: Checkpoint, record: Architecture) -> Hyper | None:
    """The hyper-parameters of a checkpoint; None if they are invalid."""
    try:
        return identity.hyper_parameters(checkpoint, record, identity.names(checkpoint, record))
    except PolyquantError:
        return None
