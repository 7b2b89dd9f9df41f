"""Trellis: distortion, encoding, multiplication, decoding, gain of LDLQ.

Without a peer, the target figure is shown instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

import numpy as np

import polyquant
from measure import Row, Section, in_turn
from polyquant.codecs.arguments import output
from polyquant.codecs.trellis import Trellis
from polyquant.ops import native, trellis
from polyquant.ops.matmul import Group
from polyquant.quantizers.trellis_search import Coder, with_feedback

SIDE = 4096
AVX512 = "512" in native.instruction_set()
DISTORTION = {(2, 12): 0.0726, (2, 14): 0.0705, (2, 16): 0.0685, (3, 12): 0.0189, (3, 14): 0.0181, (3, 16): 0.0175,
              (4, 12): 0.0052, (4, 14): 0.0048, (4, 16): 0.0045}  # fmt: skip
ENCODE = {
    12: 5.0 if AVX512 else 1.9,
    14: 1.5 if AVX512 else 0.5,
    16: 0.35 if AVX512 else 0.14,
}  # million weights per second; of 4 bits half of that
MULTIPLY = 20.0 if AVX512 else 14.0  # billion weights per second


def _random(codec: Trellis, seed: int) -> dict[str, np.ndarray]:
    """Return random parts; any bytes are valid codes."""
    rng, specs = np.random.default_rng(seed), codec.specs((SIDE, SIDE))
    floats = {k: np.ones(s.shape, np.float32) for k, s in specs.items() if k != "indices"}
    return {"indices": rng.integers(0, 256, specs["indices"].shape, np.uint8), **floats}


def _distortion() -> Iterator[Row]:
    w = np.random.default_rng(0).standard_normal((256, SIDE)).astype(np.float32)
    for (bits, window), bar in DISTORTION.items():
        codec = polyquant.codec(f"trellis.{bits}", window_bits=window, hadamard=False, groups=1)
        error = codec.dequantize(codec.pack(codec.quantize(w)), w.shape) - w
        yield Row(f"MSE of unit Gaussians, {bits} bit, L = {window}", "MSE", float((error**2).mean()), bar, 1.0)


def _encode() -> Iterator[Row]:
    rng = np.random.default_rng(0)
    for window, count in ((12, 8192), (14, 2048), (16, 384)):
        tiles = rng.standard_normal((count, trellis.TILE)).astype(np.float32)
        book = trellis.codebook("mul1", window)
        for bits in (2, 3, 4):
            speeds = []
            for threads in (1, 2):
                native.set_threads(threads)
                (seconds,) = in_turn(partial(trellis.encode, tiles, bits, window, book), repeats=2)
                speeds.append(tiles.size / seconds / 1e6)
            name, goal = f"encode, {bits} bit, L = {window}", ENCODE[window] / (2 if bits == 4 else 1)
            yield Row(f"{name}, one thread", "M weights/s", speeds[0], goal, 1.0, more=True)
            yield Row(f"{name}, two threads over one", "times", speeds[1] / speeds[0], 1.8, 1.0, more=True)


def _one(codec_name: str, count: int) -> Callable[[], None]:
    """Return a function that multiplies one token with `count` matrices, more than fit in cache."""
    codec = polyquant.codec(codec_name)
    if isinstance(codec, Trellis):
        parts = [_random(codec, i) for i in range(count)]
    else:
        w = np.random.default_rng(0).standard_normal((SIDE, SIDE)).astype(np.float32)
        whole = codec.pack(codec.quantize(w))
        parts = [{k: v.copy() for k, v in whole.items()} for _ in range(count)]
    groups = [Group([codec.packed(p, (SIDE, SIDE))], [SIDE]) for p in parts]
    x = np.random.default_rng(1).standard_normal((1, SIDE)).astype(np.float32)

    def run() -> None:
        for group in groups:
            group(x, "block")

    return run


def _multiply() -> Iterator[Row]:
    native.set_threads(1)
    count = 12
    names = [f"trellis.{k}" for k in range(2, 9)] + [
        "trellis.3.grid",
        "trellis.3.mul1.16.exl3",
        "trellis.3.mcg.16.exl3",
    ]
    runs = [_one(name, count) for name in names] + [_one("q4_k", count)]
    *ours, q4_k = (count * SIDE * SIDE / s / 1e9 for s in in_turn(*runs, repeats=5, clock=time.thread_time))
    for name, speed in zip(names, ours, strict=True):
        goal = MULTIPLY if name in ("trellis.2", "trellis.3", "trellis.4") else MULTIPLY / 2
        bar = 1.0 if name.count(".") == 1 else None
        yield Row(f"{name} x 1 token, from memory, one thread", "G weights/s", speed, goal, bar, more=True)
    yield Row("trellis.3 x 1 token, peer q4_k", "G weights/s", ours[1], q4_k, 1.0, more=True)


def _prefill() -> Iterator[Row]:
    yield from _prefill_of("trellis.3", (1, 2))
    for name in ("trellis.3.mul1.16.exl3", "trellis.3.mcg.16.exl3"):
        yield from _prefill_of(name, (1,))


def _prefill_of(codec_name: str, threads_of: tuple[int, ...]) -> Iterator[Row]:
    codec = polyquant.codec(codec_name)
    assert isinstance(codec, Trellis)
    parts = _random(codec, 0)
    handle = codec.packed(parts, (SIDE, SIDE))
    group, w = Group([handle], [SIDE]), codec.dequantize(parts, (SIDE, SIDE))
    out = np.empty((SIDE, SIDE), np.float32)

    def decoded_first(x: np.ndarray) -> None:
        handle.dequantize(out)
        x @ out.T

    for tokens in (1, 4, 64, 256):
        x = np.random.default_rng(1).standard_normal((tokens, SIDE)).astype(np.float32)
        for threads in threads_of:
            native.set_threads(threads)
            runs: list[Callable[[], object]] = [partial(group, x, "block")]
            if tokens < 64:
                runs.append(partial(decoded_first, x))
                peer = "decoding, then numpy"
            elif find_spec("torch"):
                import torch

                torch.set_num_threads(threads)
                a, b = torch.from_numpy(x), torch.from_numpy(w)
                runs.append(partial(torch.matmul, a, b.T))
                peer = "torch float32"
            else:
                peer = "torch, missing"
            seconds = in_turn(*runs, repeats=5)
            speeds = [tokens * SIDE * SIDE / s / 1e9 for s in seconds]
            name = f"{codec_name} x {tokens} tokens, {threads} threads, peer {peer}"
            yield Row(name, "G mul-adds/s", speeds[0], speeds[1] if len(speeds) > 1 else None, 1.0, more=True)


def _decode() -> Iterator[Row]:
    native.set_threads(1)
    out = output(None, (SIDE, SIDE))
    for name in ("trellis.2", "trellis.3", "trellis.4", "trellis.8", "trellis.3.mul1.16.exl3", "trellis.3.mcg.16.exl3"):
        codec = polyquant.codec(name)
        parts = _random(codec, 0)
        (seconds,) = in_turn(partial(codec.dequantize, parts, out.shape, out=out), repeats=5, clock=time.thread_time)
        yield Row(
            f"{name} to float32, one thread",
            "G weights/s",
            SIDE * SIDE / seconds / 1e9,
            1.0,
            None if "exl3" in name else 1.0,
            more=True,
        )


def _gain() -> Iterator[Row]:
    """Compare the error of LDLQ with plain rounding for eigenvalues exp(-s i / K) in a random basis.

    The peer is the theoretical limit for many bits.
    """
    for steepness in (3.0, 4.6):
        yield from _gain_of(steepness)


def _gain_of(steepness: float) -> Iterator[Row]:
    k, n = 512, 256
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((k, k)))[0]
    values = np.exp(-steepness * np.arange(k) / k)
    h = (basis * values @ basis.T).astype(np.float32)
    w = rng.standard_normal((k, n)).astype(np.float32)
    for bits in (2, 3, 4):
        coder = Coder(bits, 12, "row_major", trellis.codebook("mul1", 12))
        scales = coder.scale(w)[None]
        plain = coder(w / scales)[1] * scales - w
        _, numbers, used = with_feedback(w, h, scales, coder)
        fed = numbers * used - w
        cost = [float(np.einsum("kn,kj,jn->", e, h, e, optimize=True)) for e in (fed, plain)]
        theory = float(np.exp(np.log(values).mean()) / values.mean())
        yield Row(
            f"LDLQ over plain rounding, eigenvalues exp(-{steepness} i / K), {bits} bit; peer theory",
            "ratio",
            cost[0] / cost[1],
            theory,
            0.9,
        )


def _rows() -> Iterator[Row]:
    before = native.threads()
    try:
        for part in (_distortion, _encode, _multiply, _prefill, _decode, _gain):
            yield from part()
    finally:
        native.set_threads(before)


SECTION = Section("Trellis", _rows, peers=("torch",))
