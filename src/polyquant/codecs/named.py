"""Base class of codecs that print as their name and take weights of any size by default."""

from __future__ import annotations

from abc import ABC, abstractmethod

from polyquant.types import ArraySpec, Shape

__all__ = ["NamedCodec"]


class NamedCodec(ABC):
    """The members that codecs of other tools' checkpoints have in common. Subclasses are frozen dataclasses."""

    __slots__ = ()

    def __str__(self) -> str:
        return self.name

    @property
    @abstractmethod
    def name(self) -> str:
        """Codec name; includes every option that affects the bytes."""

    @property
    def granule(self) -> tuple[int, int]:
        """Any shape; `specs` rejects shapes that do not divide."""
        return 1, 1

    @property
    def row_sliced(self) -> bool:
        """False where a part is transposed, packed along the rows, or a table for all rows."""
        return False

    @abstractmethod
    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [N, K]. Raises CodecError if the packing does not divide the shape."""
