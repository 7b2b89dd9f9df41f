"""Base class of codecs that print as their name and take weights of any size by default."""

from __future__ import annotations

from abc import ABC, abstractmethod

from polyquant.types import ArraySpec, Parts, Shape, as_matrix

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

    def chosen(self, parts: Parts, shape: Shape, rows: slice | None) -> tuple[Parts, Shape, slice]:
        """The parts and the shape of a matrix that has `rows` (None: all) of a weight [N, K], and these rows of it.

        Parts of a `row_sliced` codec are cut, so that its tables are read for these rows only.
        """
        n, k = as_matrix(shape)
        start, stop, _ = (slice(None) if rows is None else rows).indices(max(0, n))
        if stop - start in (n, 0) or not self.row_sliced or any(part.shape[:1] != (n,) for part in parts.values()):
            return parts, shape, slice(start, stop)
        return {name: part[start:stop] for name, part in parts.items()}, (stop - start, k), slice(0, stop - start)

    @abstractmethod
    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [N, K]. Raises CodecError if the packing does not divide the shape."""
