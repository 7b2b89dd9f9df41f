"""A note before long computations without native kernels. On stderr, so that it does not change what a pipe reads."""

from __future__ import annotations

from polyquant.cli.terminal import say
from polyquant.ops import native

__all__ = ["note_slow_engine"]


def note_slow_engine() -> None:
    """Print one line if the native kernels are not built, unless POLYQUANT_NATIVE=0 requests numpy anyway."""
    if not native.available() and native.wanted():
        say(
            "note: no native kernels, so numpy computes, 5 to 100 times slower: see `polyquant doctor`; "
            "POLYQUANT_NATIVE=0 hides this note",
            err=True,
        )
