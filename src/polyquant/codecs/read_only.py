"""Base class of read-only codecs whose codes need the scale of their block, but have no integer zero points."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyquant.codecs.arguments import exact_part
from polyquant.errors import CodecError, UnsupportedError
from polyquant.types import F32, ArraySpec, Blocks, Parts, Shape

__all__ = ["ReadOnlyBlocks", "matrix_of"]

_HINT = "choose another codec, e.g. bf16 or w8a16"


@dataclass(frozen=True, slots=True)
class ReadOnlyBlocks(ABC):
    """A codec for another tool's codes. Subclasses define its name, its parts and how rows decode."""

    def __str__(self) -> str:
        return self.name

    @property
    @abstractmethod
    def name(self) -> str:
        """Codec name; includes every option that affects the bytes."""

    @property
    def form(self) -> type[Blocks]:
        """Blocks: codes that need the scale of their block."""
        return Blocks

    @property
    def granule(self) -> tuple[int, int]:
        """Any shape; `specs` rejects shapes that do not divide."""
        return 1, 1

    @property
    def row_sliced(self) -> bool:
        """False: blocks are not rows."""
        return False

    @property
    def decodes_rows(self) -> bool:
        """True: `dequantize` decodes only the requested rows."""
        return True

    @abstractmethod
    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [N, K]. Raises CodecError if the packing does not divide the shape."""

    @abstractmethod
    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Parts to float32 [N, K], or only `rows` of it; the parts are always complete."""

    def quantize(self, w: ArrayLike, *, importance: ArrayLike | None = None) -> Blocks:
        """Raises UnsupportedError: this codec is read-only."""
        raise UnsupportedError(f"{self.name} is read-only", hint=_HINT)

    def pack(self, codes: Blocks) -> dict[str, NDArray[Any]]:
        """Raises UnsupportedError: this codec is read-only."""
        raise UnsupportedError(f"{self.name} is read-only", hint=_HINT)

    def unpack(self, parts: Parts, shape: Shape) -> Blocks:
        """Return the bytes of the packed codes, uint8 [rows, bytes]. Raises CodecError if a part does not fit."""
        key, spec = next(iter(self.specs(shape).items()))
        codes = np.ascontiguousarray(exact_part(parts, key, spec)).view(np.uint8)
        return Blocks(self.name, codes.reshape(len(codes), -1) if codes.ndim != 2 else codes)


def matrix_of(name: str, shape: Shape) -> tuple[int, int]:
    """N and K. Raises CodecError for a non-matrix."""
    if len(shape) != 2:
        raise CodecError(f"{name} needs a matrix", expected="[N, K]", found=list(shape))
    return shape[0], shape[1]
