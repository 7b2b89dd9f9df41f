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

COLUMNS = 4096
BYTES = 400_000_000
THREADS = 2
FOUR_BITS = ("q4_0", "q4_k", "iq4_xs", "mxfp4", "nvfp4")
# name: weights and bytes of a block, places of its fp16 numbers, bar
TYPES: dict[str, tuple[int, int, tuple[int, ...], float]] = {
    "q4_0": (32, 18, (0,), 0.85),
    "q8_0": (32, 34, (0,), 0.85),
    "q4_k": (256, 144, (0, 2), 0.85),
    "iq4_xs": (256, 136, (0,), 0.85),
    "q6_k": (256, 210, (208,), 0.85),
    "tq2_0": (256, 66, (64,), 0.85),
    "i2_s.x86": (128, 32, (), 0.85),
    "mxfp4": (32, 17, (), 0.5),
    "nvfp4": (64, 36, (), 0.5),
    "q2_k": (256, 84, (80, 82), 0.5),
    "q3_k": (256, 110, (108,), 0.5),
    "iq3_s": (256, 110, (0,), 0.5),
    "iq3_xxs": (256, 98, (0,), 0.5),
    "iq2_s": (256, 82, (0,), 0.5),
    "iq2_xs": (256, 74, (0,), 0.5),
    "iq2_xxs": (256, 66, (0,), 0.5),
    "iq1_m": (256, 56, (), 0.5),
    "iq1_s": (256, 50, (0,), 0.5),
}  # fmt: skip


def blocks(name: str) -> np.ndarray:
    """Return the bytes of a matrix: random codes, and scales of 0.01, of rows of COLUMNS weights."""
    weights, size, halves, _ = TYPES[name]
    line = COLUMNS // weights
    data = np.random.default_rng(1).integers(0, 256, (BYTES // (line * size) * line, size), np.uint8)
    if name == "mxfp4":
        data[:, 0] = 120
    for at in halves:
        data[:, at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return data


def rows() -> Iterator[Row]:
    """Yield a row per type, and of four tokens per type of 4 bits."""
    before = native.threads()
    native.set_threads(THREADS)
    try:
        for name, (weights, _, _, bar) in TYPES.items():
            data = blocks(name)
            count = len(data) * weights // COLUMNS
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
