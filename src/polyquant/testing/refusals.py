"""Assertions on errors: the right class, the right words, one line."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["refused"]


def refused(call: Callable[[], object], *kinds: type[Exception], says: str = "") -> None:
    """Assert that `call()` raises one of `kinds` with a one-line message that contains `says`."""
    try:
        call()
    except kinds as error:
        text = str(error)
        assert says in text, f"the error does not contain '{says}': {text}"
        assert "\n" not in text, f"the error has several lines: {text}"
        return
    raise AssertionError(f"not refused; expected {' or '.join(k.__name__ for k in kinds)}")
