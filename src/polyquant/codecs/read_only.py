"""Base class of read-only codecs whose codes need the scale of their block, but have no integer zero points."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyquant.codecs.arguments import exact_part, output
from polyquant.codecs.named import NamedCodec
from polyquant.errors import UnsupportedError
from polyquant.types import F32, Blocks, Parts, Shape

__all__ = ["ReadOnlyBlocks"]

_HINT = "choose another codec, e.g. bf16 or w8a16"


@dataclass(frozen=True, slots=True)
class ReadOnlyBlocks(NamedCodec):
    """A codec for another tool's codes. Subclasses define its name, its parts and how rows decode."""

    @property
    def form(self) -> type[Blocks]:
        """Blocks: codes that need the scale of their block."""
        return Blocks

    @property
    def decodes_rows(self) -> bool:
        """True: `dequantize` decodes only the requested rows."""
        return True

    @abstractmethod
    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Parts to float32 [N, K], or only `rows` of it; the parts are always complete."""

    def _asked(
        self, parts: Parts, shape: Shape, rows: slice | None, out: F32 | None
    ) -> tuple[dict[str, NDArray[Any]], int, int, F32]:
        """The checked parts, the first of the requested rows, their number, and the array to fill.

        Raises CodecError if a part or `out` does not fit.
        """
        arrays = {key: exact_part(parts, key, spec) for key, spec in self.specs(shape).items()}
        start, stop, _ = (slice(None) if rows is None else rows).indices(shape[0])
        count = max(0, stop - start)
        return arrays, start, count, output(out, shape if rows is None else (count, shape[1]))

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
