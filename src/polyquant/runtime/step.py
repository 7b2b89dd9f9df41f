"""One token's way through all layers, recorded when it runs for the first time and run again by one native call.

Between two kernels Python takes a few microseconds, hundreds of times a token. A decoder that feeds one token does the same operations on
the same arrays each time, so they are recorded (native/tape.hpp): only the token's embedding, its angles and its position differ. The layers
know nothing of it, but for what Layer.recordable promises. The tape itself checks that each operation reads what an earlier one wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyquant.ops import native
from polyquant.runtime.rotary import Rotary, Turns
from polyquant.types import F32

__all__ = ["Step"]


class Step:
    """x [1, hidden] and turns of one position, looked [1, n] of the table of the layers' inputs: what goes in; out [1, hidden]: what the last run left.
    owner: the decoder that recorded it."""

    def __init__(self, owner: object, hidden: int, rotaries: Sequence[Rotary], looked: int = 0) -> None:
        self.owner = owner
        self.tape: Any = native.module().Tape()
        with self.tape:
            self.x, self.looked = native.empty(1, hidden), native.empty(1, looked)
            self.turns = tuple(
                Turns(native.empty(1, n), native.empty(1, n), r.interleaved)
                for r in rotaries
                for n in [len(r.frequencies)]
            )
        self.out: F32 = self.x
