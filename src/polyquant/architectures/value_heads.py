"""The order of value heads in GGUF files of Qwen3.5.

A folder groups value heads by key head; GGUF stores the first value head of each key head, then the second of each. All
rows, columns and scalars of the heads follow this order.
"""

from __future__ import annotations

import numpy as np

from polyquant.architectures.changes import Change, Squeezed
from polyquant.architectures.delta_rule import delta_sizes
from polyquant.architectures.hyper import Hyper
from polyquant.operations import Index, MinusExp, Operation, Rows, chain
from polyquant.types import Shape

__all__ = ["VALUE_HEADS"]


def _permuted(hyper: Hyper, size: int) -> Index:
    """Return the source index of each entry of the permuted value heads, of `size` entries each."""
    keys, _, each, _ = delta_sizes(hyper)
    return np.ascontiguousarray(np.arange(keys * each * size).reshape(keys, each, size).swapaxes(0, 1)).reshape(-1)


def _decay(hyper: Hyper, shape: Shape) -> Operation:
    return chain(MinusExp(), _heads(hyper, shape))


def _heads(hyper: Hyper, shape: Shape) -> Operation:
    return Rows(_permuted(hyper, 1))


def _rows(hyper: Hyper, shape: Shape) -> Operation:
    return Rows(_permuted(hyper, delta_sizes(hyper)[3]))


def _columns(hyper: Hyper, shape: Shape) -> Operation:
    return Rows(_permuted(hyper, delta_sizes(hyper)[3]), axis=1)


def _values_only(hyper: Hyper, shape: Shape) -> Operation:
    """Permute the rows of v; those of q and k stay."""
    keys, key, _, value = delta_sizes(hyper)
    return Rows(np.concatenate([np.arange(2 * keys * key), 2 * keys * key + _permuted(hyper, value)]))


def _kernel(hyper: Hyper, shape: Shape) -> Operation:
    return chain(Squeezed.operation(hyper, shape), _values_only(hyper, shape))


VALUE_HEADS = {
    "ssm_a": Change(_decay),
    "ssm_conv1d": Change(_kernel, Squeezed.before),
    **dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_dt.bias"), Change(_heads)),
    "attn_gate": Change(_rows),
    "attn_qkv": Change(_values_only),
    "ssm_out": Change(_columns),
}
"""The value changes of the delta rule's tensors."""
