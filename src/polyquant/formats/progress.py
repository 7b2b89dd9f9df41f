"""Progress of long calls: `progress=True` draws a bar, in a terminal or a notebook.

tqdm draws it if it is installed; otherwise it is one line of text on stderr, rewritten a few times per second. The bar
disappears when the call ends.
"""

from __future__ import annotations

import functools
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from polyquant.errors import printable
from polyquant.formats.steps import Progress

__all__ = ["shows_progress"]

P = ParamSpec("P")
R = TypeVar("R")
_NAME = 40
"""Characters of a tensor name."""
_PAUSE = 0.2
"""Seconds between two updates of the line of text."""
_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


def shows_progress(
    what: str, *, steps: bool = True, measurements: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a function with the keyword `progress: bool`, which draws a bar named `what`.

    steps: it has a callback `on_progress`, which gets a `Progress`; measurements: it has one called `on_tensor`, which
    gets (done, total, name). A callback of the caller is called too.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not kwargs.pop("progress", False):
                return function(*args, **kwargs)
            with _bar(what) as draw:
                if steps:
                    kwargs["on_progress"] = _both(kwargs.get("on_progress"), draw)
                if measurements:
                    kwargs["on_tensor"] = _both(kwargs.get("on_tensor"), _of_measurement(draw))
                return function(*args, **kwargs)

        return call

    return decorate


def _both(theirs: Any, mine: Callable[..., None]) -> Callable[..., None]:
    """The caller's callback, if any, and the bar."""
    if theirs is None:
        return mine

    def tell(*event: Any) -> None:
        mine(*event)
        theirs(*event)

    return tell


def _of_measurement(draw: Callable[[Progress], None]) -> Callable[[int, int, str], None]:
    return lambda done, total, name: draw(Progress(done, total, name, 0.0))


@contextmanager
def _bar(what: str) -> Iterator[Callable[[Progress], None]]:
    """Draw a bar during the block, which gets a function that moves it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a notebook without ipywidgets: the bar is text
            from tqdm.auto import tqdm
    except ImportError:
        with _line(what) as move:
            yield move
        return
    with tqdm(desc=what, total=1, leave=False, bar_format=_FORMAT) as bar:

        def draw(event: Progress) -> None:
            if bar.total != event.total:
                bar.reset(total=event.total)
            bar.set_postfix_str(printable(event.tensor, _NAME), refresh=False)
            bar.update(event.done - bar.n)

        yield draw


@contextmanager
def _line(what: str) -> Iterator[Callable[[Progress], None]]:
    """Rewrite one line of text on stderr."""
    shown, last = "", float("-inf")

    def write(text: str) -> None:
        nonlocal shown
        sys.stderr.write(f"\r{text.ljust(len(shown))}")
        sys.stderr.flush()
        shown = text

    def draw(event: Progress) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= _PAUSE:
            last = now
            write(f"{what} {event.done / max(1, event.total):4.0%} {printable(event.tensor, _NAME)}")

    try:
        yield draw
    finally:
        if shown:
            write("")
            sys.stderr.write("\r")
