"""Every function and class of the extension module: valid calls, and invalid replacements for each argument.

Arrays end at a protected page: a kernel that reads or writes one byte too far crashes, and the test detects it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from polyquant import _native as lib  # type: ignore[attr-defined]

PAGE = mmap.PAGESIZE
PROTECT = ctypes.CDLL(None).mprotect
PROTECT.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(a: Any, slack: int = 0) -> np.ndarray:
    """Copy an array so that its last byte is `slack` bytes before a protected page."""
    a = np.ascontiguousarray(a)
    if a.size == 0:
        return np.empty(a.shape, a.dtype)
    room = -(-(a.nbytes + slack) // PAGE) * PAGE
    memory = mmap.mmap(-1, room + PAGE)
    whole = np.frombuffer(memory, np.uint8)
    assert PROTECT(whole.ctypes.data + room, PAGE, 0) == 0
    at = room - slack - a.nbytes
    out = whole[at : at + a.nbytes].view(a.dtype).reshape(a.shape)
    out[...] = a
    return out


def u8(*shape: int, most: int = 255) -> np.ndarray:
    return guarded(np.random.default_rng(5).integers(0, most + 1, shape).astype(np.uint8))


def i8(*shape: int, low: int = -1, high: int = 1) -> np.ndarray:
    return guarded(np.random.default_rng(5).integers(low, high + 1, shape).astype(np.int8))


def f32(*shape: int) -> np.ndarray:
    return guarded(np.random.default_rng(5).standard_normal(shape).astype(np.float32))


def i16(*shape: int) -> np.ndarray:
    return guarded(np.random.default_rng(5).integers(-32768, 32768, shape).astype(np.int16))


def whole(dtype: Any, *shape: int) -> np.ndarray:
    return guarded(np.ones(shape, dtype))


class Maybe:
    """An argument that may be None."""

    def __init__(self, value: Any) -> None:
        self.value = value


# ---------------------------------------------------------------- valid calls


def packed(rows: int = 8, cols: int = 256) -> Any:
    return lib.packed("q4_0", u8(rows * cols // 32 * 18), rows, cols)


def lanes() -> Any:
    """Four rows to a line, a quarter of the matrix apart."""
    return lib.packed("hf_bitnet", u8(8 * 256 // 4), 8, 256, 1.0, 2)


def grouped(
    kind: str, number: str, size: int, *, group: int = 32, tall: int = 1, zero: Any = None, bias: Any = None
) -> tuple[Any, ...]:
    """Arguments of a matrix [8, 64] with tables."""
    pitch = 8 * {"e2m1": 4, "e4m3": 8}.get(kind, int(kind) if kind.isdecimal() else 8)
    cells = -(-8 // tall) * -(-64 // group)
    return (
        u8(8 * pitch), kind, 8, 64, pitch, u8(cells * size, most=119), number, group, tall, zero or Maybe(None),
        bias or Maybe(None), 2.0, 1.0,
    )  # fmt: skip


def grouped_handles() -> list[Any]:
    """Kernels that read ahead, at the end of their arrays."""
    kinds = ("2", "3", "4", "5", "6", "8")
    more = [grouped(k, "f16", 2, group=16) for k in kinds] + [grouped("e2m1", "e8m0", 1), grouped("e4m3", "f32", 4)]
    return [lib.grouped(*plain(a)) for a in [grouped(k, "bf16", 2, zero=Maybe(u8(16))) for k in kinds] + more]


def ids(*chosen: int) -> np.ndarray:
    return guarded(np.array(chosen, np.int32))


def ids2(*shape: int) -> np.ndarray:
    return whole(np.int32, *shape)


def affine(how: str = "floats", groups: int = 2) -> Any:
    return lib.affine(
        i8(6, 64, low=-128, high=127), f32(6, groups), f32(6, groups), how, 0.1, 3.0, f32(6), whole(np.int32, 6)
    )


def trellis_arguments(bits: int = 3, window: int = 8) -> tuple[Any, ...]:
    j = np.arange(256)
    order = (j % 32 // 2 * 16 + j // 32 * 2 + j % 2).astype(np.uint8)
    return (
        u8(2 * 3 * 32 * bits), 32, 48, bits, window, "lut", i16((1 << window) + 1), f32(1 << window), 0.5, 0.25,
        Maybe(guarded(order) if np.random.default_rng(5).integers(2) else None), (32, 16), f32(1, 48), f32(32), f32(48),
        False,
    )  # fmt: skip


def trellis() -> Any:
    return lib.trellis(*plain(trellis_arguments()))


def strings() -> np.ndarray:
    return guarded(np.frombuffer(b"".join(len(t).to_bytes(8, "little") + t for t in (b"ab", b"", b"xyz")), np.uint8))


def cache(dtype: Any) -> tuple[Any, ...]:
    """2 heads read each of 3 groups of 8 numbers; room for 64 positions."""
    small = dtype is np.int8
    return (
        f32(2, 6, 8), f32(2, 3, 8), f32(2, 3, 8), whole(dtype, 3, 2, 8, 32), whole(dtype, 3, 2, 32, 8), f32(2, 6, 8),
        31, 0.3, 0,
        Maybe(f32(3, 2, 4, 8) if small else None), Maybe(f32(3, 2, 256) if small else None),
        Maybe(f32(3, 4, 8) if small else None),
        2.5, Maybe(f32(6)), Maybe(f32(6)), 32,
    )  # fmt: skip


LANES = (16, True, False)
TL1, TL2 = (64, 128, 0, 32, 64, 32), (64, 128, 96, 32, 96, 32)

SOUND: dict[str, list[Callable[[], tuple[Any, ...]]]] = {
    "Affine.__init__": [],
    "AffineGroup.__init__": [lambda: ([affine(), affine("token")],), lambda: ([affine("mixed", 1)],)],
    "AffineGroup.multiply": [
        lambda: (lib.AffineGroup([affine(), affine("token", 1)]), f32(3, 64), 1, f32(3, 12)),
        lambda: (lib.AffineGroup([affine("fixed", 1)]), f32(9, 64), 1, f32(9, 6)),
        lambda: (lib.AffineGroup([affine("floats", 64)]), f32(9, 64), 0, f32(9, 6)),
    ],
    "Packed.__init__": [],
    "PackedExperts.__init__": [
        lambda: ([packed()], 4),
        lambda: ([packed(16), [packed(), packed(), packed(), packed()]], 4),
        lambda: ([lib.packed("hf_bitnet", u8(16 * 64), 16, 256, 1.0, 1), [lanes(), lanes()]], 2),
    ],
    "PackedExperts.multiply": [
        lambda: (lib.PackedExperts([packed(), packed(16)], 4), f32(2, 256), ids(0, 3, 3, 1), 1, f32(4, 6)),
        lambda: (lib.PackedExperts([packed(9)], 3), f32(14, 256), ids(*range(3), *[2] * 11), 1, f32(14, 3)),
        lambda: (lib.PackedExperts([[lanes(), lanes()]], 2), f32(5, 256), ids(1, 1, 0, 1, 1), 3, f32(5, 8)),
        lambda: (
            lib.PackedExperts([lib.packed("f32", u8(6 * 40 * 4), 6, 40)], 2),
            f32(3, 40),
            ids(1, 1, 0),
            0,
            f32(3, 3),
        ),
        lambda: (lib.PackedExperts([packed(), packed(16)], 4), f32(9, 256), Maybe(None), 1, f32(9, 6)),
    ],
    "PackedGroup.__init__": [lambda: ([packed(), packed(16)],)],
    "PackedGroup.multiply": [
        lambda: (lib.PackedGroup([packed(), packed(16)]), f32(3, 256), 1, f32(3, 24)),
        lambda: (lib.PackedGroup([packed(7, 32)]), f32(9, 32), 3, f32(9, 7)),
        lambda: (lib.PackedGroup(grouped_handles()), f32(1, 64), 1, f32(1, 8 * 14)),
        lambda: (lib.PackedGroup(grouped_handles()), f32(9, 64), 1, f32(9, 8 * 14)),
        lambda: (lib.PackedGroup(grouped_handles()), f32(5, 64), 0, f32(5, 8 * 14)),
    ],
    "Tape.__enter__": [lambda: (lib.Tape(),)],
    "Tape.__exit__": [lambda: (lib.Tape(), 1, 2, 3)],
    "Tape.__init__": [lambda: ()],
    "Tape.complete": [],
    "Tape.nbytes": [],
    "Tape.room": [],
    "Tape.run": [lambda: (lib.Tape(), 3)],
    "Trellis.__init__": [],
    "Trellis.dequantize": [lambda: (trellis(), f32(48, 32))],
    "TrellisGroup.__init__": [lambda: ([trellis()],)],
    "TrellisGroup.multiply": [
        lambda: (lib.TrellisGroup([trellis(), trellis()]), f32(3, 32), 3, f32(3, 96)),
        lambda: (lib.TrellisGroup([trellis()]), f32(1, 32), 3, f32(1, 48)),
        lambda: (lib.TrellisGroup([trellis()]), f32(2, 32), 0, f32(2, 48)),
    ],
    "add": [lambda: (f32(3, 5), f32(3, 5), f32(3, 5), 0.5)],
    "add_bias": [lambda: (f32(3, 5), f32(5))],
    "add_expert_bias": [lambda: (f32(3, 5), f32(4, 5), ids(3, 0, 3))],
    "add_gated": [lambda: (f32(3, 5), f32(3, 5), f32(3, 1), f32(3, 5))],
    "affine": [
        lambda: (i8(6, 64), f32(6, 2), Maybe(f32(6, 2)), "floats", 0.1, 3.0, Maybe(f32(6)), Maybe(whole(np.int32, 6)))
    ],
    "grouped_quantize": [
        lambda: (
            "q8_0",
            u8(6 * 2 * 34),
            whole(np.float32, 64),
            i8(6, 64),
            f32(6, 2),
            f32(6, 2),
            Maybe(f32(6, 2)),
            4,
            "integer",
            "f16",
            [1.0, 0.9],
            True,
        ),
    ],
    "grouped_search": [
        lambda: (
            f32(6, 64),
            whole(np.float32, 64),
            i8(6, 64),
            f32(6, 2),
            f32(6, 2),
            Maybe(f32(6, 2)),
            4,
            "none",
            "f16",
            [1.0, 0.9],
        ),
        lambda: (
            f32(40, 64),
            whole(np.float32, 64),
            i8(40, 64),
            f32(40, 2),
            f32(40, 2),
            f32(40, 2),
            3,
            "bias",
            "bf16",
            [1.0],
        ),
    ],
    "crc32": [lambda: (u8(100), 7)],
    "narrow": [lambda: (f32(9), whole(np.uint16, 9), False), lambda: (f32(9), whole(np.uint16, 9), True)],
    "widen": [lambda: (whole(np.uint16, 9), f32(9), False), lambda: (whole(np.uint16, 9), f32(9), True)],
    "pack_blocks": [
        lambda: (u8(6, 32), whole(np.uint16, 6, 1), u8(6, 18), 4, 8),
        lambda: (u8(6, 32), whole(np.uint16, 6, 2), u8(6, 24), 5, 0),
    ],
    "pack_codes": [lambda: (u8(3, 37), u8(3, 16), 3, 4), lambda: (u8(3, 37), u8(3, 19), 4, 0)],
    "pack_columns": [lambda: (u8(5, 64), whole(np.uint32, 8, 5), 4, 8)],
    "pack_interleaved": [lambda: (u8(16, 5), whole(np.uint32, 5, 2), 8)],
    "unpack_blocks": [
        lambda: (u8(6, 18), u8(6, 32), whole(np.uint16, 6, 1), 4, 8),
        lambda: (u8(6, 24), u8(6, 32), whole(np.uint16, 6, 2), 5, 0),
    ],
    "unpack_codes": [lambda: (u8(3, 16), u8(3, 37), 3, 4), lambda: (u8(3, 19), u8(3, 37), 4, 0)],
    "unpack_columns": [lambda: (whole(np.uint32, 8, 5), u8(5, 64), 4, 8)],
    "unpack_interleaved": [lambda: (whole(np.uint32, 5, 2), u8(16, 5), 8)],
    "affine_decode": [lambda: (i8(6, 64), f32(6, 2), f32(6, 2), f32(6, 64), Maybe(f32(6, 2)))],
    "affine_encode": [lambda: (f32(6, 64), f32(6, 2), f32(6, 2), i8(6, 64), 4, False)],
    "affine_grid": [lambda: (f32(6, 64), f32(6, 2), f32(6, 2), 8, False)],
    "affine_quantize": [lambda: ("bf16", u8(6 * 64 * 2, most=63), i8(6, 64), f32(6, 2), f32(6, 2), 8, True, True)],
    "affine_row_sums": [lambda: (i8(6, 64), whole(np.int64, 6))],
    "awq_rows": [lambda: (whole(np.uint32, 24, 3), whole(np.uint32, 24, 3))],
    "amax_groups": [lambda: (f32(6, 40), f32(6, 3), 16)],
    "decode_small": [
        lambda: (u8(6, 64), f32(256), f32(3, 2), f32(6, 64), 2, 32, 0),
        lambda: (u8(6, 64), f32(256), f32(1, 1), f32(6, 64), 0, 0, 7),
    ],
    "encode_small": [lambda: (f32(6, 40), f32(6, 3), u8(6, 40), 16, "e4m3")],
    "errors_small": [lambda: (f32(6, 40), f32(6, 3, 2), f32(40), f32(6, 3, 2), 16, "e2m1")],
    "join_fp4": [lambda: (u8(6, 64), u8(6, 8), u8(6, 72), 16, 4)],
    "split_fp4": [lambda: (u8(6, 72), u8(6, 64), u8(6, 8), 16, 4)],
    "attend": [lambda: cache(np.float32), lambda: cache(np.float16), lambda: cache(np.int8)],
    "clamped_swiglu": [
        lambda: (f32(3, 5), f32(3, 5), f32(3, 5), 1.702, 7.0),
        lambda: (f32(3, 10)[:, ::2], f32(3, 10)[:, 1::2], f32(3, 5), 1.702, 7.0),
    ],
    "combine": [lambda: (f32(6, 5), Maybe(f32(2, 3)), f32(2, 5))],
    "copy": [lambda: (f32(3, 5), f32(3, 5)), lambda: (f32(3, 9)[:, 2:7], f32(3, 8)[:, 1:6])],
    "count_symbols": [lambda: (u8(37), whole(np.uint64, 4))],
    "dequantize": [lambda: ("q4_0", u8(4 * 18), f32(4 * 32)), lambda: ("iq2_xs", u8(2 * 74), f32(512))],
    "dequantize_lanes": [lambda: (u8(64), f32(256), 0.5, *LANES)],
    "error_sums": [lambda: (f32(700), f32(700))],
    "exact_cholesky": [lambda: (guarded(np.eye(70) * 2.0), "plain")],
    "exact_exponential": [lambda: (whole(np.float64, 37), whole(np.float64, 37), "plain")],
    "exact_float_exponential": [lambda: (f32(37), f32(37), "plain")],
    "exact_product": [
        lambda: (f32(2, 9, 21), f32(2, 21, 13), f32(2, 9, 13), False, "plain"),
        lambda: (f32(1, 9, 21), f32(1, 21, 9), f32(1, 9, 9), True, ""),
    ],
    "exact_sets": [lambda: ()],
    "exact_softmax": [
        lambda: (f32(3, 13), whole(np.int32, 3), 12 * whole(np.int32, 3), 0.5, Maybe(f32(3)), "plain"),
    ],
    "gate": [lambda: (f32(3, 5), Maybe(f32(3, 5)), f32(3, 5), 2)],
    "get_threads": [lambda: ()],
    "gguf_skip_strings": [lambda: (strings(), 0, 3, False, True, Maybe(whole(np.int64, 3)))],
    "grouped": [
        lambda: grouped("4", "f16", 2, zero=Maybe(u8(16))),
        lambda: grouped("8", "f32", 4, bias=Maybe(u8(2 * 2 * 4)), tall=5),
        lambda: grouped("e2m1", "e4m3", 1, group=16),
        lambda: grouped("e4m3", "bf16", 2, tall=8),
    ],
    "hadamard": [lambda: (f32(3, 64), 32)],
    "has_packed": [lambda: ("q4_0",)],
    "instruction_set": [lambda: ()],
    "kernel_nanoseconds": [lambda: ()],
    "layer_norm": [
        lambda: (f32(3, 2, 5), f32(5), Maybe(f32(5)), f32(3, 2, 5), 1e-5),
        lambda: (f32(3, 2, 5), f32(10), Maybe(None), f32(3, 2, 5), 1e-5),
    ],
    "lent": [lambda: ([3, 4],)],
    "on_grid": [lambda: (f32(3, 5), f32(5), f32(5), f32(3, 5))],
    "pack_lanes": [lambda: (i8(256), u8(64), *LANES)],
    "pack_ternary": [lambda: ("tq2_0", i8(512), f32(2), u8(2 * 66))],
    "pack_tl": [lambda: (i8(64 * 128), u8(64 * 32), *TL1), lambda: (i8(64 * 128), u8(64 * (20 + 8)), *TL2)],
    "packed": [lambda: ("q4_0", u8(8 * 8 * 18), 8, 256, 1.0, 0), lambda: ("i2_s.x86", u8(8 * 32), 8, 128, 1.0, 0)],
    "kernel_set": [lambda: ()],
    "requantize": [
        lambda: ("bf16", "q4_0", u8(3 * 64 * 2, most=63), u8(3, 36), Maybe(f32(64)), True),
        lambda: ("q8_0", "q4_k", u8(2 * 8 * 34, most=60), u8(2, 144), Maybe(None), False),
    ],
    "quantize": [
        lambda: ("q4_0", f32(3, 64), u8(3, 36), Maybe(f32(64))),
        lambda: ("q4_k", f32(2, 256), u8(2, 144), Maybe(f32(256))),
    ],
    "relayout_lanes": [lambda: (u8(64), u8(64), 32, 32, True, False, 8, False, False)],
    "rms_norm": [lambda: (f32(3, 2, 5), f32(5), f32(3, 2, 5), 1e-5)],
    "rotate": [lambda: (f32(3, 2, 8), f32(3, 4), f32(3, 4), f32(3, 2, 8), False)],
    "route": [
        lambda: (f32(3, 12), Maybe(f32(12)), ids2(3, 4), f32(3, 4), 1, True, 1e-20, 0.0, 2.5, 4, 2, True),
        lambda: (f32(20, 12), Maybe(None), ids2(20, 12), f32(20, 12), 2, False, 0.0, 0.0, 1.0, 1, 1, False),
    ],
    "set_threads": [lambda: (2,)],
    "spread": [lambda: (f32(2, 5), f32(2, 3), f32(6, 5))],
    "ternarize": [lambda: (f32(512), i8(512), f32(2))],
    "ternarize_tensor": [lambda: (f32(37), i8(37), False, 0.1)],
    "trellis": [trellis_arguments, lambda: trellis_arguments(2, 12)],
    "trellis_encode": [
        lambda: (f32(3, 256), 2, 8, i16(256), 9000.0, 0, u8(3, 256)),
        lambda: (f32(3, 256), 4, 8, i16(256), 9000.0, 2, u8(3, 256)),
        lambda: (f32(2, 256), 1, 1, i16(2), 9000.0, 0, u8(2, 256)),
    ],
    "trellis_pack": [lambda: (u8(64), 3, u8(24))],
    "trellis_unpack": [lambda: (u8(24), 3, u8(64))],
    "unit_errors": [lambda: (f32(700), f32(700), f32(4 * 7))],
    "stored_errors": [lambda: ("bf16", "q8_0", u8(2 * 96), u8(34 * 3))],
    "stored_unit_errors": [lambda: ("bf16", "q8_0", u8(2 * 96), u8(34 * 3), 32, f32(4 * 3))],
    "unpack_lanes": [lambda: (u8(64), i8(256), *LANES)],
    "unpack_ternary": [lambda: ("tq2_0", u8(2 * 66), i8(512), f32(2))],
    "unpack_tl": [lambda: (u8(64 * 32), i8(64 * 128), *TL1), lambda: (u8(64 * (20 + 8)), i8(64 * 128), *TL2)],
    "transpose_words": [lambda: (whole(np.uint32, 5, 33), whole(np.uint32, 33, 5))],
    "use_kernels": [lambda: ("",), lambda: ("unknown",)],
    "xielu": [lambda: (f32(3, 5), f32(3, 5), 0.8, 1.3, 0.5, -1e-6)],
}


def members() -> list[str]:
    """Every function, and every constructor, method and property of a class, of the module as it is built."""
    found = []
    for name, value in vars(lib).items():
        if isinstance(value, type):
            own = {m for m in vars(value) if not m.startswith("__")} | {"__init__"}
            found += [f"{name}.{m}" for m in sorted(own | ({"__enter__", "__exit__"} & set(vars(value))))]
        elif callable(value):
            found.append(name)
    return sorted(found)


# ---------------------------------------------------------------- invalid arguments


def plain(arguments: tuple[Any, ...]) -> list[Any]:
    return [a.value if isinstance(a, Maybe) else a for a in arguments]


def new(cls: type) -> Any:
    """An object created without its constructor, as by copy and pickle; None if the class forbids it."""
    try:
        return cls.__new__(cls)
    except TypeError:
        return None


class Odd:
    """A sequence whose length does not match its members."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> Any:
        if i > 200:
            raise IndexError
        return self


def handles() -> list[Any]:
    classes = (
        lib.Packed,
        lib.PackedExperts,
        lib.Affine,
        lib.Trellis,
        lib.PackedGroup,
        lib.AffineGroup,
        lib.TrellisGroup,
        lib.Tape,
    )
    return [packed(), affine(), trellis(), lib.Tape(), *(h for c in classes if (h := new(c)) is not None)]


ANY: list[Any] = [None, "text", b"", 3, 2.5, [], {}, object(), int, Odd(), np.float32(1)]
INTEGERS: list[Any] = [
    None, "1", 1.5, [], True, -1, 0, 1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129, 256, 1 << 16,
    -(1 << 31), (1 << 31) - 1,
    1 << 31, 1 << 32, 1 << 34, 1 << 40, 1 << 58, 1 << 59, 1 << 60, 1 << 61, 1 << 62, (1 << 63) - 1, 1 << 63,
    (1 << 64) - 32, (1 << 64) - 1, 1 << 64, 10**30,
]  # fmt: skip
TEXTS: list[Any] = [
    None, 3, b"q4_0", "", "no such", "\udcff", "\0", "q4_0\0", "x" * 100_000, "q4_0", "q8_0", "q2_k", "q3_k", "q4_k",
    "q5_k", "q6_k", "iq1_s",
    "iq2_s", "iq3_xxs", "iq3_s", "iq4_nl", "iq4_xs", "mxfp4", "nvfp4", "tq1_0", "tq2_0", "i2_s.x86", "i2_s.arm",
    "i2_s.x4", "trinity.i2_s", "f16", "bf16",
    "f32", "f64", "f8_e4m3", "floats", "token", "fixed", "mixed", "mul1", "grid", "mcg", "3inst", "lut",
]  # fmt: skip


def arrays(a: np.ndarray) -> Iterator[Any]:
    """Arrays that differ from `a` in type, shape or layout."""
    yield from ANY
    for dtype in (*"bBhHiIlLefdFDg?O", "S4", "V8", "M8[s]", [("x", "<f4")]):
        yield np.zeros(a.shape, dtype)
    yield a.astype(a.dtype.newbyteorder())
    yield guarded(a, slack=1)  # no multiple of its item's size
    yield guarded(a, slack=3)
    yield np.zeros((), a.dtype)
    for axis in range(a.ndim):
        n = a.shape[axis]
        for length in {0, 1, n - 1, n + 1, 2 * n, n // 2, 2 * n + 1}:
            shape = (*a.shape[:axis], length, *a.shape[axis + 1 :])
            yield guarded(np.ones(shape, a.dtype))
        yield np.empty((*a.shape[:axis], 0, *a.shape[axis + 1 :]), a.dtype)
        for many in (1 << 33, 1 << 58) if a.ndim > 1 else ():
            others = (0,) * a.ndim
            yield np.empty((*others[:axis], many, *others[axis + 1 :]), a.dtype)
        yield np.flip(a, axis)
        yield np.repeat(a, 2, axis)[(slice(None),) * axis + (slice(None, None, 2),)]
    yield a.reshape(-1)
    yield a[None]
    yield a.T
    yield a[..., None]
    yield np.broadcast_to(a.reshape(-1)[:1].reshape((1,) * a.ndim), a.shape)
    with np.errstate(all="ignore"):
        for value in (0, 1e38, -1e38, np.nan, np.inf, -np.inf, 1e-42, 127, -128):
            yield guarded(np.full(a.shape, value).astype(a.dtype))
    yield guarded(np.frombuffer(np.random.default_rng(5).bytes(a.nbytes), a.dtype).reshape(a.shape))


def others(value: Any) -> Iterator[Any]:
    """Yield invalid replacements for a valid argument."""
    if isinstance(value, Maybe):
        yield None
        yield from others(np.ones((2, 2), np.float32) if value.value is None else value.value)
    elif isinstance(value, np.ndarray):
        yield from arrays(value)
    elif isinstance(value, bool):
        yield from (None, 2, "x", [], np.bool_(True), not value)
    elif isinstance(value, int):
        yield from INTEGERS
    elif isinstance(value, float):
        yield from (None, "1", [], 0, 0.0, -1.0, np.nan, np.inf, -np.inf, 1e300, 1e-300, 10**400)
    elif isinstance(value, str):
        yield from TEXTS
    elif isinstance(value, tuple):
        yield from (
            *ANY,
            (),
            (1,),
            (1, 2, 3),
            (0, 0),
            (-1, 2),
            (256, 1),
            (1 << 40, 1),
            (None, 1),
            ("a", 1),
            (1, 1),
            (3, 5),
        )
    elif isinstance(value, list) and value and isinstance(value[0], int):
        yield from (
            *ANY,
            [-1],
            [1 << 64],
            [1 << 63],
            [1 << 32, 1 << 32],
            [1 << 62, 4],
            [(1 << 62) - 1],
            [None],
            [0],
            [0, 1 << 63],
            [1] * 100,
        )
    elif isinstance(value, list):
        yield from (
            *ANY,
            [None],
            [*value, None],
            [None, *value],
            value * 65,
            value * 64,
            (*value,),
            "ab",
            [value],
            {0: value[0]},
            np.array(value, object),
        )
        for handle in handles():
            yield from ([handle], [*value, handle])
    else:
        yield from (*ANY, *handles())
