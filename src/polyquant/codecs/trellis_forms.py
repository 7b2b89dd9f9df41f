"""Conversions between trellis codecs that keep every code, so that no new search is needed."""

from __future__ import annotations

from polyquant.capabilities import TrellisDialect
from polyquant.codecs.exl3 import EXL3
from polyquant.codecs.trellis import Trellis
from polyquant.errors import CodecError
from polyquant.types import Codec, Shape, TrellisCodes

__all__ = ["as_exl3", "exact_trellis", "floats_of", "same_codes"]


def exact_trellis(codec: Codec, shape: Shape) -> Trellis:
    """Return the `Trellis` codec that holds a trellis-coded weight of `codec` unchanged.

    Raises CodecError if there is none.
    """
    if not isinstance(codec, TrellisDialect):
        raise CodecError("Trellis v3 cannot hold these codes", expected="trellis codes", found=codec.name)
    exact = codec.trellis(shape)
    if not isinstance(exact, Trellis):
        raise CodecError(f"{codec.name} has no Trellis v3 equivalent", expected="trellis codes", found=exact.name)
    return exact


def as_exl3(codec: Codec, shape: Shape) -> Codec | None:
    """Return the EXL3 codec that holds a trellis-coded weight of `codec` unchanged, or None."""
    exact = exact_trellis(codec, shape)
    if exact.tile_order != "exl3" or exact.codebook not in ("mul1", "mcg", "3inst"):
        return None
    exl3 = EXL3(exact.bits, exact.codebook)
    return exl3 if same_codes(codec, exl3, shape) else None


def floats_of(codec: Codec, shape: Shape) -> str:
    """Return the smallest suitable float codec for decoded weights.

    f16 for the plain grid, which decodes to half precision, else bf16.
    """
    exact = exact_trellis(codec, shape)
    return "f16" if exact.codebook == "grid" and exact.blocks(shape) == (1, 1) else "bf16"


def same_codes(a: Codec, b: Codec, shape: Shape) -> bool:
    """Return True if both are trellis codecs with the same codes for a weight of this shape."""
    if a.form is not TrellisCodes or b.form is not TrellisCodes:
        return False
    try:
        one, two = exact_trellis(a, shape), exact_trellis(b, shape)
        return one.code(shape) == two.code(shape) and one.group_count(shape) == two.group_count(shape)
    except CodecError:  # blocks do not divide this shape
        return False
