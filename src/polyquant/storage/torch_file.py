"""Files of torch.save (`pytorch_model.bin`): a zip of uncompressed entries, one pickle, one entry per storage.

    ARCHIVE/data.pkl     the state dict (see pickle_reader)
    ARCHIVE/byteorder    "little" (absent in files from before torch 2.0: little too)
    ARCHIVE/data/KEY     the elements of storage KEY, aligned to 64 bytes

Opening reads the directory and the pickle. Everything is checked before anything is allocated: the entry of a storage
has exactly the elements that the pickle declares, and a tensor's strides stay inside it. Views (transposed, sliced) are
gathered row by row on reading. Expanded tensors (stride 0) are rejected, since they have more elements than bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError, UnsupportedError
from polyquant.storage import limits, pickle_reader, stored_zip
from polyquant.storage.pickle_reader import TensorRef
from polyquant.storage.safetensors import DTYPE_BITS
from polyquant.storage.source import FileArray, Source
from polyquant.types import ArraySpec, Shape, StoredArray, as_matrix

__all__ = ["StridedArray", "TorchTensor", "plausible", "read_torch"]

_GATHER = 1 << 20  # elements gathered at once; each needs an 8-byte index


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A tensor in a torch file: safetensors dtype name, byte offset of its first element, strides in elements."""

    dtype: str
    shape: Shape
    offset: int
    stride: Shape

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return DTYPE_BITS[self.dtype] // 8

    @property
    def nbytes(self) -> int:
        """Bytes of the elements when contiguous."""
        return math.prod(self.shape) * self.itemsize

    def array(self, source: Source, spec: ArraySpec) -> StoredArray:
        """Return the elements as an array of `spec`, which has the same size."""
        if self.stride == _row_major(self.shape):
            return FileArray(source, self.offset, spec)
        return StridedArray(source, self, spec)


@dataclass(frozen=True, slots=True)
class StridedArray:
    """A non-contiguous view. spec: the same bytes as [rows, K] elements, row by row."""

    source: Source
    tensor: TorchTensor
    spec: ArraySpec

    def view(self) -> NDArray[Any]:
        """Return the whole array, gathered into a new one."""
        rows, k = as_matrix(self.tensor.shape)
        step = max(1, _GATHER // max(1, k))
        pieces = [self._gather(a, min(rows, a + step)) for a in range(0, rows, step)]
        raw = np.concatenate(pieces) if pieces else np.empty(0, np.uint8)
        return raw.view(self.spec.dtype).reshape(self.spec.shape)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return entries [start, stop) of the first axis of `spec`."""
        rows, _ = as_matrix(self.tensor.shape)
        if self.spec.shape[:1] != (rows,):
            return self.view()[start:stop]
        start, stop, _ = slice(start, stop).indices(rows)
        stop = max(start, stop)
        return self._gather(start, stop).view(self.spec.dtype).reshape(stop - start, *self.spec.shape[1:])

    def _gather(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return rows [start, stop) as bytes; reads the span of the file that contains them."""
        shape, stride, size = self.tensor.shape, self.tensor.stride, self.tensor.itemsize
        k = shape[-1] if shape else 1
        index = np.unravel_index(np.arange(start, stop), shape[:-1] or (1,))
        first = sum((i * s for i, s in zip(index, stride[:-1], strict=False)), np.zeros(stop - start, np.int64))
        columns = np.arange(k, dtype=np.int64) * (stride[-1] if stride else 0)
        if not first.size or not columns.size:
            return np.empty(0, np.uint8)
        low, high = int(first.min()), int(first.max() + columns[-1]) + 1
        span = self.source.pread(self.tensor.offset + low * size, (high - low) * size).view(f"V{size}")
        return np.ascontiguousarray(span[(first - low)[:, None] + columns]).view(np.uint8).reshape(-1)


_OLD = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")
"""Files from before torch 1.6 begin with this magic number, pickled: 0x1950a86a20f9469cfc6c."""


def plausible(source: Source) -> bool:
    """Return True if the file starts like a torch file: a zip with a pickle first, or the old format."""
    head = source.pread(0, min(source.size, 300)).tobytes()
    return head.startswith(_OLD) or (head[:4] == b"PK\3\4" and b"/data.pkl" in head)


def read_torch(source: Source) -> Mapping[str, TorchTensor]:
    """Return name -> tensor in state-dict order. Raises InputError, UnsupportedError (old or big-endian files)."""
    if source.size < 4 or source.pread(0, 4).tobytes() != b"PK\3\4":
        raise UnsupportedError(
            "not a zip torch file",
            file=source.path,
            hint="save files from before torch 1.6 again with a newer torch, preferably as safetensors",
        )
    directory = stored_zip.read_directory(source)
    pickles = [n for n in directory if n.count("/") == 1 and n.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise InputError("torch file must contain one data.pkl", file=source.path, found=len(pickles))
    prefix = pickles[0].removesuffix("data.pkl")
    order = directory.get(f"{prefix}byteorder")
    if order is not None and _content(source, order, 16) != b"little":
        raise UnsupportedError(
            "torch file is big-endian", file=source.path, hint="save it again on a little-endian machine"
        )
    tensors = pickle_reader.state_dict(
        _content(source, directory[pickles[0]], pickle_reader.MAX_PICKLE), file=source.path
    )
    starts: dict[str, int] = {}
    out = {}
    for name, tensor in tensors.items():
        key = f"{prefix}data/{tensor.storage.key}"
        if key not in directory:
            raise InputError(f"storage '{tensor.storage.key}' is not in the file", file=source.path, tensor=name)
        wrong = _misfit(tensor, directory[key].nbytes)
        if wrong is not None:
            raise InputError(wrong, file=source.path, tensor=name)
        if key not in starts:
            starts[key] = stored_zip.data_offset(source, directory[key])
        out[name] = _placed(tensor, starts[key])
    return out


def _content(source: Source, entry: stored_zip.StoredEntry, limit: int) -> bytes:
    if entry.nbytes > limit:
        raise InputError(
            f"{entry.name} is too large", file=source.path, expected=f"at most {limit}", found=entry.nbytes
        )
    return source.pread(stored_zip.data_offset(source, entry), entry.nbytes).tobytes()


def _misfit(ref: TensorRef, nbytes: int) -> str | None:
    """Return why a tensor does not fit a storage of `nbytes`, or None if it does. Uses unbounded integers."""
    size = DTYPE_BITS[ref.dtype] // 8
    stored = ref.storage.count * (DTYPE_BITS[ref.storage.dtype] // 8 if ref.storage.dtype else 1)
    if nbytes != stored:
        return f"storage should have {stored} bytes, the file has {nbytes}"
    if math.prod(d for d in ref.shape if d) > (limits.EMPTY_EXTENT if 0 in ref.shape else 1 << 48):
        return "shape is larger than any file"
    count = math.prod(ref.shape)
    if count * size > stored:
        return f"{count} elements do not fit in {stored} bytes"
    # Strides are non-negative, so this is the last element.
    last = ref.offset + sum((d - 1) * s for d, s in zip(ref.shape, ref.stride, strict=True))
    if count and (last + 1) * size > stored:
        return f"reaches byte {(last + 1) * size} of a storage of {stored}"
    return None


def _placed(ref: TensorRef, start: int) -> TorchTensor:
    usual = _row_major(ref.shape)
    if not math.prod(ref.shape):
        return TorchTensor(ref.dtype, ref.shape, start, usual)
    # Strides of size-1 dimensions are arbitrary; normalise them to recognise contiguous tensors.
    stride = tuple(u if d == 1 else s for d, s, u in zip(ref.shape, ref.stride, usual, strict=True))
    return TorchTensor(ref.dtype, ref.shape, start + ref.offset * (DTYPE_BITS[ref.dtype] // 8), stride)


def _row_major(shape: Shape) -> Shape:
    out, step = [], 1
    for d in reversed(shape):
        out.append(step)
        step *= max(1, d)
    return tuple(reversed(out))
