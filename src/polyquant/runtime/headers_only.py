"""Build a model from headers: every name, shape and hyper-parameter is checked as for running, and no matrix is read.

`with headers_only():` applies to the current thread. Vectors and other small tensors are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["active", "headers_only"]

_ACTIVE: ContextVar[bool] = ContextVar("headers_only", default=False)


def active() -> bool:
    """True inside `headers_only`: matrices get no kernel and are not repacked, ternarized or assembled."""
    return _ACTIVE.get()


@contextmanager
def headers_only() -> Iterator[None]:
    """Build models without reading their matrices; they cannot run."""
    token = _ACTIVE.set(True)
    try:
        yield
    finally:
        _ACTIVE.reset(token)
