"""Consistency of statically quantized linear layers: scales, offsets and integer biases fit each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from polyquant.analysis.side import Reader, Side
from polyquant.errors import PolyquantError
from polyquant.types import Activation, Affine, Checkpoint, Weight, as_matrix

__all__ = ["contradictions", "kept_by_tools"]

_MOST = 1 << 26
"""Weights of a layer that is unpacked to sum its codes."""
_VECTOR = 1 << 20


def kept_by_tools(name: str, actual: Mapping[str, Side]) -> str | None:
    """Return why a tensor without a source is harmless: zeros, a copy, scales of a cache. None if it may not be."""
    stem, _, part = name.rpartition(".")
    if part in ("kv_cache_scale", "kv_cache_offset"):
        return "of the int8 key/value cache"
    side = actual[name]
    if math.prod(side.shape) > _VECTOR:
        return None
    values = Reader(side).rows(slice(0, as_matrix(side.shape)[0]))
    if part == "bias" and not values.any():
        return "a bias of zeros"
    if stem.endswith(".module"):
        plain = f"{stem.removesuffix('.module')}.{part}"
        twins = [s for s in actual.values() if s.weights[0].name == plain and s.shape == side.shape]
        if twins and np.array_equal(Reader(twins[0]).rows(slice(0, as_matrix(side.shape)[0])), values):
            return f"a copy of {plain}"
    return None


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
