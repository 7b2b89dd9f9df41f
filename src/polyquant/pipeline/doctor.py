"""Is this installation sound? Which engine runs, how fast, and does it agree with the reference."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import polyquant
from polyquant.ops import native
from polyquant.pipeline.execute import cores
from polyquant.registry import codec

__all__ = ["Check", "doctor"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the diagnosis: good is False where something needs attention, then `advice` says what."""

    name: str
    value: str
    good: bool = True
    advice: str = ""


def doctor() -> list[Check]:
    """Versions, engine, a comparison of native kernels with numpy on random blocks, and the speed of one codec."""
    checks = [
        Check("polyquant", f"{polyquant.__version__}, Python {platform.python_version()}, {platform.machine()}"),
        Check("cores", str(cores())),
    ]
    checks += [Check(name, importlib.metadata.version(name)) for name in ("numpy", "ml_dtypes", "safetensors")]
    if native.lib() is None:
        why = (
            "switched off by POLYQUANT_NATIVE=0"
            if native.available()
            else "not built: install a C++ compiler, then reinstall polyquant"
        )
        return [*checks, Check("engine", "numpy: correct, and slow", False, why), _speed()]
    return [*checks, Check("engine", f"native, {native.instruction_set()}"), *_agreement(), _speed()]


def _agreement() -> list[Check]:
    """Native against numpy, bit for bit, on real blocks of every codec that quantizes."""
    w = np.random.default_rng(1).standard_normal((2, 512)).astype(np.float32)
    wrong = []
    names = ("q8_0", "q4_0", "q4_k", "q6_k", "iq4_xs", "tq2_0", "bf16")
    for name in names:
        c = codec(name)
        parts = c.pack(c.quantize(w))
        fast = c.dequantize(parts, w.shape)
        with native.engine("numpy"):
            slow = c.dequantize(parts, w.shape)
        if not np.array_equal(fast, slow):
            wrong.append(name)
    if wrong:
        return [
            Check(
                "kernels",
                f"native and numpy differ for {', '.join(wrong)}",
                False,
                "run with POLYQUANT_NATIVE=0 and report this",
            )
        ]
    return [Check("kernels", f"native equals numpy ({', '.join(names)})")]


def _speed() -> Check:
    q4 = codec("q4_0")
    w = np.random.default_rng(0).standard_normal((256, 4096)).astype(np.float32)
    parts, out = q4.pack(q4.quantize(w)), np.empty_like(w)
    best = min(_timed(lambda: q4.dequantize(parts, w.shape, out=out)) for _ in range(5))
    return Check("speed", f"Q4_0 to float32: {w.size / best / 1e6:,.0f} million weights/s on one core")


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
