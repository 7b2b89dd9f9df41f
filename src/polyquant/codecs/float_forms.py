"""Conversions between codecs of small floats that keep every code.

    fp8.*  hf_mxfp8  hf_nvfp4.*       codecs/float_codec.py
    hf_mxfp4  mxfp4                   one set of blocks in two orders (codecs/hf_mxfp4.py)
    nvfp4  nvfp4.scaled               ggml's blocks of 64, without and with the scale of the tensor

codecs/keeping.py decides which codecs can hold the codes of which.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.capabilities import claims
from polyquant.codecs.arguments import stored_bytes
from polyquant.codecs.float_codec import FloatCodec, paired_codes, stored_scales
from polyquant.codecs.ggml_fp4 import MXFP4, NVFP4
from polyquant.codecs.ggml_nvfp4 import NVFP4_SCALED, NVFP4_SCALED_STATIC, ScaledNvfp4
from polyquant.codecs.hf_mxfp4 import HF_MXFP4
from polyquant.codecs.hf_nvfp4 import HFNvfp4
from polyquant.codecs.keeping import Fate, HoldsFloats, SmallFloats, Verdict, float_resolved, keeps, once
from polyquant.operations import Operation, Same, Stack
from polyquant.ops import small_floats
from polyquant.types import U8, Blocks, Codec, Parts, ScaledFloats, Shape, Weight, as_matrix

__all__ = [
    "RowsOf", "as_ggml", "for_stack", "moved", "moves_rows", "refloated", "same_floats", "scales_inputs", "scales_of",
    "small_floats_of", "stacks", "unfloated", "verdict",
]  # fmt: skip

_CHUNK = 1 << 22
_BLOCKS = {
    "mxfp4": SmallFloats("e2m1", "e8m0", (1, 32), finite=True),
    "nvfp4": SmallFloats("e2m1", "e4m3", (1, 16), finite=True),
}


def small_floats_of(codec: Codec) -> SmallFloats | None:
    """Traits of a codec of small floats; None for others."""
    if codec.name in _BLOCKS:
        return _BLOCKS[codec.name]
    return codec.floats if claims(codec, HoldsFloats) else None  # type: ignore[type-abstract]


def unfloated(codec: Codec, parts: Parts, shape: tuple[int, int], rows: slice | None = None) -> ScaledFloats:
    """The codes and scales of a weight, or only of `rows` (parts are complete). Raises CodecError if a part does not
    fit.
    """
    if isinstance(codec, FloatCodec):
        codes = codec.unpack_paired(parts, shape) if rows is None else None
        return codes or codec.unpack_rows(parts, shape, slice(0, shape[0]) if rows is None else rows)
    chosen = slice(None) if rows is None else rows
    if codec is HF_MXFP4:
        pairs, scale = (stored_bytes(codec.name, parts, key, spec).reshape(spec.shape)[chosen]
                        for key, spec in codec.specs(shape).items())  # fmt: skip
        return ScaledFloats("e2m1", pairs, "e8m0", scale, (1, 32), paired=True)
    return _of_blocks(codec.name, codec.unpack(parts, shape).blocks[chosen])


def _of_blocks(name: str, blocks: U8) -> ScaledFloats:
    kind, size, together = ("e4m3", 16, 4) if name == NVFP4.name else ("e8m0", 32, 1)
    stream, scale = small_floats.split_blocks(blocks, size, together)
    return ScaledFloats("e2m1", stream, kind, scale, (1, size), paired=True)


def refloated(codes: ScaledFloats, target: Codec) -> dict[str, NDArray[Any]]:
    """Pack codes as parts of a codec that holds them. Raises CodecError for scales it cannot store."""
    if isinstance(target, FloatCodec):
        return target.pack(codes)
    want = small_floats_of(target)
    assert want is not None, target.name
    size, (n, k) = want.block[1], codes.shape
    scale = stored_scales(target.name, codes, want, (n, k // size))
    if target is HF_MXFP4:
        return {"blocks": paired_codes(codes), "scales": scale}
    together = 4 if target.name == NVFP4.name else 1
    blocks = small_floats.join_blocks(paired_codes(codes), scale, size, together)
    return dict(target.pack(Blocks(NVFP4.name if together == 4 else MXFP4.name, blocks)))


def verdict(weight: Weight, target: Codec) -> Verdict | None:
    """The fate of this weight's codes in another codec, without conditions; None if one of them is not a codec of
    small floats. Reads its scales where they decide.
    """
    have, want = small_floats_of(weight.codec), small_floats_of(target)
    if have is None or want is None or not _takes(target, weight.shape):
        return None
    general = keeps(have, want)
    if general.fate is Fate.IMPOSSIBLE or not general.conditions:
        return general
    return once(weight, target.name, lambda: _decided(weight, general, want))


def _decided(weight: Weight, general: Verdict, want: SmallFloats) -> Verdict | None:
    """The verdict without conditions; reads all scales."""
    n, k = as_matrix(weight.shape)
    lines = math.lcm(*(line for line in _lines(weight.codec).values() if line))
    size = max(1, _CHUNK // max(1, k * lines)) * lines
    worst: Verdict | None = None
    for start in range(0, max(1, n), size):  # the parts are read, not mapped: a map of the file counts as memory
        rows = slice(start, min(n, start + size))
        shape = (rows.stop - start, k)
        found = float_resolved(general, want, scales_of(weight.codec, RowsOf(weight, rows), shape))
        if found.fate is Fate.IMPOSSIBLE:
            break
        worst = found if worst is None or found.fate is Fate.ROUNDED else worst
    return found if found.fate is Fate.IMPOSSIBLE else worst


def _takes(target: Codec, shape: Shape) -> bool:
    """True for a matrix, and for a stack if the codec stores its matrices one below the other."""
    if isinstance(target, ScaledNvfp4) and target.rows:
        return len(shape) == 2 or (len(shape) == 3 and target.rows == shape[-2])
    return len(shape) == 2 or not isinstance(target, FloatCodec) or (len(shape) == 3 and target.row_sliced)


def _lines(codec: Codec) -> Mapping[str, int]:
    """Part -> rows of the weight for one entry of its first axis; 0: one entry for all rows."""
    return codec.lines if isinstance(codec, FloatCodec) else dict.fromkeys(("blocks", "scales"), 1)


@dataclass(frozen=True, slots=True)
class RowsOf(Mapping[str, NDArray[Any]]):
    """Parts of some rows, as those of a separate weight, read on access. rows: begin with a block of each part."""

    weight: Weight
    rows: slice

    def __getitem__(self, key: str) -> NDArray[Any]:
        array, line = self.weight.arrays[key], _lines(self.weight.codec)[key]
        if not line:
            return array.read(0, array.spec.shape[0])
        return array.read(self.rows.start // line, -(-self.rows.stop // line))

    def __iter__(self) -> Iterator[str]:
        return iter(self.weight.arrays)

    def __len__(self) -> int:
        return len(self.weight.arrays)


def scales_of(codec: Codec, parts: Parts, matrix: tuple[int, int]) -> ScaledFloats:
    """The scales of a weight, without codes. Raises CodecError if a part does not fit."""
    if isinstance(codec, FloatCodec):
        return codec.tables(parts, matrix)
    scale = parts["scales"] if codec is HF_MXFP4 else _block_scales(codec.name, parts["blocks"])
    scale = scale.reshape(matrix[0], -1)
    want = small_floats_of(codec)
    assert want is not None
    return ScaledFloats("e2m1", np.empty((0, matrix[1]), np.uint8), want.scale, np.asarray(scale), want.block)


def _block_scales(name: str, blocks: NDArray[Any]) -> U8:
    """The scale bytes of ggml's blocks, a view if possible."""
    flat = np.asarray(blocks).reshape(-1, (NVFP4 if name == NVFP4.name else MXFP4).type_size)
    return flat[:, :4] if name == NVFP4.name else flat[:, 0]


def same_floats(weight: Weight, target: Codec) -> bool:
    """True if `target` can hold a weight's codes unchanged; its scales may be rounded."""
    found = verdict(weight, target)
    return found is not None and found.fate is not Fate.IMPOSSIBLE


def as_ggml(weights: Sequence[Weight], op: Operation) -> Codec | None:
    """The ggml type that holds the codes of all weights; None if there is none. Reads their scales.

    A stack of matrices with separate scales keeps one for each.
    """
    types = [_ggml_type(w) for w in weights]
    first = types[0]
    if len(types) == 1 or first is None:
        return first
    if first.row_sliced and all(t is first and w.codec.row_sliced for t, w in zip(types, weights, strict=True)):
        return first
    static = {scales_inputs(w.codec) for w in weights}
    alike = all(t is NVFP4 or isinstance(t, ScaledNvfp4) for t in types) and len(static) == 1
    if not alike or not isinstance(op, Stack):
        return None
    return for_stack(ScaledNvfp4(static.pop()), (len(types), *weights[0].shape))


def _ggml_type(weight: Weight) -> Codec | None:
    """The ggml type that holds this weight's codes; None if there is none."""
    have = small_floats_of(weight.codec)
    if have is None or have.element != "e2m1":
        return None
    types: tuple[Codec, ...] = (MXFP4,) if have.scale == "e8m0" else (NVFP4, NVFP4_SCALED)
    for codec in (NVFP4_SCALED_STATIC,) if scales_inputs(weight.codec) else types:
        found = verdict(weight, codec) if weight.shape[-1] % codec.granule[1] == 0 else None
        if found is not None and found.fate is not Fate.IMPOSSIBLE:  # the reciprocal of a scale may be rounded
            return codec
    return weight.codec if isinstance(weight.codec, ScaledNvfp4) and weight.codec.rows else None


def for_stack(codec: Codec, shape: Shape) -> Codec:
    """The codec with a scale for each matrix of a stack, as llama.cpp reads NVFP4 experts; others unchanged."""
    if not isinstance(codec, ScaledNvfp4):
        return codec
    return replace(codec, rows=shape[-2] if len(shape) == 3 else 0)


def stacks(target: Codec, op: Operation, shape: Shape) -> bool:
    """True if matrices [N, K] become one stack in which each keeps its scale."""
    return isinstance(op, Stack) and isinstance(target, ScaledNvfp4) and len(shape) == 2 and target.rows == shape[0]


def scales_inputs(codec: Codec) -> bool:
    """True for NVFP4 with a scale of the layer's inputs."""
    return isinstance(codec, HFNvfp4 | ScaledNvfp4) and codec.static


def moves_rows(codec: Codec, op: Operation) -> bool:
    """True if an operation that keeps rows keeps the codec's scales: each row has its own, or all rows share one."""
    have = small_floats_of(codec)
    if have is not None and have.rows:
        return isinstance(op, Same | Stack)
    return isinstance(op, Same) or (have is not None and have.block[0] in (0, 1))


def moved(codes: ScaledFloats, order: NDArray[np.int64]) -> ScaledFloats:
    """Permute rows: row i of the result is row order[i] of `codes`; their blocks have one row, or all."""
    scale = codes.scale[order] if codes.block[0] == 1 else codes.scale
    return replace(codes, codes=codes.codes[order], scale=scale)
