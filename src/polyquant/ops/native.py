"""The only importer of the extension module. Callers get it from here, or fall back to their numpy reference.

`POLYQUANT_NATIVE=0` in the environment, or `with engine("numpy"):`, disables the native kernels: codes and integer
products are equal, floating-point products up to rounding, but slower. `POLYQUANT_ISA` forces the instruction set of
the products of packed weights, for tests and benchmarks: amx, avx512, avxvnni or avx2; i8mm, dotprod or neon; plain;
or numpy, which is POLYQUANT_NATIVE=0.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Literal

import numpy as np

from polyquant.errors import InputError
from polyquant.types import F32, I8, U8

_native: ModuleType | None
try:
    from polyquant import _native
except ImportError:  # the pure package, reported by `doctor`
    _native = None

_ISAS = {
    "amx": "AVX-512 VNNI with AMX",
    "avx512": "AVX-512 VNNI",
    "avxvnni": "AVX-VNNI",
    "avx2": "AVX2",
    "i8mm": "NEON with i8mm",
    "dotprod": "NEON with dot products",
    "neon": "NEON",
    "plain": "plain",
    "numpy": "numpy",
}


def _forced(name: str | None) -> str | None:
    """Select the kernels of an instruction set. Returns its name, None if the best one is to be used.

    Raises InputError for an unknown one, and if this processor or build lacks it.
    """
    if not name:
        return None
    if name not in _ISAS:
        raise InputError("POLYQUANT_ISA names no instruction set", expected=", ".join(_ISAS), found=name)
    if name != "numpy" and (_native is None or not _native.use_kernels(name)):
        found = "numpy" if _native is None else str(_native.kernel_set())
        raise InputError(f"POLYQUANT_ISA={name} is not possible here", expected=_ISAS[name], found=found)
    return name


_isa = _forced(os.environ.get("POLYQUANT_ISA"))
_enabled = os.environ.get("POLYQUANT_NATIVE", "1") != "0" and _isa != "numpy"

__all__ = [
    "available",
    "cores",
    "dequantize_blocks",
    "empty",
    "engine",
    "instruction_set",
    "kernel_seconds",
    "lib",
    "module",
    "pack_ternary",
    "quantize_blocks",
    "set_threads",
    "ternarize",
    "threads",
    "unpack_ternary",
    "wanted",
]


def available() -> bool:
    """True if native kernels are built."""
    return _native is not None


def wanted() -> bool:
    """True unless numpy is selected, by POLYQUANT_NATIVE=0 or `engine("numpy")`."""
    return _enabled


def module() -> ModuleType:
    """Return the extension module, whichever engine is selected. Requires `available()`."""
    assert _native is not None, "ask available() first"
    return _native


def lib() -> ModuleType | None:
    """Return the extension module, or None if the numpy references are selected."""
    return _native if _enabled else None


@contextmanager
def engine(which: Literal["native", "numpy"]) -> Iterator[None]:
    """Select native kernels or numpy references within the block (tests, `doctor`, comparisons). Not thread-safe."""
    global _enabled  # noqa: PLW0603 - a process-wide switch, like the environment variable
    before, _enabled = _enabled, which == "native"
    try:
        yield
    finally:
        _enabled = before


def empty(*shape: int) -> F32:
    """Return an uninitialized float32 array; while a tape records, in memory that it owns: activations of a recordable
    layer."""
    lent = None if _native is None else _native.lent(shape)
    return np.empty(shape, np.float32) if lent is None else lent


def instruction_set() -> str:
    """Return "numpy", or the instruction set of the native kernels."""
    module = lib()
    if module is None:
        return "numpy"
    return str(module.instruction_set() if _isa is None else module.kernel_set())


def threads() -> int:
    """Return the number of threads of a multiplication; 1 without native kernels."""
    return int(_native.get_threads()) if _native is not None else 1


def set_threads(count: int) -> None:
    """Set the threads of the native kernels, 1 to 256; 0 for all available processors.

    No effect on the numpy engine.
    """
    if _native is not None:
        _native.set_threads(count)


def kernel_seconds() -> float:
    """Return the seconds that this process has spent in decoder kernels; the rest of a token's time is spent in
    Python."""
    return _native.kernel_nanoseconds() / 1e9 if _native is not None else 0.0


def dequantize_blocks(codec: str, blocks: U8, out: F32) -> bool:
    """Decode whole blocks [n * bytes] into out [n * weights], both C-contiguous. False if there is no native kernel."""
    module = lib()
    return module is not None and bool(module.dequantize(codec, blocks.reshape(-1), out.reshape(-1)))


def quantize_blocks(codec: str, w: F32, out: U8, importance: F32 | None) -> bool:
    """Quantize w [rows, K] into out [rows, bytes_per_row] (both C-contiguous). False if there is no native kernel."""
    module = lib()
    if module is None:
        return False
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    return bool(module.quantize(codec, w, out, weights))


def requantize_blocks(
    source: str, target: str, data: U8, out: U8, importance: F32 | None, *, measure: bool
) -> tuple[float, float, float, float, float] | None:
    """Encode rows stored as codec `source` into out [rows, bytes_per_row], a few at a time in the processor's cache.

    data: the bytes of the rows. Returns the sums of ops.metrics.ErrorSums, zeros without `measure`; None without native
    kernels for both codecs, and if a weight is NaN or infinite.
    """
    found = lib()
    if found is None:
        return None
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    sums: tuple[float, float, float, float, float] | None = found.requantize(
        source, target, data, out, weights, measure
    )
    return sums


def pack_ternary(codec: str, codes: I8, scale: F32, out: U8) -> bool:
    """Pack the codes of whole blocks, with one scale each, into out.

    All C-contiguous. False if there is no native kernel.
    """
    module = lib()
    return module is not None and bool(
        module.pack_ternary(codec, codes.reshape(-1), scale.reshape(-1), out.reshape(-1))
    )


def unpack_ternary(codec: str, blocks: U8, codes: I8, scale: F32) -> bool:
    """Unpack whole blocks into codes and scales. All C-contiguous. False if there is no native kernel."""
    module = lib()
    return module is not None and bool(
        module.unpack_ternary(codec, blocks.reshape(-1), codes.reshape(-1), scale.reshape(-1))
    )


def ternarize(w: F32, codes: I8, scale: F32) -> bool:
    """Ternarize blocks of 256 floats into codes and scales, all C-contiguous. False if there is no native kernel."""
    module = lib()
    if module is None:
        return False
    module.ternarize(w.reshape(-1), codes.reshape(-1), scale.reshape(-1))
    return True


def cores() -> int:
    """Cores that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # Linux only; elsewhere all cores
    return len(allowed(0)) if allowed else os.cpu_count() or 1
