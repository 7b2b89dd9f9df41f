"""Codecs whose codes are `TrellisCodes`, held against each other: which of them hold the same codes, so that a weight moves without a new search."""

from __future__ import annotations

from polyquant.capabilities import TrellisDialect
from polyquant.codecs.exl3 import EXL3
from polyquant.codecs.trellis import Trellis
from polyquant.errors import CodecError
from polyquant.types import Codec, Shape, TrellisCodes

__all__ = ["as_exl3", "exact_trellis", "floats_of", "same_codes"]


def exact_trellis(codec: Codec, shape: Shape) -> Trellis:
    """The codec `Trellis` that holds a weight of another codec of trellis codes without changing one. Raises CodecError where there is none."""
    if not isinstance(codec, TrellisDialect):
        raise CodecError("no codec of Trellis v3 holds these codes", expected="trellis codes", found=codec.name)
    found = codec.trellis(shape)
    if not isinstance(found, Trellis):
        raise CodecError(f"{codec.name} names no codec of Trellis v3", expected="trellis codes", found=found.name)
    return found


def as_exl3(codec: Codec, shape: Shape) -> Codec | None:
    """The codec EXL3 that holds a weight of another codec of trellis codes without changing one; None where there is none."""
    exact = exact_trellis(codec, shape)
    if exact.tile_order != "exl3" or exact.codebook not in ("mul1", "mcg", "3inst"):
        return None
    found = EXL3(exact.bits, exact.codebook)
    return found if same_codes(codec, found, shape) else None


def floats_of(codec: Codec, shape: Shape) -> str:
    """The name of the smallest float codec for decoded trellis codes: the plain grid rounds to half precision itself."""
    exact = exact_trellis(codec, shape)
    return "f16" if exact.codebook == "grid" and exact.blocks(shape) == (1, 1) else "bf16"


def same_codes(a: Codec, b: Codec, shape: Shape) -> bool:
    """True if both are codecs of trellis codes, and what one unpacks of a weight of this shape the other packs."""
    if a.form is not TrellisCodes or b.form is not TrellisCodes:
        return False
    try:
        one, two = exact_trellis(a, shape), exact_trellis(b, shape)
        return one.code(shape) == two.code(shape) and one.group_count(shape) == two.group_count(shape)
    except CodecError:  # blocks that do not divide this shape
        return False
