"""Shared by the readers of quantization schemes: header data of a tensor, the resulting weight, and checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from polyquant.codecs.dtypes import BY_NUMPY
from polyquant.codecs.keeping import FLOAT_TYPES
from polyquant.errors import CodecError, InputError
from polyquant.types import Codec, Shape

__all__ = ["Described", "QuantizedWeight", "Read", "fitting", "float_word", "require"]


class Described(Protocol):
    """Header data of a tensor."""

    @property
    def dtype(self) -> str:
        """The dtype's name in safetensors."""

    @property
    def shape(self) -> Shape:
        """The shape, row-major."""


Read = Callable[[str], NDArray[Any]]
"""Name of a small tensor (group indices, shapes) -> its values."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """One quantized weight.

    tensors: part -> name in the file. spare: further tensors that are not copied; lost: those of them with information.
    held: part -> its array, for small parts that the file stores in a different form.
    """

    name: str
    shape: Shape
    codec: Codec
    tensors: Mapping[str, str]
    spare: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    held: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def require(module: str, part: str, tensors: Mapping[str, Described], rank: int) -> Described:
    """A tensor of a module. Raises InputError if it is missing or has a different number of dimensions."""
    tensor = tensors.get(f"{module}.{part}")
    if tensor is None:
        raise InputError(
            f"quantized weight lacks {part}",
            tensor=module,
            hint="finish the download, or download the folder again",
        )
    if len(tensor.shape) != rank or 0 in tensor.shape:
        raise InputError(
            f"{part} has an unexpected shape",
            tensor=module,
            expected=f"{rank} dimensions, none empty",
            found=list(tensor.shape),
        )
    return tensor


def float_word(module: str, part: str, tensor: Described) -> str:
    """The word for the dtype of scales in codec names. Raises InputError unless it is a float of 16 or 32 bits."""
    words = {BY_NUMPY[dtype]: word for word, dtype in FLOAT_TYPES.items()}
    if tensor.dtype not in words:
        raise InputError(
            f"{part} has an unsupported dtype", tensor=module, expected=", ".join(words), found=tensor.dtype
        )
    return words[tensor.dtype]


def fitting(
    module: str, shape: Shape, codec: Codec, tensors: Mapping[str, Described], spare: tuple[str, ...] = ()
) -> QuantizedWeight:
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
    present = tuple(f"{module}.{part}" for part in spare if f"{module}.{part}" in tensors)
    return QuantizedWeight(f"{module}.weight", shape, codec, {part: f"{module}.{part}" for part in specs}, present)
