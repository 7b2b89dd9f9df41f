"""A product whose input has about 15 bits instead of the 8 of int8: the rounding error is rounded as well, and
multiplied too.

    y = W q(x) + W q(x - q(x)),  q: int8 with a scale per block of 32 (ops/matmul.py)

The rows of W are read once for both, so a single token costs about 1.5 times as much, whereas float inputs cost several
times as much. This pays off for small matrices with a large effect on accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from polyquant import registry
from polyquant.ops import native
from polyquant.ops.decoder import add, concatenated
from polyquant.ops.matmul import BLOCK, round_activations
from polyquant.rows import in_memory
from polyquant.runtime.linear import Linear
from polyquant.types import F32, Blocks, Weight

__all__ = ["SplitInput"]

_SIZES = (256, 128, 64, BLOCK)
"""Sizes of the identity matrix: kernels pad rows to 256."""


class SplitInput:
    """The product with a split input if a linear rounds its inputs by blocks; otherwise the plain product."""

    def __init__(self, linear: Linear) -> None:
        self.enabled = linear.rounding == "block" and all(
            w.codec.form is Blocks and w.shape[-1] % BLOCK == 0 for w in linear.weights
        )

    def __call__(self, linear: Callable[[F32], Sequence[F32]], x: F32) -> Sequence[F32]:
        """Multiply x [T, K] -> [T, N_i] per weight. linear: the one passed to the constructor, or its replacement."""
        if not self.enabled:
            return linear(x)
        tokens, rest = len(x), add(x, _rounded(x), -1.0)
        both = linear(concatenated(x.reshape(1, -1), rest.reshape(1, -1)).reshape(2 * tokens, -1))
        return [add(concatenated(y[:tokens]), concatenated(y[tokens:])) for y in both]


def _rounded(x: F32) -> F32:
    """Return x rounded to int8: natively as a product with an identity matrix, which a tape can record."""
    if native.lib() is None:
        return round_activations(x, "block")
    size = next(n for n in _SIZES if x.size % n == 0)
    (out,) = _identity(size)(x.reshape(-1, size))
    return out.reshape(x.shape)


@cache
def _identity(size: int) -> Linear:
    """Return the identity [size, size] in Q4_0, whose levels -8 ... 7 with a scale of 1 hold 0 and 1 exactly."""
    codec = registry.codec("q4_0")
    blocks = np.full((size, size // BLOCK, 18), 0x88, np.uint8)  # a scale, float16, then nibbles of which 8 is 0
    blocks[..., :2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    for row in range(size):
        block, at = divmod(row, BLOCK)
        blocks[row, block, 2 + at % 16] += 1 if at < 16 else 16  # the first 16 of a block are the low nibbles
    weight = Weight("identity", (size, size), codec, in_memory({"blocks": blocks.reshape(size, -1)}))
    return Linear([weight], [None], "block")
