"""Conversions between codecs of affine integers that keep every code.

    msModelSlim, GPTQ, AWQ, compressed-tensors, MLX, ...   codes, scales and zero points or biases per row or group
    q4_0 q5_0 q8_0      blocks of 32 with a scale             q4_1 q5_1   with a scale and a minimum
    ternaries           -1, 0, +1 with one scale, or one per 256 or 32 columns

codecs/keeping.py decides which codecs can hold the codes of which. A weight with a group index per column ("act-order")
has no contiguous groups: only codecs that store the index can hold it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.capabilities import claims
from polyquant.codecs.affine_codec import AffineCodec, stored_codes, stored_table
from polyquant.codecs.chatglm_int import ChatGLMInt
from polyquant.codecs.compressed_tensors import CompressedTensors
from polyquant.codecs.keeping import Condition, Fate, HoldsIntegers, Integers, Tables, Verdict, keeps, once, resolved
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.codecs.read_only import ReadOnlyBlocks
from polyquant.errors import CodecError
from polyquant.ops import code_streams, halves
from polyquant.types import (
    F32,
    U8,
    Affine,
    Blocks,
    Codec,
    Floats,
    Parts,
    ScaledFloats,
    Shape,
    Ternary,
    Weight,
    as_matrix,
)

__all__ = [
    "affine_of",
    "as_blocks",
    "block_codes",
    "blocks_of",
    "cut_at",
    "exact_msmodelslim",
    "floats_of",
    "integers_of",
    "only_read",
    "recoded",
    "reordered",
    "same_codes",
    "unchanged",
    "verdict",
]

_BLOCK = code_streams.BLOCK
_TABLE = 1 << 14
"""Scales of ggml blocks that are read at once."""
_BLOCKS = {
    "q4_0": Integers(4, _BLOCK), "q4_1": Integers(4, _BLOCK, zero="bias"), "q5_0": Integers(5, _BLOCK),
    "q5_1": Integers(5, _BLOCK, zero="bias"), "q8_0": Integers(8, _BLOCK),
}  # fmt: skip
"""ggml types of evenly spaced levels, smallest first."""
_TERNARY_GROUPS = {"tq1_0": 256, "tq2_0": 256, "trinity.tq2_0": 32}
_WORDS = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


def floats_of(config: Mapping[str, Any]) -> str:
    """Return the float codec for a model's decoded weights: the dtype of its config.json, else bf16."""
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, Mapping) else {}):
        for key in ("torch_dtype", "dtype"):
            dtype = place.get(key)
            if isinstance(dtype, str) and dtype.removeprefix("torch.") in _WORDS:
                return _WORDS[dtype.removeprefix("torch.")]
    return "bf16"


def only_read(codec: Codec) -> bool:
    """True for codecs that GGUF, Trellis and plain Hugging Face folders cannot store."""
    return codec.form in (Affine, ScaledFloats) or isinstance(codec, ReadOnlyBlocks)


def integers_of(codec: Codec) -> Integers | None:
    """The traits of a codec of affine integers, of ternary codes, or a ggml type of even levels; None for others."""
    if claims(codec, HoldsIntegers):  # type: ignore[type-abstract]
        return codec.integers
    if codec.form is Ternary:
        grouped = codec.name in _TERNARY_GROUPS
        return Integers(
            2, _TERNARY_GROUPS.get(codec.name, 0), "f16" if grouped else "f32", tensor=not grouped, ternary=True
        )
    return _BLOCKS.get(codec.name)


# ------------------------------------------------------------ into affine codes


def affine_of(codec: Codec, parts: Parts, shape: Shape, rows: slice | None = None) -> Affine | None:
    """Return a weight's affine codes, or only of `rows` (parts are complete); None for a codec that is not affine.

    Raises CodecError if a part does not fit.
    """
    if rows is not None and hasattr(codec, "unpack_rows"):
        out: Affine = codec.unpack_rows(parts, shape, rows)
        return out
    codes: Affine | None = None
    if codec.form is Affine:
        codes = codec.unpack(parts, shape)
    elif codec.form is Ternary:
        codes = _of_ternary(codec.unpack(parts, shape))
    elif codec.name in _BLOCKS:
        codes = _of_blocks(_BLOCKS[codec.name], codec.unpack(parts, shape).blocks, as_matrix(shape))
    return codes if rows is None or codes is None else reordered(codes, np.arange(rows.start, rows.stop))


def _of_ternary(form: Ternary) -> Affine:
    groups = form.scale.shape[-1]
    scale = np.ascontiguousarray(np.broadcast_to(form.scale.reshape(-1, groups), (len(form.codes), groups)))
    return Affine(2, form.codes, scale, np.zeros_like(scale))


def block_codes(codec: Codec, parts: Parts, rows: slice | NDArray[np.int64]) -> Affine | None:
    """Codes of these rows, if the codec is a ggml type of even levels."""
    if codec.name not in _BLOCKS:
        return None
    blocks, traits = parts["blocks"], _BLOCKS[codec.name]
    chosen = np.ascontiguousarray(blocks[rows])
    size = code_streams.block_bytes(traits.bits, 2 if traits.zero == "bias" else 1)
    return _of_blocks(traits, chosen, (len(chosen), blocks.shape[1] // size * _BLOCK))


def cut_at(codec: Codec) -> tuple[int, int]:
    """Rows and columns at whose multiples the parts of a matrix can be cut into weights of the same codec; 0: not at
    all.
    """
    tile: tuple[int, int] | None = getattr(codec, "tile", None)
    if tile is not None and claims(codec, HoldsIntegers):  # type: ignore[type-abstract]
        return tile
    if codec.form is Floats or codec.name in _BLOCKS:
        return (1, codec.granule[1]) if codec.row_sliced else (0, 0)
    return (1, 0) if codec.row_sliced else (0, 0)


def _of_blocks(traits: Integers, blocks: U8, matrix: tuple[int, int]) -> Affine:
    """Codes of ggml blocks, uint8 [rows, K / 32 * size]."""
    rows, k = matrix
    count, numbers = rows * (k // _BLOCK), 2 if traits.zero == "bias" else 1
    shift = 2 ** (traits.bits - 1) if traits.bits < 8 else 0
    codes, stored = code_streams.unpack_blocks(blocks.reshape(count, -1), traits.bits, numbers, shift)
    scale, offset, bias = _offsets(traits, halves.widen(stored.T).reshape(numbers, rows, k // _BLOCK))
    return Affine(traits.bits, codes.view(np.int8).reshape(rows, k), scale, offset, bias=bias)


# ------------------------------------------------------------ which codec holds which codes


def verdict(weight: Weight, target: Codec) -> Verdict | None:
    """The fate of this weight's codes in another codec, without conditions; None if one of them is not affine.

    Reads its scales and zero points where they decide.
    """
    have, want = integers_of(weight.codec), integers_of(target)
    if have is None or want is None or (target.form is Affine and not _takes(target, weight.shape)):
        return None
    return _decided(weight, have, want, target.name)


def _decided(weight: Weight, have: Integers, want: Integers, name: str) -> Verdict:
    """The verdict for a target of this name."""
    matrix = as_matrix(weight.shape)
    general = keeps(have, want, matrix[1])
    if general.fate is Fate.IMPOSSIBLE or not general.conditions:
        return general
    if general.conditions == (Condition.BIASES_FIT,) and weight.codec.name in _BLOCKS and _doubles(have, want):
        return once(weight, name, lambda: resolved(general, have, want, _largest(weight, matrix)))
    return once(weight, name, lambda: resolved(general, have, want, _tables(weight, matrix)))


def _doubles(have: Integers, want: Integers) -> bool:
    """True if every bias is a power of two times a scale of the same type: only overflow can round it."""
    return have.zero == "none" and have.scale == want.scale == "f16"


def _largest(weight: Weight, matrix: tuple[int, int]) -> Iterator[Tables]:
    """The largest magnitude of the scales of ggml blocks without biases, as a table with one entry."""
    most = 0
    for blocks in _some_blocks(weight, matrix):
        scales = blocks[:, :2].view("<u2")
        most = max(most, int((scales & np.uint16(0x7FFF)).max(initial=0)))  # floats are ordered as integers are
    largest = np.array([[most]], np.uint16).view(np.float16).astype(np.float32)
    yield largest, np.zeros_like(largest), None


def _tables(weight: Weight, matrix: tuple[int, int]) -> Iterator[Tables]:
    """Scales, offsets and biases per group, float32 [some rows, G]."""
    codec = weight.codec
    if isinstance(codec, AffineCodec):
        yield codec.group_tables(weight.parts, matrix)[:3]
    elif isinstance(codec, MsModelSlim):
        yield codec.tables(weight.parts, matrix)
    elif codec.name in _BLOCKS:
        yield from _block_tables(_BLOCKS[codec.name], weight, matrix)
    else:
        codes = affine_of(codec, weight.parts, matrix)
        assert codes is not None
        yield codes.scale, codes.offset, codes.bias


def _block_tables(traits: Integers, weight: Weight, matrix: tuple[int, int]) -> Iterator[Tables]:
    """The numbers of ggml blocks, without the codes."""
    numbers, groups = 2 if traits.zero == "bias" else 1, matrix[1] // _BLOCK
    for blocks in _some_blocks(weight, matrix):
        heads = np.ascontiguousarray(blocks[:, : 2 * numbers])
        yield _offsets(traits, halves.widen(heads.view("<f2").T).reshape(numbers, -1, groups))


def _some_blocks(weight: Weight, matrix: tuple[int, int]) -> Iterator[U8]:
    """The ggml blocks of some rows, uint8 [blocks, bytes], so few that they stay in cache.

    They are read, not mapped: pages of a map would count as memory of this process.
    """
    groups = matrix[1] // _BLOCK
    step = max(1, _TABLE // max(1, groups))
    for a in range(0, matrix[0], step):
        rows = weight.read(slice(a, a + step))["blocks"]
        yield rows.reshape(len(rows) * groups, -1)


def _offsets(traits: Integers, tables: F32) -> Tables:
    """Scales, offsets and biases of blocks with one or two numbers [1 or 2, rows, groups]."""
    bias = tables[1] if len(tables) == 2 else None
    return tables[0], np.full_like(tables[0], 0 if bias is None else -(2 ** (traits.bits - 1))), bias


def unchanged(weight: Weight, target: Codec) -> bool:
    """True if every weight keeps its value in `target`."""
    if weight.codec.name == target.name:
        return True
    want, found = integers_of(target), verdict(weight, target)
    derived = want is not None and want.fixed  # its scales are computed from those of inputs, and rounded
    return not derived and found is not None and found.fate is Fate.EXACT


def _takes(target: Codec, shape: Shape) -> bool:
    """True for a matrix, and for a stack if the codec stores its matrices one below the other."""
    try:
        return len(shape) == 2 or (len(shape) == 3 and target.row_sliced and bool(target.specs(shape)))
    except CodecError:
        return False


def same_codes(weight: Weight, target: Codec) -> bool:
    """True if `target` can hold a weight's codes unchanged; its scales may be rounded."""
    if weight.codec.name == target.name:
        return True
    if target.form is not Affine and target.name not in _BLOCKS:
        return False
    if weight.codec.form is not Affine and target.form is not Affine:
        return False
    found = verdict(weight, target)
    return found is not None and found.fate is not Fate.IMPOSSIBLE


# ------------------------------------------------------------ msModelSlim


def exact_msmodelslim(codec: Codec, shape: Shape) -> MsModelSlim | None:
    """Return the msModelSlim codec (default layout) that holds a weight's codes unchanged, or None."""
    if isinstance(codec, MsModelSlim):
        return codec
    have = integers_of(codec)
    if len(shape) != 2 or have is None or have.ordered or have.zero == "bias":
        return None
    if (
        isinstance(codec, CompressedTensors)
        and codec.bits == 8
        and not (codec.group or codec.zeros)
        and (codec.static or codec.dynamic)
    ):
        return MsModelSlim("w8a8" if codec.static else "w8a8.dynamic")
    narrow = have.bits <= 4 and codec.form is not Ternary and not isinstance(codec, ChatGLMInt)
    group = 0 if have.group == shape[1] else have.group
    if group and shape[1] % group:
        return None
    return MsModelSlim(f"w{4 if narrow else 8}a16", group)


# ------------------------------------------------------------ ggml blocks


def as_blocks(codec: Codec, shape: Shape) -> tuple[str, ...]:
    """Return the ggml types that can hold a weight's codes if its scales and zero points allow, smallest first."""
    have = integers_of(codec) if codec.form is Affine else None
    if have is None or as_matrix(shape)[1] % _BLOCK:
        return ()
    columns = as_matrix(shape)[1]
    return tuple(name for name, want in _BLOCKS.items() if keeps(have, want, columns).fate is not Fate.IMPOSSIBLE)


def blocks_of(weight: Weight) -> str | None:
    """Return the smallest ggml type that holds this weight's codes, or None. Reads its scales and zero points."""
    best = None
    for name in as_blocks(weight.codec, weight.shape):
        have = integers_of(weight.codec)
        assert have is not None
        found = _decided(weight, have, _BLOCKS[name], name)
        if found.fate is Fate.EXACT:
            return name
        if found.fate is Fate.ROUNDED and best is None:
            best = name
    return best


def recoded(codes: Affine, target: Codec) -> dict[str, NDArray[Any]]:
    """Pack codes as parts of a codec that holds them (`same_codes`).

    Raises CodecError for offsets or scales it cannot store.
    """
    if isinstance(target, MsModelSlim):
        return target.pack(_plain(codes, target))
    if target.form is Affine:
        return dict(target.pack(codes))
    return dict(target.pack(Blocks(target.name, _packed_blocks(codes, target.name))))


def _plain(codes: Affine, target: MsModelSlim) -> Affine:
    """Codes with zero points instead of biases, and the target's bits. Raises CodecError."""
    if codes.bias is not None:
        got = stored_codes(target.name, codes, target.integers, codes.scale.shape[1])
        half = 2 ** (target.bits - 1)
        signed = (got.codes - np.uint8(half)).view(np.int8)
        return Affine(target.bits, signed, got.scale, got.zero - np.float32(half))
    return replace(codes, bits=target.bits) if codes.bits < target.bits else codes


def reordered(codes: Affine, order: NDArray[np.int64]) -> Affine:
    """Permute rows: row i of the result is row order[i] of `codes`."""
    grid = codes.activation
    if grid is not None:
        deq = grid.deq_scale if grid.deq_scale.size == 1 else grid.deq_scale[order]
        grid = replace(grid, deq_scale=deq, quant_bias=grid.quant_bias[order])
    return replace(
        codes, codes=codes.codes[order], scale=codes.scale[order], offset=codes.offset[order], activation=grid,
        bias=None if codes.bias is None else codes.bias[order],
    )  # fmt: skip


def _packed_blocks(codes: Affine, name: str) -> U8:
    """Blocks of 32, uint8 [rows, K / 32 * size]. Raises CodecError."""
    rows, k = codes.codes.shape
    want, half = _BLOCKS[name], np.dtype(np.float16)
    got = stored_codes(name, codes, want, k // _BLOCK)
    numbers = [stored_table(name, "scales", got.scale, half)]
    if got.bias is not None:
        numbers.append(stored_table(name, "minima", got.bias, half))
    stored = np.stack([n.reshape(-1) for n in numbers], 1)
    shift = (got.shift - (128 if want.bits == 8 else 0)) % 256
    return code_streams.pack_blocks(got.raw.reshape(-1, _BLOCK), stored, want.bits, shift).reshape(rows, -1)
