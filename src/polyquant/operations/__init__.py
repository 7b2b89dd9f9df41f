"""Operations that make a tensor from others: gather rows, join, stack, slice, reshape, transpose, scale.

    Same                          the unchanged source
    Rows(order, axis)             entries of an axis, reordered
    Slice(start, stop, step)      a range of an axis: a part of a fused tensor
    Concat(axis), Interleave      several tensors, concatenated or interleaved
    Stack, Matrix(i)              n tensors -> [n, ...], and entry i of a stack
    Reshape(shape), Transpose     other axes; the last two exchanged
    AddConstant, Multiply         x + value, x * value; MultiplyRows: a factor per section of rows
    MinusExp, MinusLog            -exp(x), and its inverse log(-x)
    Chain(ops), Joined(each, by)  in sequence; each source separately, then all together

Codecs see every tensor as a matrix [rows, K] (types.as_matrix), so an operation is a rule for rows: `needs` returns the
source rows of some target rows, `make` assembles them. The same code works on floats and, where `keeps_rows`, on packed
rows, codes and scales: such a step is a copy or a transcode. All of them run row block by row block. A vector [K] is
one row, so operations along its only axis need floats. `reference` computes the same on whole arrays with numpy
functions.
"""

from polyquant.operations.axes import Concat, Interleave, Rows, Slice
from polyquant.operations.base import SAME, Index, Operation, Same
from polyquant.operations.chains import Chain, Joined, chain, steps_of
from polyquant.operations.numbers import AddConstant, MinusExp, MinusLog, Multiply, MultiplyRows
from polyquant.operations.shapes import Matrix, Reshape, Stack, Transpose

__all__ = [
    "SAME", "AddConstant", "Chain", "Concat", "Index", "Interleave", "Joined", "Matrix", "MinusExp", "MinusLog",
    "Multiply", "MultiplyRows", "Operation", "Reshape", "Rows", "Same", "Slice", "Stack",
    "Transpose", "chain", "steps_of",
]  # fmt: skip
