"""The types that all layers share. A quantized weight is codec + named parts + logical shape.

A logical shape is row-major, outermost first (`[N, K]`: N = out_features, K = in_features); GGUF stores it reversed.
Codecs treat weights with more or fewer dimensions as a matrix `[rows, K]` with K the last dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, overload, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike, NDArray

from polyquant.errors import UnknownTensorError, UnsupportedError, printable
from polyquant.findings import Finding, Findings, Severity
from polyquant.forms import (
    F32,
    I8,
    U8,
    Activation,
    Affine,
    Blocks,
    Floats,
    Form,
    ScaledFloats,
    Ternary,
    TrellisCode,
    TrellisCodes,
)
from polyquant.metadata import Kind, Meta
from polyquant.operations import SAME, Operation
from polyquant.tables import Row, Table, size, tensor_columns

T = TypeVar("T")
Shape: TypeAlias = tuple[int, ...]
Parts: TypeAlias = Mapping[str, NDArray[Any]]
Rounding: TypeAlias = Literal["none", "block", "token", "wide"]
"""Quantization of inputs before a multiplication: none, or to int8 per block of 32, per token, per block of 128."""

__all__ = [
    "F32", "I8", "U8", "Action", "Activation", "Affine", "ArraySpec", "Blocks", "Checkpoint", "Codec", "Evidence",
    "FilePlan", "Finding", "Findings", "Floats", "Form", "Kind", "Layout", "Meta", "Parts", "Rounding", "ScaledFloats",
    "Severity", "Shape", "Slot", "StoredArray", "TensorMap", "TensorSpec", "Ternary", "Translation", "TrellisCode",
    "TrellisCodes", "Undecoded", "Weight", "as_matrix",
]  # fmt: skip


def as_matrix(shape: Shape) -> tuple[int, int]:
    """(rows, K) of a logical shape; a scalar is 1 x 1, a vector one row."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and dtype of one part, known from the logical shape alone. nbytes: exact size in bytes (unbounded)."""

    shape: Shape
    dtype: np.dtype[Any]
    nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", math.prod(self.shape) * self.dtype.itemsize)


@runtime_checkable
class Codec(Protocol):
    """A codec has two halves: math (quantize: floats <-> codes) and layout (pack: codes <-> parts). More:
    capabilities.py.
    """

    @property
    def name(self) -> str:
        """Registry name; two codecs share one if and only if their bytes are interchangeable."""

    @property
    def form(self) -> type[Form]:
        """Form of the codes; equal forms transcode."""

    @property
    def granule(self) -> tuple[int, int]:
        """(rows, columns) that must divide the matrix."""

    @property
    def row_sliced(self) -> bool:
        """True if rows [a, b) of every part hold rows [a, b) of the weight, so that work can stream by rows."""

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Exact part sizes. Raises CodecError if the granule does not divide."""

    def quantize(self, w: F32, *, importance: F32 | None = None) -> Form:
        """Floats [..., K] -> codes. importance: float32 [K], positive, weights of the squared error per column."""

    def pack(self, codes: Any) -> dict[str, NDArray[Any]]:
        """Codes -> parts."""

    def unpack(self, parts: Parts, shape: Shape) -> Any:
        """Parts -> codes."""

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Parts -> float32 of `shape` (of [rows, K] when rows is given; then the codec must be row_sliced)."""


# ---------------------------------------------------------------- stored weights


class StoredArray(Protocol):
    """One part in a file, read on access."""

    @property
    def spec(self) -> ArraySpec:
        """Shape and dtype."""

    def view(self) -> NDArray[Any]:
        """The whole array as a read-only map (native byte order; a copy if the file's byte order differs)."""

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Read entries [start, stop) of the first axis into new memory by positioned reads. Raises InputError if the
        file shrank.
        """


@dataclass(frozen=True, slots=True)
class _Views(Mapping[str, NDArray[Any]]):
    arrays: Mapping[str, StoredArray]

    def __getitem__(self, key: str) -> NDArray[Any]:
        return self.arrays[key].view()

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)


@dataclass(frozen=True, slots=True, repr=False)
class Weight:
    """A named tensor: logical shape, codec, parts (maps of the file; opening loads no data)."""

    name: str
    shape: Shape
    codec: Codec
    arrays: Mapping[str, StoredArray]

    def __repr__(self) -> str:
        return f"<Weight {printable(self.name)} {list(self.shape)} {self.codec.name}>"

    @property
    def parts(self) -> Parts:
        """Part name -> array, mapped from the file on access."""
        return _Views(self.arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts as stored."""
        return sum(a.spec.nbytes for a in self.arrays.values())

    @property
    def bpw(self) -> float:
        """Effective bits per weight: every stored byte counted."""
        return 8 * self.nbytes / max(1, math.prod(self.shape))

    def read(self, rows: slice | None = None) -> dict[str, NDArray[Any]]:
        """Read the parts by positioned reads; with `rows` only these (requires codec.row_sliced)."""
        out = {}
        for key, array in self.arrays.items():
            n = array.spec.shape[0] if array.spec.shape else 1
            start, stop, _ = rows.indices(n) if rows is not None else (0, n, 1)
            out[key] = array.read(start, stop)
        return out

    def dequantize(self, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """The weight as float32 of `shape`."""
        return self.codec.dequantize(self.parts, self.shape, rows=rows, out=out)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """The floats for `np.asarray(weight)`: float32 unless a dtype is given. Raises ValueError for copy=False, since
        decoding copies.
        """
        if copy is False:
            raise ValueError(
                f"a weight is decoded into a new array: np.asarray({self.name!r}, copy=False) is impossible"
            )
        if dtype is not None and self.codec.form is Floats:  # float64 and integers are not rounded to float32
            return np.array(self.codec.unpack(self.parts, self.shape).values, dtype).reshape(self.shape)
        return self.dequantize() if dtype is None else self.dequantize().astype(dtype, copy=False)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The format or dialect of a file, and the evidence for it."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Undecoded:
    """The reason why a checkpoint can only be inspected: some weights use a quantization scheme that no codec decodes.

    scheme: its display name. code: of the finding. file, tensor: an example; found: type and shape of that tensor.
    """

    scheme: str
    code: str
    file: Path
    tensor: str | None = None
    found: str | None = None
    hint: str | None = None

    def error(self) -> UnsupportedError:
        """The error for every other use of the checkpoint."""
        expected = None if self.found is None else "float weights"
        where: dict[str, object] = {"file": self.file, "tensor": self.tensor, "expected": expected, "found": self.found}
        return UnsupportedError(f"unsupported quantization scheme: {self.scheme}", **where, hint=self.hint)


@dataclass(frozen=True, slots=True, repr=False)
class Checkpoint(Mapping[str, Weight]):
    """An opened file or folder: a mapping from tensor name to Weight, in file order.

    metadata: GGUF key/values (decoded on access) or safetensors' `__metadata__`; config: config.json ({} for GGUF);
    files: the small files of the model (tokenizer.json, ...), by base name. naming: the scheme of its tensor names and
    metadata, "hf" (Hugging Face), "gguf" or a format's own. describes_itself: its files, not config.json, describe how
    each weight is quantized. opened: the files read to open it, each with the state that detects changes (FileState).
    undecoded: the reason why it can only be inspected, None if all weights decode. in_memory: its weights are arrays,
    and `path` is only used in messages. other_name: finds the name in this naming scheme for a name of another scheme,
    for error messages.
    """

    format: str
    path: Path
    weights: Mapping[str, Weight]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    dialect: Evidence | None = None
    notes: tuple[str, ...] = ()
    naming: str = "hf"
    describes_itself: bool = False
    opened: Mapping[Path, tuple[int, ...]] = field(default_factory=dict)
    undecoded: Undecoded | None = None
    in_memory: bool = False
    other_name: Callable[[Checkpoint, str], str | None] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.format} {printable(self.path)}: {len(self)} tensors, {self.bpw:.3f} bits per weight>"

    def _repr_html_(self) -> str:
        rows = ((w.name, list(w.shape), w.codec, size(w.nbytes), f"{w.bpw:.3f}") for w in self.values())
        columns = ("tensor", "shape", "codec", "size", "bits per weight")
        return Table(repr(self).strip("<>"), columns, rows, len(self), self.notes).html()

    def rows(self) -> list[Row]:
        """One row per tensor: tensor, shape, weights, bytes, bpw, codec."""
        return [{**tensor_columns(w.name, w.shape, w.nbytes), "codec": str(w.codec)} for w in self.values()]

    def __getitem__(self, name: str) -> Weight:
        """The tensor of that name. Raises UnknownTensorError, a KeyError, with similar names."""
        if name not in self.weights:
            other = self.other_name(self, name) if self.other_name is not None and isinstance(name, str) else None
            raise UnknownTensorError(self.path, str(name), self.weights, other if other in self.weights else None)
        return self.weights[name]

    def __contains__(self, name: object) -> bool:
        return name in self.weights

    @overload
    def get(self, key: str, /) -> Weight | None: ...
    @overload
    def get(self, key: str, /, default: Weight | T) -> Weight | T: ...
    def get(self, key: str, /, default: Any = None) -> Any:
        """The tensor of that name, or the default."""
        return self.weights.get(key, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as stored."""
        return sum(w.nbytes for w in self.weights.values())

    @property
    def bpw(self) -> float:
        """Effective bits per weight over the whole checkpoint."""
        return 8 * self.nbytes / max(1, sum(math.prod(w.shape) for w in self.weights.values()))


# ---------------------------------------------------------------- from one checkpoint to another


class Action(Enum):
    """The action of a conversion step; decided in one place, printed before the work.

    copy: same codec, bytes are copied. transcode: same form, equal codes (rounded scales are reported). quantize: from
    floats. dequantize: to floats. requantize: lossy from one quantization to another, only on request.
    """

    COPY = "copy"
    TRANSCODE = "transcode"
    QUANTIZE = "quantize"
    DEQUANTIZE = "dequantize"
    REQUANTIZE = "requantize"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written, or a source of one."""

    name: str
    shape: Shape
    codec: Codec


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A target tensor of this shape: `op` applied to its sources; no sources for a constant.

    ternarize: the float sources are BitNet master weights: codes = round(w / mean|w|) clipped to -1..1, scale =
    mean|w|. keep_float: a tensor that stays unquantized (norms, biases): written as float32 in GGUF.
    """

    target: str
    sources: tuple[str, ...]
    shape: Shape
    op: Operation = SAME
    ternarize: bool = False
    keep_float: bool = False

    @property
    def source(self) -> str:
        """The single source; "" for a constant. Raises UnsupportedError if there are several."""
        if len(self.sources) > 1:
            raise UnsupportedError(
                "is made of several tensors, which this option does not support",
                tensor=self.target,
                found=self.origin,
                hint="omit calibration, smoothing and --target-bpw, or exclude this tensor by a rule",
            )
        return self.sources[0] if self.sources else ""

    @property
    def origin(self) -> str:
        """The sources for display: the first, "and N more"."""
        first, *others = self.sources or ("",)
        return f"{first} and {len(others)} more" if others else first

    @property
    def is_vector(self) -> bool:
        """True for a tensor that is not worth quantizing: norms, biases."""
        return self.keep_float or len(self.shape) < 2


@dataclass(frozen=True, slots=True)
class Translation:
    """A checkpoint translated to another format's naming scheme.

    constants: tensors that no source has but the target's runtime needs (RoPE factors), float32, by target name.
    unknown: reasons why no runtime will accept the result: then it is only written on request.
    """

    architecture: str
    tensors: tuple[TensorMap, ...]
    metadata: Mapping[str, Meta] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, F32] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one part of one tensor: file, byte offset, spec."""

    file: str
    offset: int
    spec: ArraySpec


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One output file: exact size, and the bytes known before any payload as (offset, bytes) pieces; gaps stay zero."""

    name: str
    size: int
    pieces: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Headers, files and exact offsets, computed before any payload. slots: (tensor, part) -> Slot.

    folder: True if the target is a folder with the files; else it is the one file, or the files of a split model.
    """

    files: tuple[FilePlan, ...]
    slots: Mapping[tuple[str, str], Slot]
    folder: bool

    @property
    def nbytes(self) -> int:
        """Exact bytes of the whole output."""
        return sum(f.size for f in self.files)
