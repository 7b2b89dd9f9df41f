"""Tensors that do not have one name on each side: projections that are split or stay fused, experts that are stacked.

    Experts("mlp.experts.{e}.gate_proj.weight", "ffn_gate_exps.weight")      one tensor for each expert -> a stack
    Split("self_attn.kv_b_proj.weight", {...}, shape)                         one tensor -> parts of it, each by its own operation

A move says the way to GGUF and the shape of the Hugging Face tensor; the way back is derived from both (polyquant.inversion).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from polyquant.architectures.hyper import Hyper
from polyquant.operations import SAME, Operation, Slice, Transpose, chain
from polyquant.types import Shape

__all__ = ["Experts", "Make", "Move", "Split", "halves", "turned_halves"]

Make: TypeAlias = Callable[[Hyper, Shape], Operation]
"""(hyper, shape of one source) -> the operation on it."""


@dataclass(frozen=True, slots=True)
class Move:
    """One Hugging Face tensor, or one for each expert, and the GGUF tensors that are made of it.

    source: name inside a layer; `{e}` stands for the number of an expert. targets: GGUF names inside a layer. before: (hyper, shapes of the targets) -> shape of one
    source. codecs: only weights of these are stored so, () for any; where two moves lead to the same targets, the first that fits is taken on the way back.
    """

    source: str
    targets: Mapping[str, Make]
    before: Callable[[Hyper, Sequence[Shape]], Shape]
    codecs: tuple[str, ...] = ()

    @property
    def stacked(self) -> bool:
        """True for one source an expert."""
        return "{e}" in self.source

    def fits(self, codec: str) -> bool:
        """True if a weight of this codec is stored so."""
        return not self.codecs or codec in self.codecs


def Experts(source: str, target: str) -> Move:  # noqa: N802 - reads as the name of a move, like those beside it
    """One tensor for each expert -> one stack."""
    return Move(source, {target: lambda hyper, shape: SAME}, lambda hyper, shapes: shapes[0][1:])


def Split(source: str, targets: Mapping[str, Make], before: Callable[[Hyper, Sequence[Shape]], Shape]) -> Move:  # noqa: N802
    """One tensor -> parts of it."""
    return Move(source, targets, before)


def halves(source: str, first: str, second: str, *, axis: int = -2) -> Move:
    """The first and the second half of an axis: rows of [.., 2n, k] by default."""

    def part(index: int) -> Make:
        def make(hyper: Hyper, shape: Shape) -> Operation:
            at = axis % len(shape)
            half = shape[at] // 2
            return Slice(index * half, (index + 1) * half, axis=at)

        return make

    return Move(source, {first: part(0), second: part(1)}, lambda hyper, shapes: _doubled(shapes[0], axis))


def turned_halves(source: str, first: str, second: str, *, interleaved: bool) -> Move:
    """Columns of [experts, in, 2 out]: halves, or even and odd ones; each turned to [experts, out, in]."""

    def part(index: int) -> Make:
        def make(hyper: Hyper, shape: Shape) -> Operation:
            rows, n = len(shape) - 2, shape[-1]
            cut = (
                Slice(index, n, 2, axis=rows)
                if interleaved
                else Slice(index * (n // 2), (index + 1) * (n // 2), axis=rows)
            )
            return chain(Transpose(), cut)

        return make

    def before(hyper: Hyper, shapes: Sequence[Shape]) -> Shape:
        *stack, rows, k = shapes[0]
        return (*stack, k, 2 * rows)

    return Move(source, {first: part(0), second: part(1)}, before)


def _doubled(shape: Shape, axis: int) -> Shape:
    at = axis % len(shape)
    return (*shape[:at], 2 * shape[at], *shape[at + 1 :])
