"""Which packings keep the codes of which: the table of ordered pairs for `polyquant formats --matrix`.

Every cell follows from the traits of the two codecs (codecs/keeping.py). A packing stands for all codecs of its family
that differ only in their group; groups of 32 show what blocks of ggml can hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from polyquant import registry
from polyquant.codecs.affine_forms import integers_of
from polyquant.codecs.keeping import ROUNDABLE, Fate, HoldsFloats, Integers, Traits, Verdict, keeps
from polyquant.errors import UnsupportedError
from polyquant.tables import Listing, Row
from polyquant.types import Codec, Ternary

__all__ = ["PACKINGS", "Matrix", "Pair", "between", "matrix", "traits_of"]

PACKINGS: tuple[str, ...] = (
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq2_0",
    "compressed.p4.g32", "compressed.p4.g32.zpp", "compressed.p8.g32", "compressed.p8.g32.zpp", "compressed.i8",
    "gptq.2.g32", "gptq.3.g32", "gptq.4.g32", "gptq.8.g32", "gptq.4.g32.act", "awq.4.g32",
    "mlx.2.g32", "mlx.3.g32", "mlx.4.g32", "mlx.5.g32", "mlx.6.g32", "mlx.8.g32",
    "w4a16.g32", "w8a16.g32", "w8a16", "w8a8",
)  # fmt: skip
"""One codec for each packing, in the order of the table."""
_ANY_DTYPE = frozenset({"compressed", "mlx", "w4a16", "w8a16"})
"""First words of families whose readers take scales of any dtype: a conversion chooses that of the source."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One cell. have, want: codec names."""

    have: str
    want: str
    verdict: Verdict

    @property
    def symbol(self) -> str:
        """= exact, ~ equal codes, and a scale may be rounded, ? exact or impossible, . impossible"""
        if self.verdict.fate is Fate.IMPOSSIBLE:
            return "."
        if not self.verdict.conditions:
            return "="
        return "~" if ROUNDABLE.issuperset(self.verdict.conditions) else "?"


class Matrix(Listing[Pair]):
    """The result of `matrix()`: all ordered pairs, row by row."""

    title = "pairs"
    columns = ("from", "to", "codes", "why")

    def row(self, entry: Pair) -> Sequence[object]:
        """The cells of one pair."""
        return entry.have, entry.want, entry.verdict.fate.value, str(entry.verdict)

    def rows(self) -> list[Row]:
        """One row per pair: from, to, fate, conditions, why."""
        return [
            {
                "from": p.have, "to": p.want, "fate": p.verdict.fate.value,
                "conditions": "; ".join(c.value for c in p.verdict.conditions), "why": p.verdict.why,
            }
            for p in self
        ]  # fmt: skip


def traits_of(codec: Codec) -> Traits | None:
    """What a codec of integers or small floats holds; None for all others."""
    return codec.floats if isinstance(codec, HoldsFloats) else integers_of(codec)


def between(have: str, want: str) -> Verdict:
    """What happens to the codes of codec `have` in codec `want`, with scales of the dtype that suits them best where
    the readers of `want` take any.

    Raises UnknownNameError; UnsupportedError for codecs whose codes no other codec shares.
    """
    both = [registry.codec(name) for name in (have, want)]
    for name, codec in zip((have, want), both, strict=True):
        if traits_of(codec) is None:
            raise UnsupportedError(f"{name} shares its codes with no other codec", hint="polyquant formats --matrix")
    first, second = (traits_of(codec) for codec in both)
    assert first is not None and second is not None
    if have == want:
        return Verdict(Fate.EXACT, "the same bytes")
    if all(codec.form is Ternary for codec in both):
        return Verdict(Fate.EXACT, "ternary codes; scales that differ need a codec with as many")
    if getattr(both[1], "writable", True) is False:
        return Verdict(Fate.IMPOSSIBLE, f"{want} can be read, not written")
    choices = [keeps(first, second)]
    if want.partition(".")[0] in _ANY_DTYPE and isinstance(second, Integers):
        dtypes: tuple[Literal["f16", "bf16", "f32"], ...] = ("f16", "bf16", "f32")
        choices += [keeps(first, replace(second, scale=dtype)) for dtype in dtypes]
    return min(choices, key=lambda verdict: (verdict.fate is Fate.IMPOSSIBLE, len(verdict.conditions)))


def matrix(names: Sequence[str] = PACKINGS) -> Matrix:
    """All ordered pairs of these codecs. Raises as `between`."""
    return Matrix(Pair(have, want, between(have, want)) for have in names for want in names)
