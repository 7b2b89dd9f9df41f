"""Quantization of floats to affine codes in groups with the least error of a layer's outputs.

That error is the sum of d H d^T over the rows, with d = w - w' and H = mean of x x^T over the inputs x.

1. The grid of each group is searched with the diagonal of H (quantizers/grouped.py).
2. Columns are rounded in the order of falling diagonals, and each compensates the errors of those before it (Frantar et
   al. 2023, arXiv 2210.17323; the order is that of its "static" act-order: groups stay where they are).
3. Groups are refined from left to right: the scale (and the bias) that minimizes the error with all others fixed, then
   each code in the same way. No step raises the error, except by float32 rounding.

Steps 2 and 3 damp H. Products and sums have a defined order: the bits are the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polyquant.codecs.keeping import Integers
from polyquant.errors import CodecError
from polyquant.ops import exact
from polyquant.quantizers.gptq import compensation
from polyquant.quantizers.grouped import limits, quantize, stored, summed
from polyquant.types import F32, Affine

__all__ = ["quantize_for"]

_BLOCK = 128
"""Columns per block: one by one inside it, all at once beyond it."""
_DAMPING = 0.01
_SWEEPS = 2
"""Each further one gains less than half of the one before it."""


def quantize_for(traits: Integers, w: F32, hessian: F32 | None) -> Affine:
    """Quantize w [N, K] with the least error on the inputs of its layer. hessian: mean of x x^T, [K, K].

    Without a usable Hessian the diagonal of it weights the columns. Raises CodecError for a different size.
    """
    k = w.shape[1]
    if hessian is None:
        return quantize(traits, w)
    if hessian.shape != (k, k):
        raise CodecError("the Hessian does not fit the weight", expected=f"[{k}, {k}]", found=list(hessian.shape))
    order = np.argsort(-np.diag(hessian), kind="stable")
    sorted_diagonal, factor = compensation(hessian[np.ix_(order, order)], k)
    diagonal = np.empty_like(sorted_diagonal)
    diagonal[order] = sorted_diagonal
    start = quantize(traits, w, diagonal)
    if factor is None or traits.tensor:
        return start
    work = _Work.of(traits, w, start)
    work.compensate(w, factor, order)
    h = np.array(hessian, np.float32)
    h[np.diag_indices(k)] += np.float32(_DAMPING * float(np.trace(h, dtype=np.float64)) / k)
    for _ in range(_SWEEPS):
        work.refine(w, h)
    return Affine(traits.bits, work.codes.astype(np.int8), work.scale, work.offset, bias=work.bias)


@dataclass(slots=True)
class _Work:
    """Codes [N, K] as floats, and scale, offset and bias [N, G]; bias: None for a codec without."""

    traits: Integers
    group: int
    codes: F32
    scale: F32
    offset: F32
    bias: F32 | None

    @classmethod
    def of(cls, traits: Integers, w: F32, start: Affine) -> _Work:
        """The work on w [N, K], with the grids of `start`."""
        bias = None if start.bias is None else np.array(start.bias, np.float32)
        scale, offset = (np.array(table, np.float32) for table in (start.scale, start.offset))
        return cls(traits, traits.group or w.shape[1], start.codes.astype(np.float32), scale, offset, bias)

    def decoded(self, part: slice) -> F32:
        """The weights of the columns `part`, whole groups."""
        groups = slice(part.start // self.group, part.stop // self.group)
        scale, offset = (np.repeat(table[:, groups], self.group, 1) for table in (self.scale, self.offset))
        out = (self.codes[:, part] - offset) * scale
        if self.bias is not None:
            out += np.repeat(self.bias[:, groups], self.group, 1)
        return out

    def compensate(self, w: F32, factor: F32, order: np.ndarray[tuple[int], np.dtype[np.intp]]) -> None:
        """Round the columns of w in this order. factor: of the compensation, for columns in this order, [K, K]."""
        work = np.ascontiguousarray(w[:, order])
        for a in range(0, len(order), _BLOCK):
            some = order[a : a + _BLOCK]
            b = a + len(some)
            columns = np.ascontiguousarray(work[:, a:b].T)
            error = np.ascontiguousarray(w[:, some].T)
            for i, (j, column) in enumerate(zip(some, columns, strict=True)):
                scale, offset, bias = self._grid(j // self.group)
                q = np.clip(np.rint((column - bias) / scale + offset), *limits(self.traits))
                self.codes[:, j] = q
                error[i] -= (q - offset) * scale + bias
                columns[i + 1 :] += factor[a + i, a + i + 1 : b, None] * error[i]
            work[:, b:] += exact.product(error.T, factor[a:b, b:])

    def refine(self, w: F32, h: F32) -> None:
        """Lower the error group by group. h: the damped Hessian."""
        k = w.shape[1]
        pull = exact.product(w - self.decoded(slice(0, k)), h)  # d H, minus half the gradient
        for start in range(0, k, self.group):
            part = slice(start, start + self.group)
            before = self.decoded(part)
            self._refine_group(part, pull[:, part], h[part, part])
            if part.stop < k:
                pull[:, part.stop :] -= exact.product(self.decoded(part) - before, h[part, part.stop :])

    def _refine_group(self, part: slice, pull: F32, h: F32) -> None:
        """Fit scale and bias of one group, then step its codes. pull [N, g] is updated; h: [g, g]."""
        g = part.start // self.group
        levels = self.codes[:, part] - self.offset[:, g, None]
        self.scale[:, g] = self._fitted(self.scale[:, g], levels, exact.product(levels, h), pull)
        if self.bias is not None:
            ones = np.ones((1, self.group), np.float32)
            self.bias[:, g] = self._fitted(self.bias[:, g], ones, exact.product(ones, h), pull, instead=0)
        scale, (low, high) = self.scale[:, g], limits(self.traits)
        for a in range(0, self.group, _BLOCK):
            b = min(a + _BLOCK, self.group)
            columns = np.ascontiguousarray(pull[:, a:b].T)
            change = np.empty_like(columns)
            for i, column in enumerate(columns):
                codes = self.codes[:, part.start + a + i]
                new = np.clip(np.rint(codes + column / (scale * h[a + i, a + i])), low, high)
                change[i] = (new - codes) * scale
                codes[:] = new
                columns[i + 1 :] -= h[a + i, a + i + 1 : b, None] * change[i]
            pull[:, b:] -= exact.product(change.T, h[a:b, b:])

    def _fitted(self, table: F32, levels: F32, response: F32, pull: F32, instead: float = 1) -> F32:
        """Scales or biases [N] after one step along `levels`, where it lowers the error; pull is updated.

        response: levels @ h.
        """
        along, steep = (summed((levels * x)[:, None])[:, 0] for x in (pull, response))
        with np.errstate(all="ignore"):
            step = stored(table + along / steep, self.traits, instead) - table
            step = np.where(step * (2 * along - step * steep) > 0, step, np.float32(0))
        pull -= step[:, None] * response
        return table + step

    def _grid(self, g: int) -> tuple[F32, F32, F32 | float]:
        return self.scale[:, g], self.offset[:, g], 0.0 if self.bias is None else self.bias[:, g]
