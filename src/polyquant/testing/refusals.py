"""What must be refused: an error of the right kind that says what is wrong, in one line."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["refused"]


def refused(call: Callable[[], object], *kinds: type[Exception], says: str = "") -> None:
    """Asserts that `call()` raises one of these kinds, with these words in its text, and that the text is one line."""
    try:
        call()
    except kinds as error:
        text = str(error)
        assert says in text, f"the error does not say '{says}': {text}"
        assert "\n" not in text, f"the error has several lines: {text}"
        return
    raise AssertionError(f"not refused; expected {' or '.join(k.__name__ for k in kinds)}")
