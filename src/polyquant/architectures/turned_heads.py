"""The order of value heads in GGUF files of Qwen3.5: in a folder those that share a key head lie together; in GGUF the first of each key head come first, then
the second of each. So do all rows, columns and numbers that belong to them."""

from __future__ import annotations

import numpy as np

from polyquant.architectures.changes import Change, Squeezed
from polyquant.architectures.delta_rule import delta_sizes
from polyquant.architectures.hyper import Hyper
from polyquant.operations import Index, MinusExp, Operation, Rows, chain
from polyquant.types import Shape

__all__ = ["TURNED"]


def _turned(hyper: Hyper, size: int) -> Index:
    """Where entry i of the turned value heads was, of heads with `size` numbers each."""
    keys, _, each, _ = delta_sizes(hyper)
    return np.ascontiguousarray(np.arange(keys * each * size).reshape(keys, each, size).swapaxes(0, 1)).reshape(-1)


def _decay(hyper: Hyper, shape: Shape) -> Operation:
    return chain(MinusExp(), _heads(hyper, shape))


def _heads(hyper: Hyper, shape: Shape) -> Operation:
    return Rows(_turned(hyper, 1))


def _rows(hyper: Hyper, shape: Shape) -> Operation:
    return Rows(_turned(hyper, delta_sizes(hyper)[3]))


def _columns(hyper: Hyper, shape: Shape) -> Operation:
    return Rows(_turned(hyper, delta_sizes(hyper)[3]), axis=1)


def _behind_keys(hyper: Hyper, shape: Shape) -> Operation:
    """The rows of v; those of q and k stay."""
    keys, key, _, value = delta_sizes(hyper)
    return Rows(np.concatenate([np.arange(2 * keys * key), 2 * keys * key + _turned(hyper, value)]))


def _kernel(hyper: Hyper, shape: Shape) -> Operation:
    return chain(Squeezed.operation(hyper, shape), _behind_keys(hyper, shape))


TURNED = {
    "ssm_a": Change(_decay),
    "ssm_conv1d": Change(_kernel, Squeezed.before),
    **dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_dt.bias"), Change(_heads)),
    "attn_gate": Change(_rows),
    "attn_qkv": Change(_behind_keys),
    "ssm_out": Change(_columns),
}
"""What the values of the tensors of the delta rule go through on the way to GGUF."""
