"""y = x W_e^T + b_e with the expert e selected for each row, on stacks in their stored layout.

Only the matrices of selected experts are read. If all experts have a packed kernel (ops/matmul.py), one native call
computes all rows of all experts: for a single token the threads share its experts, many tokens are sorted by expert.
Otherwise each expert is a separate `Linear`, created when first selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from polyquant.capabilities import Packed
from polyquant.errors import InputError
from polyquant.ops import native
from polyquant.ops.arithmetic import fast_kernels
from polyquant.ops.experts import ExpertGroup, Ids, add_expert_bias
from polyquant.rows import expert, matrix_name
from polyquant.runtime.linear import Linear, packed_handle
from polyquant.types import F32, Rounding, Ternary, Weight

__all__ = ["ExpertLinear", "Stack"]

Stack: TypeAlias = Weight | Sequence[Weight]
"""Matrices [N, K] of E experts: one weight [E, N, K], or a list of weights."""


class ExpertLinear:
    """Stacks with a common input. bias: float32 [E, N_i] or None, one per stack.

    Raises InputError if the stacks differ in experts or input, or a bias does not fit; UnsupportedError for a codec
    that cannot be split by expert.
    """

    def __init__(self, stacks: Sequence[Stack], bias: Sequence[F32 | None], rounding: Rounding) -> None:
        self.stacks, self.bias = tuple(stacks), tuple(bias)
        firsts = [_of(s, 0) for s in self.stacks]
        self.experts = _count(self.stacks[0])
        self.sizes, self.cols = [w.shape[0] for w in firsts], firsts[0].shape[1]
        for stack, first, b in zip(self.stacks, firsts, self.bias, strict=True):
            if _count(stack) != self.experts or first.shape[1] != self.cols:
                raise InputError(
                    "stacks with different experts or inputs",
                    tensor=first.name,
                    expected=f"{self.experts} experts of {self.cols} inputs",
                    found=f"{_count(stack)} of {first.shape[1]}",
                )
            if b is not None and b.shape != (self.experts, first.shape[0]):
                raise InputError(
                    "a bias does not fit its experts",
                    tensor=first.name,
                    expected=[self.experts, first.shape[0]],
                    found=list(b.shape),
                )
        if rounding == "block" and all(w.codec.form is Ternary for w in firsts):
            rounding = "wide"
        self.rounding = rounding
        self._group = self._grouped()
        self._linears: dict[int, Linear] = {}

    def names(self, e: int) -> tuple[str, ...]:
        """Return the name of matrix e of each stack."""
        return tuple(matrix_name(s.name, e) if isinstance(s, Weight) else s[e].name for s in self.stacks)

    @property
    def kernel(self) -> Literal["packed", "apart"]:
        """The method of the next call: "packed" can be recorded, "apart" runs expert by expert in Python."""
        return "packed" if self._group is not None and fast_kernels() is not None else "apart"

    def __call__(self, x: F32, ids: Ids | None) -> Sequence[F32]:
        """Multiply x [T, K], or [A, K] with a row per assignment, by the experts ids [T, used] -> one [A, N_i] per
        stack, A = T * used.

        ids: None if row i uses matrix i % E, as for heads.
        """
        if self._group is None or fast_kernels() is None:
            return self._apart(x, self._row_ids(x) if ids is None else ids.reshape(-1))
        y = self._group(x, ids, self.rounding)
        for out, bias in zip(y, self.bias, strict=True):
            if bias is not None:
                add_expert_bias(out, bias, self._row_ids(x) if ids is None else ids)
        return y

    def _row_ids(self, x: F32) -> Ids:
        return np.arange(len(x), dtype=np.int32) % np.int32(self.experts)

    def _apart(self, x: F32, ids: Ids) -> Sequence[F32]:
        out = [np.empty((len(ids), n), np.float32) for n in self.sizes]
        rows = np.arange(len(ids)) // (len(ids) // len(x))
        for e in np.unique(ids).tolist():
            selected = np.flatnonzero(ids == e)
            for y, product in zip(out, self._linear(e)(x[rows[selected]]), strict=True):
                y[selected] = product
        return out

    def _linear(self, e: int) -> Linear:
        if e not in self._linears:
            bias = [None if b is None else b[e] for b in self.bias]
            self._linears[e] = Linear([_of(s, e) for s in self.stacks], bias, self.rounding)
        return self._linears[e]

    def _grouped(self) -> ExpertGroup | None:
        if not native.available():
            return None
        handles = [_handles(s) for s in self.stacks]
        return None if any(h is None for h in handles) else ExpertGroup(handles, self.experts, self.sizes)


def _count(stack: Stack) -> int:
    return stack.shape[0] if isinstance(stack, Weight) else len(stack)


def _of(stack: Stack, e: int) -> Weight:
    return expert(stack, e) if isinstance(stack, Weight) else stack[e]


def _handles(stack: Stack) -> Any | None:
    """Return one handle on all rows, or one per expert; None if an expert has no packed kernel."""
    if not _packed(packed_handle(_of(stack, 0))):
        return None
    if isinstance(stack, Weight) and isinstance(stack.codec, Packed):
        whole = stack.codec.packed(stack.parts, stack.shape)
        if whole is not None or stack.codec.row_sliced:
            return whole
    handles = [packed_handle(_of(stack, e)) for e in range(_count(stack))]
    return handles if all(_packed(h) for h in handles) else None


def _packed(handle: object) -> bool:
    return isinstance(handle, native.module().Packed)
