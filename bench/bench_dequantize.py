"""Dequantize blocks to float32 on one thread, against gguf-py's numpy code, for every type that both support."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np

import polyquant
from measure import Row, Section, in_turn
from polyquant.registry import CODECS

SHAPE = (4096, 4096)
BAR = 10.0


def peer_types() -> dict[str, Any]:
    """Return codec name -> gguf-py type, for types that gguf-py decodes; None for all if it is not installed."""
    ours = [
        n
        for n in CODECS
        if hasattr(polyquant.codec(n), "type_size") and polyquant.codec(n).type_id is not None and n != "f32"
    ]
    if find_spec("gguf") is None:
        return dict.fromkeys(ours)
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    found = {}
    for name in ours:
        kind = getattr(GGMLQuantizationType, name.upper(), None)
        if kind is not None:
            try:
                dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            except NotImplementedError:
                continue
            found[name] = kind
    return found


def rows() -> Iterator[Row]:
    """Compare with gguf-py. `fresh`: milliseconds into a new array, as gguf-py always does; else into a given one.

    `of fill`: speed relative to filling the same floats with a constant; the bound is 1 plus the packed bytes to read.
    """
    rng = np.random.default_rng(0)
    out = np.empty(SHAPE, np.float32)
    for name, kind in peer_types().items():
        codec = polyquant.codec(name)
        spec = codec.specs(SHAPE)["blocks"]
        parts = {"blocks": rng.integers(0, 256, spec.shape, np.uint8)}
        runs = [
            lambda c=codec, p=parts: c.dequantize(p, SHAPE, out=out),
            lambda c=codec, p=parts: c.dequantize(p, SHAPE),
            lambda: out.fill(1),
        ]
        if kind is not None:
            from gguf.quants import dequantize

            runs.append(lambda p=parts, k=kind: dequantize(p["blocks"], k))
        with np.errstate(all="ignore"):  # random bytes contain infinite scales, about which the peer warns
            if kind is not None and not np.array_equal(runs[0](), runs[3](), equal_nan=True):
                raise SystemExit(f"{name}: results differ from gguf-py's; times would be meaningless")
            ours, fresh, fill, *peer = in_turn(*runs, repeats=7, clock=time.thread_time)
        moved = spec.nbytes + 4 * SHAPE[0] * SHAPE[1]
        extra = {"fresh": 1e3 * fresh, "GB/s": moved / ours / 1e9, "of fill": fill / ours}
        yield Row(name, "ms", 1e3 * ours, 1e3 * peer[0] if peer else None, BAR, extra=extra)


SECTION = Section(
    f"dequantize {SHAPE[0]} x {SHAPE[1]} to float32, one thread, against gguf-py (ours into a given array, `fresh`: "
    f"into a new one)",
    rows,
    peers=("gguf",),
)
