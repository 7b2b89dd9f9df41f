"""What the readers of quantization schemes share: a tensor as its header says it, the weight that several tensors make, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from polyquant.codecs.affine_reader import FLOAT_TYPES
from polyquant.codecs.dtypes import BY_NUMPY
from polyquant.errors import CodecError, InputError
from polyquant.types import Codec, Shape

__all__ = ["Described", "Found", "Read", "fitting", "float_word", "require"]


class Described(Protocol):
    """What is needed of a tensor."""

    @property
    def dtype(self) -> str:
        """safetensors' name."""

    @property
    def shape(self) -> Shape:
        """Row-major."""


Read = Callable[[str], NDArray[Any]]
"""Name of a small tensor (group indices, shapes) -> its numbers."""


@dataclass(frozen=True, slots=True)
class Found:
    """One weight. tensors: part -> name in the file. spare: further tensors that are not carried along; lost: those of them that say something."""

    name: str
    shape: Shape
    codec: Codec
    tensors: Mapping[str, str]
    spare: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def require(module: str, part: str, tensors: Mapping[str, Described], rank: int) -> Described:
    """A tensor of a module. Raises InputError if it is not there or has another number of dimensions."""
    found = tensors.get(f"{module}.{part}")
    if found is None:
        raise InputError(
            f"quantized weight lacks {part}",
            tensor=module,
            hint="finish the download, or take the folder from its source again",
        )
    if len(found.shape) != rank or 0 in found.shape:
        raise InputError(
            f"{part} has another form",
            tensor=module,
            expected=f"{rank} dimensions, none empty",
            found=list(found.shape),
        )
    return found


def float_word(module: str, part: str, tensor: Described) -> str:
    """What a codec's name calls the dtype of scales. Raises InputError for what is no float of 16 or 32 bits."""
    words = {BY_NUMPY[dtype]: word for word, dtype in FLOAT_TYPES.items()}
    if tensor.dtype not in words:
        raise InputError(f"{part} is of another type", tensor=module, expected=", ".join(words), found=tensor.dtype)
    return words[tensor.dtype]


def fitting(
    module: str, shape: Shape, codec: Codec, tensors: Mapping[str, Described], spare: tuple[str, ...] = ()
) -> Found:
    """The weight, if every part has the dtype and shape of its spec. Raises InputError."""
    try:
        specs = codec.specs(shape)
    except CodecError as e:
        raise InputError(e.message, tensor=module, expected=e.expected, found=e.found) from None
    for part, spec in specs.items():
        tensor = tensors.get(f"{module}.{part}")
        if tensor is None:
            raise InputError(f"quantized weight lacks {part}", tensor=module, expected=", ".join(specs))
        scalar = tensor.shape == () and spec.shape == (1,)
        if (tensor.shape != spec.shape and not scalar) or tensor.dtype != BY_NUMPY[spec.dtype]:
            raise InputError(
                f"{part} does not fit the weight",
                tensor=module,
                expected=f"{BY_NUMPY[spec.dtype]} {list(spec.shape)}",
                found=f"{tensor.dtype} {list(tensor.shape)}",
            )
    there = tuple(f"{module}.{part}" for part in spare if f"{module}.{part}" in tensors)
    return Found(f"{module}.weight", shape, codec, {part: f"{module}.{part}" for part in specs}, there)
