"""Value changes of tensors converted from a Hugging Face folder to GGUF.

Each is an operation of polyquant.operations, chosen once the hyper-parameters and the shape are known; the inverse is
derived from it (polyquant.inversion).

    PairedRows("heads")        rows of a rotated projection: adjacent pairs instead of halves
    Plus(1.0)                  norms stored as an offset from 1
    Squeezed, Column, Groups   reshapes: a convolution's [n, 1, k] -> [n, k], [n] -> [n, 1], [n] -> [groups, n / groups]
    Decay                      -exp(A_log), optionally as a column
    Times(...)                 factors from the configuration that GGUF folds into the weights
    Transposed                 Conv1D weights of GPT-2
    Change(...)                any other, given as two functions
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from polyquant.architectures.hyper import Hyper
from polyquant.errors import InputError
from polyquant.operations import AddConstant, MinusExp, Multiply, Operation, Reshape, Rows, Transpose, chain
from polyquant.types import Shape

__all__ = [
    "Change",
    "Column",
    "Decay",
    "Groups",
    "PairedRows",
    "Plus",
    "Squeezed",
    "Times",
    "Transposed",
    "ValueChange",
]


class ValueChange(Protocol):
    """The change of one tensor when converted to GGUF."""

    @property
    def biases(self) -> bool:
        """True if the `.bias` of the same stem is changed too."""

    def operation(self, hyper: Hyper, shape: Shape) -> Operation:
        """Return the operation for a Hugging Face tensor of this shape. Raises InputError if it does not fit."""

    def source(self, hyper: Hyper, shape: Shape) -> Shape:
        """Return the shape of the Hugging Face tensor that becomes a GGUF tensor of this shape."""


@dataclass(frozen=True, slots=True)
class PairedRows:
    """Permute rows from rotate-half order to adjacent pairs.

    llama.cpp rotates pairs (2i, 2i + 1), transformers (i, i + d/2): within each head, row 2i + j
    comes from row j d/2 + i. heads: the field of Hyper that counts the heads.
    """

    heads: Literal["heads", "kv_heads"]
    biases: bool = True

    def operation(self, hyper: Hyper, shape: Shape) -> Operation:
        """See ValueChange."""
        heads: int = getattr(hyper, self.heads)
        size = heads * hyper.head_size
        if not shape or shape[0] != size:
            raise InputError("rows do not fit the heads of the configuration", expected=size, found=list(shape))
        order = np.arange(size, dtype=np.int64).reshape(heads, 2, hyper.head_size // 2)
        return Rows(np.ascontiguousarray(order.swapaxes(1, 2)).reshape(-1))

    def source(self, hyper: Hyper, shape: Shape) -> Shape:
        """Return the same shape: rows are only permuted."""
        return shape


@dataclass(frozen=True, slots=True)
class Change:
    """A change given by functions.

    make: (hyper, Hugging Face shape) -> operation. before: (hyper, GGUF shape) -> Hugging Face shape, unchanged if
    None.
    """

    make: Callable[[Hyper, Shape], Operation]
    before: Callable[[Hyper, Shape], Shape] | None = None
    biases: bool = False

    def operation(self, hyper: Hyper, shape: Shape) -> Operation:
        """See ValueChange."""
        return self.make(hyper, shape)

    def source(self, hyper: Hyper, shape: Shape) -> Shape:
        """See ValueChange."""
        return self.before(hyper, shape) if self.before else shape


def Plus(value: float) -> Change:  # noqa: N802 - named like the change classes
    """Add `value` to the weight, not to the bias."""
    return Change(lambda hyper, shape: AddConstant(value))


def Times(*factors: str) -> Change:  # noqa: N802
    """Multiply by each of these hyper-parameters in turn."""
    return Change(lambda hyper, shape: chain(*(Multiply(f) for name in factors if (f := hyper.value(name)) != 1)))


def Decay(*, column: bool = True) -> Change:  # noqa: N802
    """Convert A_log [n] to -exp(A_log), [n, 1] or [n]."""
    if not column:
        return Change(lambda hyper, shape: MinusExp())
    return Change(lambda hyper, shape: chain(MinusExp(), Reshape((*shape[:1], 1))), _flat)


def _flat(hyper: Hyper, shape: Shape) -> Shape:
    return (int(np.prod(shape, dtype=np.int64)),)


def Groups(count: Callable[[Hyper], int]) -> Change:  # noqa: N802
    """[n] -> [groups, n / groups]."""
    return Change(lambda hyper, shape: Reshape((count(hyper), _divided(shape, count(hyper)))), _flat)


def _divided(shape: Shape, groups: int) -> int:
    if len(shape) != 1 or groups < 1 or shape[0] % groups:
        raise InputError("does not divide into groups", expected=f"a multiple of {groups}", found=list(shape))
    return shape[0] // groups


def _squeeze(hyper: Hyper, shape: Shape) -> Operation:
    if len(shape) != 3 or shape[1] != 1:
        raise InputError("is not the kernel of a convolution per channel", expected="[n, 1, k]", found=list(shape))
    return Reshape((shape[0], shape[2]))


Squeezed = Change(_squeeze, lambda hyper, shape: (shape[0], 1, *shape[1:]))
Column = Change(lambda hyper, shape: Reshape((*shape, 1)), lambda hyper, shape: shape[:-1])
Transposed = Change(lambda hyper, shape: Transpose(), lambda hyper, shape: (*shape[:-2], shape[-1], shape[-2]))
