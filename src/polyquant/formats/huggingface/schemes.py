"""The quantization schemes in which folders are written: how config.json describes them and how tensors are named.

Each scheme is one object in the module that also reads it. A codec belongs to the first scheme that holds it; one
folder has one scheme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from polyquant.architectures.separate_experts import separated
from polyquant.codecs.dtypes import BY_NUMPY
from polyquant.codecs.keeping import HoldsIntegers
from polyquant.errors import PlanError, UnknownNameError
from polyquant.formats.huggingface.scheme_names import MODULES
from polyquant.formats.linears import is_linear
from polyquant.types import Codec, Shape, TensorMap, TensorSpec

__all__ = [
    "Arranges", "LinearLayers", "Scheme", "StoredTensor", "TakesApart", "WritesFiles", "group_sizes",
    "linear_names", "scheme_named", "scheme_of", "stored_parts",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in the file. part: of the weight; None for a constant, whose bytes are `data`."""

    part: str | None
    name: str
    dtype: str
    shape: Shape
    data: bytes = b""


class Scheme(Protocol):
    """One quantization scheme, for writing."""

    @property
    def name(self) -> str:
        """The name for --to."""

    @property
    def title(self) -> str:
        """The title in messages, in the plural."""

    def holds(self, codec: Codec) -> bool:
        """True if the codec's weights are stored in this scheme."""

    def holding(self, codec: Codec, shape: Shape) -> Codec | None:
        """The codec of this scheme for the codes of another one, as exact as possible; None if there is none."""

    def quantizes(self, name: str, shape: Shape) -> bool:
        """True for the tensors that programs expect to be quantized, unless a rule excludes them."""

    def stored(self, tensor: TensorSpec) -> list[StoredTensor]:
        """The tensors in the file of one weight. Raises PlanError."""

    def settings(self, tensors: Sequence[TensorSpec], config: Mapping[str, Any]) -> dict[str, Any]:
        """Entries of config.json that describe the quantized weights. tensors: all of the folder. Raises PlanError."""


class LinearLayers:
    """A scheme that quantizes linear layers, and stores parts under their own names unless it overrides this."""

    def quantizes(self, name: str, shape: Shape) -> bool:
        """Linear layers without the output head."""
        return is_linear(name, shape)

    def stored(self, tensor: TensorSpec) -> list[StoredTensor]:
        """The parts. Raises PlanError for a name that is not X.weight."""
        return stored_parts(tensor)

    def parts_of(self, tensors: Sequence[TensorMap], config: Mapping[str, Any]) -> Mapping[str, tuple[TensorMap, ...]]:
        """Fused experts: one matrix for each."""
        return separated(tensors, config)


@runtime_checkable
class WritesFiles(Protocol):
    """A scheme that describes its weights in another file, too."""

    def files(self, tensors: Sequence[TensorSpec]) -> dict[str, bytes]:
        """Name -> content. Raises PlanError."""


@runtime_checkable
class Arranges(Protocol):
    """A scheme whose reader has other tensors than transformers for some models."""

    def arranged(self, tensors: Sequence[TensorMap], config: Mapping[str, Any]) -> tuple[TensorMap, ...]:
        """The tensors to write, instead of those with transformers' names. config: config.json. Raises InputError."""


@runtime_checkable
class TakesApart(Protocol):
    """A scheme that quantizes the parts of some tensors of transformers."""

    def parts_of(self, tensors: Sequence[TensorMap], config: Mapping[str, Any]) -> Mapping[str, tuple[TensorMap, ...]]:
        """Name -> the tensors to write instead, if any of them is quantized. Raises InputError."""


@cache
def scheme_named(name: str) -> Scheme:
    """The scheme of that name. Raises UnknownNameError."""
    if name not in MODULES:
        raise UnknownNameError("scheme", name, list(MODULES))
    scheme: Scheme = import_module(f"polyquant.formats.huggingface.{MODULES[name]}").SCHEME
    return scheme


def scheme_of(codec: Codec) -> Scheme | None:
    """The scheme that stores a codec; None for floats and for codecs that folders are not written with."""
    return next((s for s in map(scheme_named, MODULES) if s.holds(codec)), None)


def stored_parts(tensor: TensorSpec) -> list[StoredTensor]:
    """The parts of a weight X.weight as X.PART. Raises PlanError for another name."""
    if not tensor.name.endswith(".weight"):
        raise PlanError("only tensors named *.weight can be quantized", tensor=tensor.name, found=tensor.codec.name)
    stem = tensor.name.removesuffix("weight")
    specs = tensor.codec.specs(tensor.shape)
    return [StoredTensor(part, stem + part, BY_NUMPY[spec.dtype], spec.shape) for part, spec in specs.items()]


def group_sizes(tensors: Sequence[TensorSpec]) -> dict[str, int]:
    """Columns per scale of each quantized tensor, 0 for the whole row.

    A row that is one group of the size that others have counts as such: a folder with groups of 128 may have layers of
    128 inputs.
    """
    traits = {t.name: t.codec.integers for t in tensors if isinstance(t.codec, HoldsIntegers)}
    found = {i.group for i in traits.values() if i.group}
    columns = {t.name: t.shape[-1] for t in tensors if t.name in traits}
    return {
        name: columns[name] if not (i.group or i.tensor) and columns[name] in found else i.group
        for name, i in traits.items()
    }


def linear_names(tensors: Sequence[TensorSpec], *, quantized: bool, scheme: Scheme) -> list[str]:
    """Modules of linear layers that are quantized, or those that are not, in the order of the model."""
    matrices = (t for t in tensors if t.name.endswith(".weight") and len(t.shape) == 2)
    names = [t.name.removesuffix(".weight") for t in matrices if scheme.holds(t.codec) is quantized]
    return names if quantized else [n for n in names if "embed" not in n and "norm" not in n]
