"""Transcode I2_S from the x86 to the ARM layout on one thread, in payload bytes per second."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

import polyquant
from measure import Row, Section, in_turn
from polyquant.codecs.transcode import transcode
from polyquant.ops import native

SHAPE = (6912, 2560)
BAR_GB = 1.0


def rows() -> Iterator[Row]:
    """Compare with the bar of 1 GB/s; `numpy`: the numpy reference; `copy`: the speed of copying the payload."""
    codes = np.random.default_rng(0).integers(-1, 2, SHAPE).astype(np.float32)
    names = ("i2_s.x86", "i2_s.arm", "tq2_0", "tl1")
    codecs = {n: polyquant.codec(n) for n in names[:3]}
    payload = SHAPE[0] * SHAPE[1] / 4
    for a, b in (("i2_s.x86", "i2_s.arm"), ("i2_s.arm", "i2_s.x86"), ("i2_s.x86", "tq2_0")):
        source, target = codecs[a], codecs[b]
        parts = source.pack(source.quantize(codes))
        run = lambda s=source, t=target, p=parts: transcode(p, SHAPE, s, t)  # noqa: E731
        spare = np.empty_like(parts["blocks"])
        ours, copy = in_turn(run, lambda p=parts, d=spare: np.copyto(d, p["blocks"]), clock=time.thread_time)
        with native.engine("numpy"):
            (slow,) = in_turn(run, repeats=1, clock=time.thread_time)
        bar = BAR_GB if b == "i2_s.arm" else None
        extra = {"numpy GB/s": payload / slow / 1e9, "copy GB/s": payload / copy / 1e9}
        yield Row(f"{a} > {b}", "GB/s", payload / ours / 1e9, BAR_GB if bar else None, bar, more=True, extra=extra)


SECTION = Section(f"transcode ternaries, {SHAPE[0]} x {SHAPE[1]}, one thread, against 1 GB/s", rows)
