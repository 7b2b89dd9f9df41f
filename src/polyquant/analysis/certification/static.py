"""Consistency of statically quantized linear layers: scales, offsets and integer biases fit each other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import PolyquantError
from polyquant.types import Activation, Affine, Checkpoint, Weight, as_matrix

__all__ = ["contradictions"]

_MOST = 1 << 26
"""Weights of a layer that is unpacked to sum its codes."""


def contradictions(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """(tensor, message) of each linear layer whose static activation parameters contradict its codes and its bias."""
    for weight in checkpoint.values():
        if weight.codec.form is Affine and {"quant_bias", "input_offset"} <= weight.arrays.keys():
            problem = _contradiction(checkpoint, weight)
            if problem is not None:
                yield weight.name, problem


def _contradiction(checkpoint: Checkpoint, weight: Weight) -> str | None:
    rows, k = as_matrix(weight.shape)
    if rows * k > _MOST:
        return None
    try:
        codes = weight.codec.unpack(weight.read(), weight.shape)
    except PolyquantError as problem:
        return problem.message
    stem = weight.name.removesuffix(".weight")
    bias = checkpoint.weights.get(f"{stem}.bias")
    added = np.zeros(rows) if bias is None else np.asarray(bias.dequantize(), np.float64).reshape(-1)
    return None if codes.activation is None else _problem(codes, codes.activation, added)


def _problem(codes: Affine, activation: Activation, added: NDArray[np.float64]) -> str | None:
    """The contradiction of one layer with the bias `added`."""
    rows = len(added)
    scale, offset = float(activation.scale.reshape(-1)[0]), float(activation.offset.reshape(-1)[0])
    if not np.isfinite(scale) or scale <= 0:
        return f"input_scale is {scale:g}"
    deq = np.broadcast_to(np.asarray(activation.deq_scale, np.float64).reshape(-1), (rows,))
    wanted_deq = codes.scale[:, 0].astype(np.float64) * scale
    apart = np.flatnonzero(~(np.abs(deq - wanted_deq) <= 0.01 * np.abs(wanted_deq)))
    if len(apart):
        return f"deq_scale of {len(apart)} of {rows} rows is not input_scale * the scale of the weight"
    sums = codes.codes.astype(np.int64).sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(deq != 0, added / deq, 0)
    wanted = share - offset * sums
    slack = 2.0 + 0.01 * np.abs(share) + 0.01 * np.abs(offset) * np.abs(sums)
    wrong = np.flatnonzero(np.abs(wanted - activation.quant_bias) > slack)
    if not len(wrong):
        return None
    i = int(wrong[0])
    return (
        f"quant_bias of {len(wrong)} of {rows} rows is not bias / deq_scale - input_offset * sum of the codes "
        f"(row {i}: {int(activation.quant_bias[i])}, expected about {wanted[i]:.0f})"
    )
