"""A tensor of a safetensors file, and the weight that it is where nothing more is known of it."""

from __future__ import annotations

from dataclasses import dataclass

from polyquant.codecs.dtypes import codec_of
from polyquant.errors import InputError, PolyquantError
from polyquant.storage.safetensors import Entry
from polyquant.storage.source import Source
from polyquant.types import Weight

__all__ = ["Stored", "plain_weight"]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor and the file that it lies in."""

    source: Source
    entry: Entry


def plain_weight(name: str, stored: Stored) -> Weight:
    """The tensor as it is stored. Raises InputError."""
    entry = stored.entry
    try:
        codec = codec_of(entry.dtype, entry.nbytes)
        arrays = {part: entry.array(stored.source, spec) for part, spec in codec.specs(entry.shape).items()}
    except PolyquantError as e:
        raise InputError(e.message, file=stored.source.path, tensor=name, expected=e.expected, found=e.found) from None
    return Weight(name, entry.shape, codec, arrays)
