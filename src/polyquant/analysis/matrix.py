"""Which packings keep the codes of which: the table of ordered pairs for `polyquant formats --matrix`.

Every cell follows from the traits of the two codecs (codecs/keeping.py). A packing represents all codecs of its family
that differ only in their group; groups of 32 show what blocks of ggml can hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polyquant import registry
from polyquant.codecs.keeping import ROUNDABLE, Fate, Verdict
from polyquant.codecs.pairs import traits_of, verdict_between
from polyquant.errors import UnsupportedError
from polyquant.tables import Listing, Row

__all__ = ["FLOAT_PACKINGS", "PACKINGS", "Matrix", "Pair", "between", "matrix"]

PACKINGS: tuple[str, ...] = (
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq2_0",
    "compressed.p4.g32", "compressed.p4.g32.zpp", "compressed.p8.g32", "compressed.i8",
    "gptq.2.g32", "gptq.3.g32", "gptq.4.g32.sym", "gptq.4.g32", "gptq.8.g32.sym", "gptq.4.g32.act", "awq.4.g32",
    "mlx.2.g32", "mlx.3.g32", "mlx.4.g32", "mlx.5.g32", "mlx.6.g32", "mlx.8.g32",
    "w4a16.g32", "w8a16.g32", "w8a16", "w8a8", "modelopt.int4.g32", "torchao.int4.g32", "bnb.int8",
)  # fmt: skip
"""One codec for each packing of integers, in the order of the table."""
FLOAT_PACKINGS: tuple[str, ...] = (
    "mxfp4", "hf_mxfp4", "mlx.mxfp4", "nvfp4", "nvfp4.scaled", "hf_nvfp4", "hf_nvfp4.div", "mlx.nvfp4",
    "hf_mxfp8", "mlx.mxfp8", "fp8.e4m3", "fp8.e4m3.tensor", "fp8.e4m3.b128", "fp8.e4m3.b128.inv.f32",
    "fp8.e4m3.b128.inv.e8m0", "fp8.e5m2",
)  # fmt: skip
"""The same for small floats."""


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


def between(have: str, want: str) -> Verdict:
    """The fate of the codes of codec `have` in codec `want`, with scales of the dtype that suits them best where
    the readers of `want` take any.

    Raises UnknownNameError; UnsupportedError for codecs whose codes no other codec shares.
    """
    both = [registry.codec(name) for name in (have, want)]
    found = verdict_between(*both)
    if found is None:
        alone = have if traits_of(both[0]) is None else want
        raise UnsupportedError(f"{alone} shares its codes with no other codec", hint="polyquant formats --matrix")
    return found


def matrix(names: Sequence[str] = PACKINGS) -> Matrix:
    """All ordered pairs of these codecs. Raises as `between`."""
    return Matrix(Pair(have, want, between(have, want)) for have in names for want in names)
