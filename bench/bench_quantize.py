"""Quantize float32 on one thread: error and speed against ggml's quantizers (from llama-cpp-python, if installed)."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import polyquant
from measure import Row, Section, in_turn

SHAPE = (64, 4096)
# Relative RMSE of llama.cpp's quantizers on Gaussian weights of this shape; the bars if it is not installed.
GGML = {
    "q4_0": 0.0857,
    "q8_0": 0.00533,
    "q2_k": 0.2961,
    "q3_k": 0.1507,
    "q4_k": 0.0713,
    "q5_k": 0.0361,
    "q6_k": 0.0177,
    "iq4_nl": 0.0759,
    "iq4_xs": 0.0765,
}


def ggml_quantize() -> Callable[[int, np.ndarray, np.ndarray], None] | None:
    """Return ggml_quantize_chunk of the installed llama-cpp-python, or None."""
    spec = find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return None
    found = sorted((Path(spec.origin).parent / "lib").glob("libggml-base.so*"))
    if not found:
        return None
    chunk = ctypes.CDLL(str(found[0])).ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]

    def run(type_id: int, w: np.ndarray, out: np.ndarray) -> None:
        chunk(type_id, w.ctypes.data, out.ctypes.data, 0, w.shape[0], w.shape[1], None)

    return run


def rows() -> Iterator[Row]:
    """Yield an error row (relative RMSE, bar: at most ggml's) and a speed row (million weights/s) for each type."""
    w = np.random.default_rng(7).standard_normal(SHAPE).astype(np.float32)
    peer = ggml_quantize()

    def rmse(x: np.ndarray) -> float:
        return float(np.sqrt(((w - x) ** 2).sum() / (w**2).sum()))

    for name, published in GGML.items():
        codec = polyquant.codec(name)
        parts = codec.pack(codec.quantize(w))
        theirs, speed = published, None
        runs = [lambda c=codec: c.quantize(w)]
        if peer is not None:
            blocks = np.zeros_like(parts["blocks"])
            runs.append(lambda c=codec, b=blocks: peer(c.type_id, w, b))
            runs[1]()
            theirs = rmse(codec.dequantize({"blocks": blocks}, SHAPE))
        ours, *other = in_turn(*runs, repeats=7, clock=time.thread_time)
        speed = w.size / other[0] / 1e6 if other else None
        yield Row(f"{name}, error", "rel. RMSE", rmse(codec.dequantize(parts, SHAPE)), theirs, 0.9999)
        yield Row(f"{name}, speed", "M/s", w.size / ours / 1e6, speed, more=True)


SECTION = Section(
    f"quantize {SHAPE[0]} x {SHAPE[1]} Gaussian weights, one thread, against ggml", rows, peers=("llama-cpp-python",)
)
