"""Tensors without one-to-one names: projections that are split or fused, experts that are stacked.

    Experts("mlp.experts.{e}.gate_proj.weight", "ffn_gate_exps.weight")      one tensor per expert -> a stack
    halves("mlp.experts.gate_up_proj", "ffn_gate_exps.weight", "ffn_up_exps.weight")
                                                                             one tensor -> the halves of an axis
    Move("self_attn.kv_b_proj.weight", {...}, shape)                         one tensor -> parts, each by an operation

A move defines the way to GGUF and the shape of the Hugging Face tensor; the inverse is derived from both
(polyquant.inversion).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from polyquant.architectures.hyper import Hyper
from polyquant.errors import InputError
from polyquant.operations import SAME, Operation, Slice, Transpose, chain
from polyquant.types import Shape, Weight

__all__ = ["Experts", "Make", "Move", "halves", "in_order", "numbered", "rows_together"]

_NUMBER = re.compile(r"(?<=\.)[0-9]{1,5}(?=\.)")

Make: TypeAlias = Callable[[Hyper, Shape], Operation]
"""(hyper, shape of one source) -> the operation on it."""


@dataclass(frozen=True, slots=True)
class Move:
    """One Hugging Face tensor, or one per expert, and the GGUF tensors made from it.

    source: name inside a layer; `{e}` is the index of an expert. targets: GGUF names inside a layer.
    before: (hyper, shapes of the targets) -> shape of one source.
    codecs: restricts the move to weights of these codecs, () for any; if two moves have the same targets, the first
    that fits is inverted.
    """

    source: str
    targets: Mapping[str, Make]
    before: Callable[[Hyper, Sequence[Shape]], Shape]
    codecs: tuple[str, ...] = ()

    @property
    def stacked(self) -> bool:
        """True if there is one source per expert."""
        return "{e}" in self.source

    def fits(self, codec: str) -> bool:
        """True if the move applies to weights of this codec."""
        return not self.codecs or codec in self.codecs


def Experts(source: str, target: str) -> Move:  # noqa: N802 - named like the Move class
    """Stack one tensor per expert."""
    return Move(source, {target: lambda hyper, shape: SAME}, lambda hyper, shapes: shapes[0][1:])


def halves(
    source: str,
    first: str,
    second: str,
    *,
    axis: int = -2,
    interleaved: bool = False,
    transposed: bool = False,
    codecs: tuple[str, ...] = (),
) -> Move:
    """Split an axis into two halves: rows of [.., 2n, k] by default.

    interleaved: even and odd entries instead of the first and second half. transposed: the source is [.., k, 2n];
    `axis` refers to its transpose. codecs: see Move.
    """

    def part(index: int) -> Make:
        def make(hyper: Hyper, shape: Shape) -> Operation:
            full = _transposed(shape) if transposed else shape
            at = axis % len(full)
            n = full[at]
            cut = (
                Slice(index, n, 2, axis=at) if interleaved else Slice(index * (n // 2), (index + 1) * (n // 2), axis=at)
            )
            return chain(Transpose(), cut) if transposed else cut

        return make

    def before(hyper: Hyper, shapes: Sequence[Shape]) -> Shape:
        at = axis % len(shapes[0])
        full = (*shapes[0][:at], 2 * shapes[0][at], *shapes[0][at + 1 :])
        return _transposed(full) if transposed else full

    return Move(source, {first: part(0), second: part(1)}, before, codecs)


def rows_together(hyper: Hyper, shapes: Sequence[Shape]) -> Shape:
    """Concatenate the rows of all targets: a `before` of a Move."""
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@lru_cache(maxsize=8192)
def numbered(inside: str) -> tuple[str, int]:
    """Return a name inside a layer with {e} for the expert, and its number: all layers share these names."""
    number = _NUMBER.search(inside)
    if number is None:
        return inside, 0
    return f"{inside[: number.start()]}{{e}}{inside[number.end() :]}", int(number[0])


def in_order(found: Mapping[int, Weight], hyper: Hyper, file: object, where: str = "") -> list[Weight]:
    """Return the tensors of all experts in order. where: added to the number of a missing one, e.g. " of layer 3".

    Raises InputError if some are missing or exceed the configured count.
    """
    experts = hyper.more.get("experts")
    count = experts if isinstance(experts, int) and experts else max(found) + 1
    missing = [e for e in range(count) if e not in found]
    first = next(iter(found.values())).name
    if missing:
        raise InputError(
            f"expert {missing[0]}{where} is missing" + (f", and {len(missing) - 1} more" if len(missing) > 1 else ""),
            file=file,
            tensor=first,
            expected=f"{count} experts",
            found=len(found),
        )
    if len(found) > count:
        raise InputError("more experts than configured", file=file, tensor=first, expected=count, found=len(found))
    return [found[e] for e in range(count)]


def _transposed(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2])
