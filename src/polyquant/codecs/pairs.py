"""The fate of the codes of one codec in another one, from their traits alone (codecs/keeping.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from polyquant.codecs.affine_forms import integers_of
from polyquant.codecs.float_forms import small_floats_of
from polyquant.codecs.keeping import Fate, Integers, SmallFloats, Traits, Verdict, keeps
from polyquant.types import Codec, Ternary

__all__ = ["traits_of", "verdict_between"]

_ANY_DTYPE = frozenset({"compressed", "mlx", "w4a16", "w8a16", "fp8"})
"""First words of families whose readers take scales of any dtype: a conversion chooses that of the source."""


def traits_of(codec: Codec) -> Traits | None:
    """The traits of a codec of integers or small floats; None for all others."""
    return small_floats_of(codec) or integers_of(codec)


def verdict_between(have: Codec, want: Codec) -> Verdict | None:
    """The fate of the codes of `have` in `want`, with scales of the dtype that suits them best where the readers of
    `want` take any; None if one of them shares its codes with no other codec.
    """
    first, second = traits_of(have), traits_of(want)
    if first is None or second is None:
        return None
    if have.name == want.name:
        return Verdict(Fate.EXACT, "the same bytes")
    if have.form is Ternary and want.form is Ternary:
        return Verdict(Fate.EXACT, "ternary codes; scales that differ need a codec with as many")
    if getattr(want, "writable", True) is False:
        return Verdict(Fate.IMPOSSIBLE, f"{want} can be read, not written")
    choices = [keeps(first, second), *(keeps(first, other) for other in _dtypes(want, second))]
    return min(choices, key=lambda verdict: (verdict.fate is Fate.IMPOSSIBLE, len(verdict.conditions)))


def _dtypes(want: Codec, traits: Traits) -> list[Traits]:
    """The traits with scales of the float dtypes that the family of `want` may have."""
    if want.name.partition(".")[0] not in _ANY_DTYPE or traits.scale not in ("f16", "bf16", "f32"):
        return []
    dtypes: tuple[Literal["f16", "bf16", "f32"], ...] = ("f16", "bf16", "f32")
    if isinstance(traits, Integers):
        return [replace(traits, scale=dtype) for dtype in dtypes]
    assert isinstance(traits, SmallFloats)
    return [replace(traits, scale=dtype) for dtype in dtypes]
