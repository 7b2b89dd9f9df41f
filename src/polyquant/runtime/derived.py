"""Tensors that the decoder wants and a Hugging Face folder stores in another way: stacks of experts, parts of fused projections, norms plus one.

They are made in memory when they are asked for: of the stored rows where the operation keeps rows and all sources are of one codec, else as float32.
"""

from __future__ import annotations

from dataclasses import replace

from polyquant import registry
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.record import Architecture
from polyquant.architectures.tensors import gguf_maps
from polyquant.errors import CodecError
from polyquant.operations import Same
from polyquant.rows import in_memory, stored_rows, whole_floats
from polyquant.types import Checkpoint, Codec, Floats, Shape, TensorMap, Weight, as_matrix

__all__ = ["derived_maps", "made"]


def derived_maps(checkpoint: Checkpoint, record: Architecture, hyper: Hyper) -> dict[str, TensorMap]:
    """Decoder's name -> its map, of all tensors of a Hugging Face checkpoint that are not stored as they are, and of what an old GGUF file holds whole.
    Raises InputError for tensors that do not fit.

    Rotated rows stay as they lie: the decoder rotates what it finds (Architecture.rotates_pairs).
    """
    if checkpoint.naming == "gguf":
        return _whole_maps(checkpoint, record, hyper)
    found = gguf_maps(checkpoint.values(), record, hyper, checkpoint.path, paired=False)
    return {m.target: m for m in found.maps if not _as_stored(m, record)}


def _whole_maps(checkpoint: Checkpoint, record: Architecture, hyper: Hyper) -> dict[str, TensorMap]:
    """Parts of tensors that GGUF files split since some day, and that this one holds under a name of their own: DeepSeek's attn_kv_b."""
    moves = {move.source: move for move in record.moves if not move.stacked}
    whole: dict[str, Weight] = {}
    for weight in checkpoint.values() if moves else ():
        name = record.names.to_hf(weight.name)
        if name is None or (place := record.names.within(name)) is None or (move := moves.get(place[1])) is None:
            continue
        if not any(f"blk.{place[0]}.{target}" in checkpoint for target in move.targets):
            whole[name] = replace(weight, name=name)
    found = gguf_maps(whole.values(), record, hyper, checkpoint.path, paired=False)
    stored = {name: record.names.to_gguf(name) or name for name in whole}
    return {m.target: replace(m, sources=tuple(stored[s] for s in m.sources)) for m in found.maps}


def _as_stored(made: TensorMap, record: Architecture) -> bool:
    """True where the name table alone leads to the tensor."""
    single = len(made.sources) == 1 and isinstance(made.op, Same)
    return single and made.target in (record.names.to_gguf(made.sources[0]), made.sources[0])


def _takes(codec: Codec, shape: Shape) -> bool:
    """False for stacks where a codec takes matrices alone."""
    try:
        codec.specs(shape)
    except CodecError:
        return False
    return True


def made(checkpoint: Checkpoint, wanted: TensorMap) -> Weight:
    """The tensor in memory, under the name of its source where it has one alone. Raises CodecError, InputError for sources that cannot be read."""
    weights = [checkpoint[name] for name in wanted.sources]
    if len(weights) == 1 and isinstance(wanted.op, Same):
        return Weight(wanted.target, wanted.shape, weights[0].codec, weights[0].arrays)
    codec, shapes = weights[0].codec, [w.shape for w in weights]
    alike = all(w.codec is codec for w in weights) and codec.row_sliced and _takes(codec, wanted.shape)
    if alike and wanted.op.keeps_rows(shapes):
        parts = stored_rows(weights, wanted.op, slice(0, as_matrix(wanted.shape)[0]))
    else:
        codec = registry.codec("f32")
        parts = codec.pack(Floats(whole_floats(weights, wanted.op).reshape(as_matrix(wanted.shape))))
    name = wanted.sources[0] if len(wanted.sources) == 1 else wanted.target
    return Weight(name, wanted.shape, codec, in_memory(parts))
