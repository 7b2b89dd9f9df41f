"""Tensors that the decoder wants and a Hugging Face folder stores in another way: stacks of experts, parts of fused projections, norms plus one.

They are made in memory when they are asked for: of the stored rows where the operation keeps rows and all sources are of one codec, else as float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from polyquant import registry
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.record import Architecture
from polyquant.architectures.tensors import gguf_maps
from polyquant.operations import Same
from polyquant.rows import stored_rows, whole_floats
from polyquant.types import ArraySpec, Checkpoint, Floats, TensorMap, Weight, as_matrix

__all__ = ["HeldArray", "derived_maps", "made"]


@dataclass(frozen=True, slots=True, eq=False)
class HeldArray:
    """A part that lies in memory: a types.StoredArray."""

    array: NDArray[Any]

    @property
    def spec(self) -> ArraySpec:
        """Shape and dtype."""
        return ArraySpec(self.array.shape, self.array.dtype)

    def view(self) -> NDArray[Any]:
        """The array itself."""
        return self.array

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """A copy of the entries [start, stop)."""
        return self.array[start:stop].copy() if self.array.shape else self.array.copy()


def derived_maps(checkpoint: Checkpoint, record: Architecture, hyper: Hyper) -> dict[str, TensorMap]:
    """Decoder's name -> its map, of all tensors of a Hugging Face checkpoint that are not stored as they are. Raises InputError for tensors that do not fit.

    Rotated rows stay as they lie: the decoder rotates what it finds (Architecture.rotates_pairs).
    """
    if checkpoint.naming == "gguf":
        return {}
    found = gguf_maps(checkpoint.values(), record, hyper, checkpoint.path, paired=False)
    return {m.target: m for m in found.maps if not _as_stored(m, record)}


def _as_stored(made: TensorMap, record: Architecture) -> bool:
    """True where the name table alone leads to the tensor."""
    single = len(made.sources) == 1 and isinstance(made.op, Same)
    return single and made.target in (record.names.to_gguf(made.sources[0]), made.sources[0])


def made(checkpoint: Checkpoint, wanted: TensorMap) -> Weight:
    """The tensor in memory, under the name of its source where it has one alone. Raises CodecError, InputError for sources that cannot be read."""
    weights = [checkpoint[name] for name in wanted.sources]
    if len(weights) == 1 and isinstance(wanted.op, Same):
        return Weight(wanted.target, wanted.shape, weights[0].codec, weights[0].arrays)
    codec, shapes = weights[0].codec, [w.shape for w in weights]
    alike = all(w.codec is codec for w in weights) and codec.row_sliced
    if alike and wanted.op.keeps_rows(shapes):
        parts = stored_rows(weights, wanted.op, slice(0, as_matrix(wanted.shape)[0]))
    else:
        codec = registry.codec("f32")
        parts = codec.pack(Floats(whole_floats(weights, wanted.op).reshape(as_matrix(wanted.shape))))
    name = wanted.sources[0] if len(wanted.sources) == 1 else wanted.target
    return Weight(name, wanted.shape, codec, {key: HeldArray(part) for key, part in parts.items()})
