"""Check the installation: which engine runs, its speed, and its agreement with the reference."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

import polyquant
from polyquant.ops import native
from polyquant.ops.matmul import Group, packed, round_activations
from polyquant.ops.native import cores
from polyquant.registry import codec
from polyquant.tables import Listing

__all__ = ["Check", "Checks", "doctor"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the diagnosis. good: False if something needs attention, explained by `advice`."""

    name: str
    value: str
    good: bool = True
    advice: str = ""


class Checks(Listing[Check]):
    """The result of `doctor`."""

    title = "checks"
    columns = ("check", "result", "good", "advice")

    def row(self, entry: Check) -> Sequence[object]:
        """The cells of one check."""
        return entry.name, entry.value, "yes" if entry.good else "no", entry.advice


def doctor() -> Checks:
    """Check versions and engine, compare native kernels with numpy on random blocks, and measure the speed of one
    codec.
    """
    checks = [
        Check("polyquant", f"{polyquant.__version__}, Python {platform.python_version()}, {platform.machine()}"),
        Check("cores", str(cores())),
    ]
    checks += [Check(name, importlib.metadata.version(name)) for name in ("numpy", "ml_dtypes", "safetensors")]
    if native.lib() is None:
        why = (
            "disabled by POLYQUANT_NATIVE=0 or POLYQUANT_ISA=numpy"
            if native.available()
            else "not built: install a C++ compiler, then reinstall polyquant"
        )
        return Checks([*checks, _extra(), Check("engine", "numpy (correct but slow)", False, why), _speed()])
    engine = Check("engine", f"native, {native.instruction_set()}, {native.threads()} threads")
    return Checks([*checks, _extra(), engine, *_agreement(), _speed(), *_products()])


def _agreement() -> list[Check]:
    """Compare native kernels with numpy, bit for bit, on blocks of several codecs."""
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


def _extra() -> Check:
    """Check the optional packages that text needs; token ids work without them."""
    missing = [name for name in ("tokenizers", "jinja2") if importlib.util.find_spec(name) is None]
    if not missing:
        return Check("text", "tokenizers and jinja2 found: run, eval and serve can process text")
    return Check(
        "text",
        f"{' and '.join(missing)} missing: run, eval and serve cannot process text",
        advice="pip install 'polyquant[run]'",
    )


def _products() -> list[Check]:
    """Compare packed multiplication with the reference, and time one token through a matrix of 16 million weights."""
    rng = np.random.default_rng(2)
    w, x = rng.standard_normal((4096, 4096)).astype(np.float32), rng.standard_normal((1, 4096)).astype(np.float32)
    q4 = codec("q4_k")
    parts = q4.pack(q4.quantize(w[:256]))
    blocks = np.ascontiguousarray(np.tile(parts["blocks"], (16, 1)))
    group = Group([packed("q4_k", blocks, *w.shape)], [len(w)])
    expected = round_activations(x, "block") @ q4.dequantize(parts, w[:256].shape).T
    result = group(x, "block")[0][:, :256]
    if not np.allclose(result, expected, rtol=0, atol=1e-4 * np.abs(expected).max()):
        return [
            Check("products", "packed kernels differ from numpy", False, "run with POLYQUANT_NATIVE=0 and report this")
        ]
    best = min(_timed(lambda: group(x, "block")) for _ in range(9))
    rate = f"{w.size / best / 1e9:.0f} billion weights/s, {blocks.nbytes / best / 1e9:.0f} GB/s packed"
    return [Check("products", f"Q4_K times int8 activations: {rate}")]


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
