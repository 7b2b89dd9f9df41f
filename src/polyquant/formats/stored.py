"""A tensor of a safetensors file, and its weight if it is not part of a quantization."""

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
    """A tensor and its file."""

    source: Source
    entry: Entry


def plain_weight(name: str, stored: Stored) -> Weight:
    """The tensor as a weight with the codec of its dtype. Raises InputError."""
    entry = stored.entry
    try:
        codec = codec_of(entry.dtype, entry.nbytes)
        arrays = {part: entry.array(stored.source, spec) for part, spec in codec.specs(entry.shape).items()}
    except PolyquantError as e:
        raise InputError(e.message, file=stored.source.path, tensor=name, expected=e.expected, found=e.found) from None
    return Weight(name, entry.shape, codec, arrays)
