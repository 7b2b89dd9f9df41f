"""How one tensor is made of others: rows gathered, tensors joined, stacked and cut, axes exchanged, a constant added.

    Same                          the source as it is
    Rows(order, axis)             entries of an axis in another order
    Slice(start, stop, step)      some entries of an axis: a part of a fused tensor
    Concat(axis), Interleave      several tensors, one behind the other or in turn
    Stack, Matrix(i)              n tensors -> [n, ...], and one of them back
    Reshape(shape), Transpose     other axes; the last two exchanged
    AddConstant, Multiply         x + value, x * value; MultiplyRows: a factor for each section of rows
    MinusExp, MinusLog            -exp(x), and log(-x) back
    Chain(ops), Joined(each, by)  one after the other; each source by itself and then all

Codecs see every tensor as a matrix [rows, K] (types.as_matrix), so an operation is a rule for rows: `needs` says which rows of each source some target
rows are made of, `make` puts them together. The same two work on floats and, where `keeps_rows`, on packed rows, codes and scales: that is why such a
step is a copy or a transcode, and why all of them go row block by row block. A vector [K] is one row, so that along its only axis it needs floats.
`reference` says the same of whole arrays in numpy's own words.
"""

from polyquant.operations.axes import Concat, Interleave, Rows, Slice
from polyquant.operations.base import SAME, Index, Operation, Same
from polyquant.operations.chains import Chain, Joined, chain
from polyquant.operations.numbers import AddConstant, MinusExp, MinusLog, Multiply, MultiplyRows
from polyquant.operations.shapes import Matrix, Reshape, Stack, Transpose

__all__ = [
    "SAME", "AddConstant", "Chain", "Concat", "Index", "Interleave", "Joined", "Matrix", "MinusExp", "MinusLog", "Multiply", "MultiplyRows", "Operation", "Reshape", "Rows", "Same", "Slice", "Stack",
    "Transpose", "chain",
]  # fmt: skip
