"""Tensors that a Hugging Face folder does not store in the decoder's form: expert stacks, parts of fused
projections, norms plus 1.

They are made in memory on request: from stored rows if the operation preserves rows and all sources share a codec, else
as float32.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from polyquant import registry
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.record import Architecture
from polyquant.architectures.tensors import gguf_maps
from polyquant.errors import CodecError
from polyquant.operations import Same
from polyquant.rows import in_memory, stored_rows, whole_floats
from polyquant.runtime import headers_only
from polyquant.types import Checkpoint, Codec, Floats, Shape, TensorMap, Weight, as_matrix

__all__ = ["derived_maps", "materialize"]

_SMALL = 1 << 20
"""Weights of the largest tensor that is made when only headers are checked."""


def derived_maps(checkpoint: Checkpoint, record: Architecture, hyper: Hyper) -> dict[str, TensorMap]:
    """Return decoder's name -> map, of all tensors that are not stored in the decoder's form.

    Covers a Hugging Face checkpoint, and tensors that an old GGUF file holds unsplit. Rotated rows keep their stored
    order; the decoder rotates accordingly (Architecture.rotates_pairs). Raises InputError for tensors that do not fit.
    """
    if checkpoint.naming == "gguf":
        return _unsplit_maps(checkpoint, record, hyper)
    mapped = gguf_maps(checkpoint.values(), record, hyper, checkpoint.path, paired=False)
    return {m.target: m for m in mapped.maps if not _as_stored(m, record)}


def _unsplit_maps(checkpoint: Checkpoint, record: Architecture, hyper: Hyper) -> dict[str, TensorMap]:
    """Return the maps of tensors that recent GGUF files split and this one holds unsplit: DeepSeek's attn_kv_b."""
    moves = {move.source: move for move in record.moves if not move.stacked}
    unsplit: dict[str, Weight] = {}
    for weight in checkpoint.values() if moves else ():
        name = record.names.to_hf(weight.name)
        if name is None or (place := record.names.within(name)) is None or (move := moves.get(place[1])) is None:
            continue
        if not any(f"blk.{place[0]}.{target}" in checkpoint for target in move.targets):
            unsplit[name] = replace(weight, name=name)
    mapped = gguf_maps(unsplit.values(), record, hyper, checkpoint.path, paired=False)
    stored = {name: record.names.to_gguf(name) or name for name in unsplit}
    return {m.target: replace(m, sources=tuple(stored[s] for s in m.sources)) for m in mapped.maps}


def _as_stored(tensor_map: TensorMap, record: Architecture) -> bool:
    """True if the tensor is only renamed."""
    single = len(tensor_map.sources) == 1 and isinstance(tensor_map.op, Same)
    return single and tensor_map.target in (record.names.to_gguf(tensor_map.sources[0]), tensor_map.sources[0])


def _supports(codec: Codec, shape: Shape) -> bool:
    """False for stacks if the codec supports matrices only."""
    try:
        codec.specs(shape)
    except CodecError:
        return False
    return True


def materialize(checkpoint: Checkpoint, tensor_map: TensorMap) -> Weight:
    """Make the tensor in memory, under the name of its source if it has only one.

    Inside `headers_only` large tensors are zeros. Raises CodecError; InputError for sources that cannot be read.
    """
    weights = [checkpoint[name] for name in tensor_map.sources]
    if len(weights) == 1 and isinstance(tensor_map.op, Same):
        return Weight(tensor_map.target, tensor_map.shape, weights[0].codec, weights[0].arrays)
    name = tensor_map.sources[0] if len(tensor_map.sources) == 1 else tensor_map.target
    if headers_only.active() and math.prod(tensor_map.shape) > _SMALL:
        floats = registry.codec("f32")
        specs = floats.specs(tensor_map.shape)
        zeros = {part: np.broadcast_to(np.zeros((), s.dtype), s.shape) for part, s in specs.items()}
        return Weight(name, tensor_map.shape, floats, in_memory(zeros))
    codec, shapes = weights[0].codec, [w.shape for w in weights]
    same_codec = all(w.codec is codec for w in weights) and codec.row_sliced and _supports(codec, tensor_map.shape)
    if same_codec and tensor_map.op.keeps_rows(shapes):
        parts = stored_rows(weights, tensor_map.op, slice(0, as_matrix(tensor_map.shape)[0]))
    else:
        codec = registry.codec("f32")
        parts = codec.pack(Floats(whole_floats(weights, tensor_map.op).reshape(as_matrix(tensor_map.shape))))
    return Weight(name, tensor_map.shape, codec, in_memory(parts))
