"""The arithmetic of the float model: fast, or with a defined order of operations (ops/exact.py).

`polyquant run` takes whatever sums are fastest: they depend on the instruction set and on the BLAS in their last bits.
Calibration runs the model `with defined_order():`, so that equal inputs give equal codes everywhere. The references in
ops/ are written with the functions below; in this block they replace the native kernels whose sums have a different
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from polyquant.ops import exact, native
from polyquant.types import F32

__all__ = ["cos_sin", "defined_order", "exp", "fast_kernels", "is_defined", "log", "log1p", "matmul", "softmax", "tanh"]

A = TypeVar("A", NDArray[np.float32], NDArray[np.float64])

_defined: ContextVar[bool] = ContextVar("defined_order", default=False)


@contextmanager
def defined_order() -> Iterator[None]:
    """Use the arithmetic of ops/exact.py within the block, in this thread."""
    token = _defined.set(True)
    try:
        yield
    finally:
        _defined.reset(token)


def is_defined() -> bool:
    """Return True within `defined_order`."""
    return _defined.get()


def fast_kernels() -> ModuleType | None:
    """Return the extension module for kernels whose last bits depend on the processor; None within `defined_order`,
    and for the numpy engine.
    """
    return None if _defined.get() else native.lib()


def matmul(a: F32, b: F32) -> F32:
    """Multiply matrices [..., M, K] @ [..., K, N]."""
    return exact.product(a, b) if _defined.get() else np.matmul(a, b)


def exp(x: A) -> A:
    """Return e^x, in the type of x."""
    return exact.exp(x) if _defined.get() else np.exp(x)


def log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ln x."""
    return exact.log(x) if _defined.get() else np.log(x)


def log1p(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ln(1 + x)."""
    return exact.log1p(x) if _defined.get() else np.log1p(x)


def tanh(x: F32) -> F32:
    """Return tanh x."""
    return exact.tanh(x.astype(np.float64)).astype(np.float32) if _defined.get() else np.tanh(x)


def cos_sin(x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return cos x and sin x."""
    return exact.cos_sin(x) if _defined.get() else (np.cos(x), np.sin(x))


def softmax(
    scores: F32, low: NDArray[np.int32], high: NDArray[np.int32], scale: float, sinks: F32 | None = None
) -> F32:
    """Return the softmax of some columns of scale * scores; see exact.softmax."""
    if _defined.get():
        return exact.softmax(scores, low, high, scale, sinks)
    columns = np.arange(scores.shape[1], dtype=np.int32)
    hidden = (columns < low[:, None]) | (columns >= high[:, None])
    scaled = np.where(hidden, np.float32(-np.inf), scores * np.float32(scale))
    top = scaled.max(1) if sinks is None else np.maximum(scaled.max(1), sinks)
    weights = np.exp(scaled - top[:, None])
    total = weights.sum(1) if sinks is None else weights.sum(1) + np.exp(sinks - top)
    return np.asarray(weights / total[:, None], np.float32)
