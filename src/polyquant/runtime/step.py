"""The forward pass of one token, recorded on its first run and replayed by a single native call.

Python spends a few microseconds between kernels, hundreds of times per token. A decoder that feeds one token performs
the same operations on the same arrays each time, so they are recorded (native/decoder/tape.hpp): only the token's
embedding, its angles and its position differ. Layers are unaware of it, except for the promise of Layer.recordable. The
tape checks that each operation reads the output of an earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyquant.ops import native
from polyquant.runtime.rotary import Rotary, Rotation
from polyquant.types import F32

__all__ = ["Step"]


class Step:
    """A recorded step.

    Inputs: x [1, hidden], the rotations of one position, and looked [1, n], its row of the per-layer embeddings. out
    [1, hidden]: the output of the last run. owner: the decoder that recorded it.
    """

    def __init__(self, owner: object, hidden: int, rotaries: Sequence[Rotary], looked: int = 0) -> None:
        self.owner = owner
        self.tape: Any = native.module().Tape()
        with self.tape:
            self.x, self.looked = native.empty(1, hidden), native.empty(1, looked)
            self.rotations = tuple(
                Rotation(native.empty(1, n), native.empty(1, n), r.interleaved)
                for r in rotaries
                for n in [len(r.frequencies)]
            )
        self.out: F32 = self.x
