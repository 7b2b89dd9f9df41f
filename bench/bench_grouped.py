"""Products of codes with tables (compressed-tensors, MLX, FP8, FP4) against those of our own GGUF types.

The matrices have the shapes of a 1B Llama's layer and together exceed the cache; the figure is processor time of one
thread in alternating runs, so that a busy machine changes both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

from measure import Row, Section, in_turn
from polyquant.ops import grouped, native
from polyquant.ops.grouped import Grouped, Kind
from polyquant.ops.matmul import Group, packed
from polyquant.types import F32
from synthetic import random_blocks

SHAPES = ((2048, 2048), (8192, 2048), (2048, 8192))
LAYERS = 3
WEIGHTS = LAYERS * sum(n * k for n, k in SHAPES)
AVX512 = "AVX-512" in native.instruction_set()
# name, kind, group, dtype of the scales, offsets, our type, bar
CASES: tuple[tuple[str, Kind, int, str, str, str, float | None], ...] = (
    ("int4 g32, f16", "4", 32, "f16", "", "q4_0", 0.9),
    ("int4 g64, f16", "4", 64, "f16", "", "q4_0", 0.9),
    ("int4 g128, bf16", "4", 128, "bf16", "", "q4_0", 0.9),
    ("int4 g128 zero, f16", "4", 128, "f16", "zero", "q4_0", 0.9),
    ("MLX 4 bit g32", "4", 32, "f16", "bias", "q4_0", 0.9),
    ("MLX 4 bit g64", "4", 64, "f16", "bias", "q4_0", 0.9),
    ("MLX 2 bit g64", "2", 64, "f16", "bias", "q4_0", None),
    ("MLX 3 bit g64", "3", 64, "f16", "bias", "q4_0", None),
    ("MLX 5 bit g64", "5", 64, "f16", "bias", "q5_0", None),
    ("MLX 6 bit g64", "6", 64, "f16", "bias", "q8_0", None),
    ("int8 g128, bf16", "8", 128, "bf16", "", "q8_0", 0.9),
    ("MLX 8 bit g64", "8", 64, "f16", "bias", "q8_0", 0.9),
    ("FP8 E4M3, a scale per row", "e4m3", 0, "bf16", "", "q8_0", 0.9),
    ("FP8 E4M3, blocks of 128", "e4m3", 128, "f32", "", "q8_0", 0.9),
    ("MXFP8", "e4m3", 32, "e8m0", "", "q8_0", 0.9),
    ("MXFP4", "e2m1", 32, "e8m0", "", "mxfp4", 0.9),
    ("NVFP4", "e2m1", 16, "e4m3", "", "mxfp4", None),
)
TYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn}


def weight(n: int, k: int, kind: Kind, group: int, dtype: str, offset: str) -> Grouped:
    """Return random codes with constant scales."""
    bits = {"e2m1": 4, "e4m3": 8}.get(kind) or int(kind)
    codes = np.random.default_rng(1).integers(0, 256, (n, k * bits // 8), np.uint8)
    if kind == "e4m3":  # of Gaussian weights: subnormal numbers are as rare as in models
        normal = np.random.default_rng(1).standard_normal((n, k), np.float32) * np.float32(100)
        codes = normal.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    cells = n // (tall := 128 if kind == "e4m3" and group == 128 else 1), k // (group or k)
    scale = np.full(cells, 120, np.uint8) if dtype == "e8m0" else np.full(cells, 0.01, TYPES[dtype])
    zero = np.full(cells, 7, np.uint8) if offset == "zero" else None
    bias = np.full(cells, -0.08, TYPES[dtype]) if offset == "bias" else None
    return Grouped(codes, kind, (n, k), scale, group or k, zero, bias, 2 ** (bits - 1), tall)


def ours(name: str, n: int, k: int) -> object:
    """Return a handle of one of our types with constant scales."""
    return packed(name, random_blocks(name, n * k), n, k)


def products(make: Callable[[int, int], object], tokens: int) -> Callable[[], None]:
    """Return one pass over all matrices."""
    groups = [(Group([make(n, k)], [n]), k) for _ in range(LAYERS) for n, k in SHAPES]
    x: dict[int, F32] = {k: np.random.default_rng(k).standard_normal((tokens, k)).astype(np.float32) for _, k in SHAPES}

    def run() -> None:
        for group, k in groups:
            group(x[k], "block")

    return run


def rows() -> Iterator[Row]:
    """Yield a row per layout: one token with all instruction sets, and several with the best."""
    before = native.threads()
    native.set_threads(1)
    try:
        for avx2 in (False, True) if AVX512 else (False,):
            if avx2:
                native.module().use_kernels("avx2")
            for case in CASES:
                yield row(*case, tokens=1, suffix=", AVX2" if avx2 else "")
        native.module().use_kernels("")
        yield row(*CASES[12][:-1], None, tokens=4, suffix=", 4 tokens")
        for case in CASES[:1] + CASES[10:11] + CASES[12:13] + CASES[15:16]:
            yield row(*case[:-1], None, tokens=64, suffix=", 64 tokens")
    finally:
        native.module().use_kernels("")
        native.set_threads(before)


def row(
    name: str,
    kind: Kind,
    group: int,
    dtype: str,
    offset: str,
    peer: str,
    bar: float | None,
    *,
    tokens: int,
    suffix: str,
) -> Row:
    """Return the speed of a layout and of our type, in billions of weights per second."""
    seconds = in_turn(
        products(lambda n, k: grouped.handle(weight(n, k, kind, group, dtype, offset)), tokens),
        products(lambda n, k: ours(peer, n, k), tokens),
        repeats=15 if tokens == 1 else 3,
        clock=time.thread_time,
    )
    rates = [WEIGHTS * tokens / s / 1e9 for s in seconds]
    return Row(f"{name}{suffix}, peer: {peer}", "G weights/s", rates[0], rates[1], bar, True)


SECTION = Section("products of codes with tables against our own types, one thread", rows)
