"""The order in which tensors are written: the model's, so that a shard holds complete layers.

Embeddings come first, then the layers by number, each with its norms, then the final norm and the head. Safetensors
files sort their tensors by type and then as text, which puts layer 10 before layer 2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from polyquant.types import TensorMap

__all__ = ["model_order"]

_EMBEDS = re.compile(r"emb|\bw[tp]e\b|rope|rotary")
_DIGITS = re.compile(r"(\d+)")


def model_order(tensors: Sequence[TensorMap]) -> tuple[TensorMap, ...]:
    """The same tensors, in the model's order by their target names."""
    stacks: dict[
        str, int
    ] = {}  # "model.layers" -> its place among the stacks of layers, which keep the order of the source

    def key(tensor: TensorMap) -> tuple[int, int, int, list[str | int]]:
        stack, *rest = re.split(r"\.(\d+)\.", tensor.target, maxsplit=1)
        if rest:
            return 1, stacks.setdefault(stack, len(stacks)), int(rest[0]), _natural(rest[1])
        return (0 if _EMBEDS.search(tensor.target) else 2), 0, 0, _natural(tensor.target)

    return tuple(sorted(tensors, key=key))


def _natural(name: str) -> list[str | int]:
    """Text and numbers in turn, text first: experts.10 follows experts.9."""
    return [int(piece) if i % 2 else piece for i, piece in enumerate(_DIGITS.split(name))]
