"""Products of one token from memory, two threads, against reading the same bytes: what part of the time is memory's.
And of four tokens against one (bar: 1.15 times its time).

Each matrix has 400 MB, far beyond the cache; reading is `memchr` over as many bytes, in alternating runs, since the
bandwidth of a shared machine moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from bench_run import reader
from measure import Row, Section, in_turn
from polyquant.ops import native
from polyquant.ops.matmul import Group, packed
from polyquant.types import Rounding
from synthetic import BLOCKS, random_blocks

COLUMNS = 4096
BYTES = 400_000_000
THREADS = 2
FOUR_BITS = ("q4_0", "q4_k", "iq4_xs", "mxfp4", "nvfp4")
BARS = {
    **dict.fromkeys(("q4_0", "q8_0", "q4_k", "iq4_xs", "q6_k", "tq2_0", "i2_s.x86"), 0.85),
    **dict.fromkeys(("mxfp4", "nvfp4", "q2_k", "q3_k", "iq3_s", "iq3_xxs"), 0.5),
    **dict.fromkeys(("iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s"), 0.5),
}


def rows() -> Iterator[Row]:
    """Yield a row per type, and of four tokens per type of 4 bits."""
    before = native.threads()
    native.set_threads(THREADS)
    try:
        for name, bar in BARS.items():
            weights, size, _ = BLOCKS[name]
            count = BYTES // (COLUMNS // weights * size)
            data = random_blocks(name, count * COLUMNS)
            group = Group([packed(name, data, count, COLUMNS)], [count])
            single, read = in_turn(product(group, name, 1), reader(THREADS, data.nbytes), repeats=11)
            speed = {"G weights/s": count * COLUMNS / single / 1e9}
            yield Row(name, "GB/s", data.nbytes / single / 1e9, data.nbytes / read / 1e9, bar, True, speed)
            if name in FOUR_BITS:
                four, single = in_turn(product(group, name, 4), product(group, name, 1), repeats=11)
                yield Row(f"{name}, 4 tokens over 1, peer: bar", "times", four / single, 1.15, 1.0)
    finally:
        native.set_threads(before)


def product(group: Group, name: str, tokens: int) -> Callable[[], object]:
    """Return the product of a matrix and random activations."""
    x = np.random.default_rng(2).standard_normal((tokens, COLUMNS)).astype(np.float32)
    rounding: Rounding = "wide" if name.startswith(("tq", "i2")) else "block"
    return lambda: group(x, rounding)


SECTION = Section("one token from memory, two threads, against reading", rows)
