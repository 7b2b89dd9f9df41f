"""SHA-256 of the content of one weight, independent of its file, container and layout.

    digest = sha256 of the JSON array [VERSION, form, codec, shape, {name: sha256 of the bytes of that array}]

in printable ASCII, without spaces, names sorted. All arrays are row-major and little-endian. shape: the logical shape,
outermost dimension first. Neither the tensor's name nor its file is included. By the form of the codes:

    form     codec              arrays
    floats   dtype ("bf16")     blocks: the values
    blocks   codec ("q4_0")     its parts; for a codec that stores the blocks of another (hf_mxfp4), codec and part of
                                that one
    ternary  null               codes: int8 [rows, K]; scales: runs of (position u64, scale f32)
    affine   null               codes: int8 [rows, K]; scales: runs of (position u64, scale f32, offset f32);
                                for static inputs also scale, offset, deq_scale, quant_bias of the activation
    trellis  [bits, codebook, window_bits, tile_order, block along K, block along N]
                                codes: u8 [K / 16, N / 16, 256]; scales f32 [G, N]; su f32 [K]; sv f32 [N]; table f32
    stored   codec              its parts, where the codes cannot be unpacked (a missing tile, damage)

A run starts at the first position, in row-major order, whose scale or offset differs from the one before, so that one
scale per tensor and equal scales per block are the same content. The scale of a ternary zero has no effect and is
skipped. -0 and +0 are the same scale.

Equal: bf16 in safetensors, .bin and GGUF; little- and big-endian GGUF; one file or shards; I2_S of x86 and ARM, TL1,
TL2, and tq2_0 if half precision holds the scale; mxfp4 in both block orders; EXL3 and Trellis with the same codes.
Different: the same values in a different dtype (norms are bf16 in Hugging Face folders and f32 in GGUF); permuted rows
(q and k of Llama); merged or split tensors; q8_0 blocks and affine codes, although they convert without loss.

The digest `stored` covers the parts as they are stored: bytes that do not change a weight, such as padding.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyquant.analysis.catalogue import FORMS
from polyquant.capabilities import HoldsBlocks, claims
from polyquant.errors import CodecError, UnsupportedError
from polyquant.storage.source import FileArray, Source
from polyquant.types import (
    U8,
    Affine,
    Blocks,
    Floats,
    Form,
    Shape,
    StoredArray,
    Ternary,
    TrellisCodes,
    Weight,
    as_matrix,
)

__all__ = ["VERSION", "Tell", "TensorDigest", "digest_of", "files_of"]

VERSION = "polyquant content 1"
PIECE = 1 << 22
"""Bytes that are read and hashed at once."""
_STEP = 1 << 20
"""Weights that are unpacked at once, if the codec's rows are independent."""
_LARGE = 1 << 26
"""Weights of a tensor that is unpacked as a whole only while no other such tensor is."""
_large = threading.Lock()
_RUN = {1: np.dtype([("at", "<u8"), ("v0", "<u4")]), 2: np.dtype([("at", "<u8"), ("v0", "<u4"), ("v1", "<u4")])}
"""Number of values -> a run as bytes; the values are the bits of floats."""

Tell: TypeAlias = Callable[[int], None]
"""Called with the number of bytes that were read."""


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """Digests of one tensor.

    content: of the codes and scales, in any layout. stored: of the parts as stored; equal to `content` for floats and
    blocks. file: the one that holds its first part, relative to the model.
    """

    content: str
    stored: str
    form: str
    codec: str
    shape: Shape
    file: str


def digest_of(weight: Weight, file: str, tell: Tell) -> TensorDigest:
    """The digests of a weight. Raises InputError if its file is too short."""
    codec = weight.codec
    form = FORMS[codec.form]
    holds = claims(codec, HoldsBlocks)  # type: ignore[type-abstract]
    if codec.form in (Floats, Blocks) and not holds:
        parts = {key: _hashed(array, tell) for key, array in weight.arrays.items()}
        content = stored = _digest(form, codec.name, weight.shape, parts)
    else:
        try:
            content, stored = _unpacked(weight, tell)
        except (CodecError, UnsupportedError):
            form = "stored"
            parts = {key: _hashed(array, lambda _: None) for key, array in weight.arrays.items()}
            content = stored = _digest(form, codec.name, weight.shape, parts)
    return TensorDigest(content, stored, form, codec.name, tuple(weight.shape), file)


def _digest(form: str, codec: object, shape: Shape, arrays: Mapping[str, str]) -> str:
    text = json.dumps([VERSION, form, codec, list(shape), arrays], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def files_of(weight: Weight) -> list[Source] | None:
    """The files that hold its parts, each once, or None if a part is not read from a file."""
    sources: list[Source] = []
    for array in weight.arrays.values():
        source = getattr(getattr(array, "scales", array), "source", None)  # scales: a part that is repaired on reading
        if not isinstance(source, Source):
            return None
        if source not in sources:
            sources.append(source)
    return sources


# ---------------------------------------------------------------- stored bytes


def _hashed(array: StoredArray, tell: Tell) -> str:
    state = hashlib.sha256()
    for piece in _pieces(array):
        state.update(piece.data)
        tell(piece.nbytes)
    return state.hexdigest()


def _pieces(array: StoredArray) -> Iterator[U8]:
    """The bytes of an array in row-major order, in new memory or in a buffer that the next piece overwrites."""
    if isinstance(array, FileArray):
        yield from array.pieces(PIECE)
        return
    rows = array.spec.shape[0] if array.spec.shape else 1
    step = max(1, PIECE * rows // max(1, array.spec.nbytes))
    for a in range(0, rows, step):
        yield _bytes(array.read(a, min(rows, a + step)))


def _bytes(array: NDArray[Any]) -> U8:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


# ---------------------------------------------------------------- codes


def _unpacked(weight: Weight, tell: Tell) -> tuple[str, str]:
    """Digests of the codes and of the stored parts, from one reading. Raises CodecError, UnsupportedError."""
    codec, shape = weight.codec, weight.shape
    rows, k = as_matrix(shape)
    codes = _Codes(k)
    stored = {key: hashlib.sha256() for key in weight.arrays}
    step = max(1, _STEP // max(1, k)) if codec.row_sliced else max(1, rows)
    gate = _large if not codec.row_sliced and rows * k > _LARGE else nullcontext()
    with gate:
        for a in range(0, rows, step):
            stop = min(rows, a + step)
            parts = weight.read(slice(a, stop) if codec.row_sliced else None)
            codes.add(codec.unpack(parts, (stop - a, k) if codec.row_sliced else shape))
            for key, array in parts.items():
                stored[key].update(_bytes(array).data)
                tell(array.nbytes)
    held = codec.holds if claims(codec, HoldsBlocks) else None  # type: ignore[type-abstract]
    content = _digest(FORMS[codec.form], held if held is not None else codes.code, shape, codes.digests())
    raw = _digest("stored", codec.name, shape, {key: state.hexdigest() for key, state in stored.items()})
    return content, raw


class _Codes:
    """Hashes codes that arrive in blocks of rows."""

    def __init__(self, k: int) -> None:
        self.code: object = None
        self._k = k
        self._arrays: dict[str, Any] = {}
        self._start = 0
        self._last: tuple[int, ...] | None = None

    def digests(self) -> dict[str, str]:
        """Name -> SHA-256."""
        return {name: state.hexdigest() for name, state in self._arrays.items()}

    def add(self, form: Form) -> None:
        """Add the codes of the next rows, or of all."""
        if isinstance(form, Ternary):
            self._hash("codes", np.asarray(form.codes, np.int8))
            self._hash("scales", self._ternary_runs(form))
            self._start += form.codes.size
        elif isinstance(form, Affine):
            self._hash("codes", np.asarray(form.codes, np.int8))
            self._hash("scales", self._affine_runs(form))
            self._start += form.codes.size
            if form.activation is not None:
                grid = form.activation
                for name in ("scale", "offset", "deq_scale", "quant_bias"):
                    self._hash(f"activation.{name}", getattr(grid, name))
        elif isinstance(form, Blocks):
            self._hash("blocks", form.blocks)
        elif isinstance(form, TrellisCodes):
            code = form.code
            self.code = [code.bits, code.codebook, code.window_bits, code.tile_order, *code.hadamard]
            for name in ("codes", "scales", "su", "sv", "table"):
                if (array := getattr(form, name)) is not None:
                    self._hash(name, array)

    def _hash(self, name: str, array: NDArray[Any]) -> None:
        self._arrays.setdefault(name, hashlib.sha256()).update(_bytes(array).data)

    def _ternary_runs(self, form: Ternary) -> NDArray[Any]:
        """Runs of equal scales over the codes that are not zero."""
        codes = np.ascontiguousarray(form.codes, np.int8)
        if not codes.size:
            return _runs(np.empty(0, np.int64), [np.empty(0, np.uint32)])
        groups = form.scale.shape[-1]
        cells = codes.reshape(len(codes) * groups, self._k // groups)  # codes of one scale
        used = np.flatnonzero(_any(cells))
        scales = np.broadcast_to(form.scale.reshape(-1, groups), (len(codes), groups)).reshape(-1)
        bits = _bits(scales[used])
        first = self._changes(bits)
        cell = used[first]
        at = cell * cells.shape[1] + (cells[cell] != 0).argmax(axis=1)
        return _runs(at + self._start, [bits[first]])

    def _affine_runs(self, form: Affine) -> NDArray[Any]:
        """Runs of equal scales and offsets over all codes."""
        rows, groups = len(form.codes), form.scale.shape[-1]
        arrays = (form.scale, form.offset)
        bits = [_bits(np.broadcast_to(np.asarray(a, np.float32), (rows, groups)).reshape(-1)) for a in arrays]
        first = self._changes(*bits)
        return _runs(first * (self._k // max(1, groups)) + self._start, [b[first] for b in bits])

    def _changes(self, *values: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Indices of the entries that differ from the one before; the first from the last one of the rows before."""
        n = len(values[0])
        if not n:
            return np.empty(0, np.int64)
        new = np.zeros(n, bool)
        for v in values:
            new[1:] |= v[1:] != v[:-1]
        new[0] = self._last != tuple(int(v[0]) for v in values)
        self._last = tuple(int(v[-1]) for v in values)
        return np.flatnonzero(new)


def _any(cells: NDArray[np.int8]) -> NDArray[np.bool_]:
    """True for each row that has a nonzero code."""
    if cells.shape[1] and cells.shape[1] % 8 == 0:
        return np.asarray(cells.view(np.uint64).any(axis=1))
    return np.asarray(cells.any(axis=1))


def _bits(values: NDArray[Any]) -> NDArray[np.uint32]:
    """float32 as bits; -0 becomes +0."""
    return np.ascontiguousarray(np.asarray(values, np.float32) + np.float32(0)).view(np.uint32)


def _runs(at: NDArray[np.int64], values: list[NDArray[np.uint32]]) -> NDArray[Any]:
    out = np.empty(len(at), _RUN[len(values)])
    out["at"] = at
    for i, value in enumerate(values):
        out[f"v{i}"] = value
    return out
