"""Find the codec of a linear layer from its type and the dtypes and shapes of its parts: every layout of every dialect.

scales [N, G]   G > 1 groups of K / G columns        [N, 1], [N], [1] (one for the matrix)
4 bits          [N, K] one code per byte; [N, K / 2] and [N / 2, K] two: the rows of the scales identify the latter;
                the first two are distinguished by the group size if stated, else by the version: files with a
                `version` are packed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import CodecError, InputError
from polyquant.types import Shape

__all__ = ["Facts", "codec_for"]

_SCALES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_WORDS: dict[np.dtype[Any], str] = {
    np.dtype(np.int8): "I8", np.dtype(np.int32): "I32", np.dtype(np.int64): "I64", np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Facts:
    """dtype (safetensors' name) and shape of a part, from the header."""

    dtype: str
    shape: Shape


def codec_for(
    kind: str, parts: Mapping[str, Facts], *, group_size: int = 0, packed: bool = False
) -> tuple[MsModelSlim, Shape]:
    """(codec, [N, K]) of a layer of that kind (a key of TYPES).

    group_size: from the description, 0 if not stated; packed: the description has a version. Raises InputError
    (message, expected, found) for a part that is missing, unexpected, or of a dtype or shape that does not fit the
    others.
    """
    codes = _needed(parts, "weight")
    if codes.dtype != "I8" or len(codes.shape) != 2 or 0 in codes.shape:
        raise InputError("weight has the wrong dtype or shape", expected="I8 [N, K]", found=_shown(codes))
    static = kind in ("w8a8", "w8a8s", "w8a8.mix")
    scale = parts.get("weight_scale")
    if scale is None and (not static or kind == "w8a8.mix"):
        _needed(parts, "weight_scale")
    second = "weight_scale_second" in parts
    columns = parts["weight_scale_second"] if second else scale
    packing = _packing(kind, codes.shape, columns, group_size, packed)
    n, k = codes.shape[0] * (2 if packing == "n" else 1), codes.shape[1] * (2 if packing == "k" else 1)
    group = _group(columns, k, "weight_scale_second" if second else "weight_scale")
    grid = _dtype(_needed(parts, "input_scale"), "input_scale") if static else ""
    dtype = grid if scale is None else _dtype(scale, "weight_scale")
    one = scale.shape == (1,) and n != 1 if scale is not None else _needed(parts, "deq_scale").shape == (1,) and n != 1
    wanted = {
        "group": group, "second": second, "tensor": one, "dtype": dtype, "grid": "" if grid == dtype else grid,
        "flat": scale is not None and len(scale.shape) == 1 and not one,
        "wide": static and _needed(parts, "deq_scale").dtype == "I64", "scales": static and scale is not None,
        "packing": packing, "sums": _sums(parts),
    }  # fmt: skip
    try:
        codec = MsModelSlim(kind).configure(**wanted)
        specs = codec.specs((n, k))
    except CodecError as e:
        raise InputError(e.message, expected=e.expected, found=e.found) from None
    _refuse_misfits(parts, {part: Facts(_WORDS[s.dtype], s.shape) for part, s in specs.items()})
    return codec, (n, k)


def _refuse_misfits(parts: Mapping[str, Facts], wanted: Mapping[str, Facts]) -> None:
    for part, facts in wanted.items():
        actual = _needed(parts, part)
        if actual != facts:
            raise InputError(f"{part} has the wrong dtype or shape", expected=_shown(facts), found=_shown(actual))
    for part in parts:
        if part not in wanted:
            raise InputError(f"{part} does not belong to this type", expected=", ".join(wanted), found=part)


def _needed(parts: Mapping[str, Facts], part: str) -> Facts:
    if part not in parts:
        raise InputError(f"{part} is missing", expected=part, found=", ".join(parts))
    return parts[part]


def _shown(facts: Facts) -> str:
    return f"{facts.dtype} {list(facts.shape)}"


def _dtype(facts: Facts, part: str) -> str:
    if facts.dtype not in _SCALES:
        raise InputError(f"{part} has the wrong dtype", expected="F32, F16 or BF16", found=facts.dtype)
    return _SCALES[facts.dtype]


def _packing(kind: str, codes: Shape, scale: Facts | None, group_size: int, packed: bool) -> str:
    """The packing of a part `weight` of this shape: "", "k" or "n"."""
    if not kind.startswith("w4") or scale is None or not scale.shape:
        return ""
    rows, columns = scale.shape[0], scale.shape[1] if len(scale.shape) == 2 else 1
    if rows == 2 * codes[0]:
        return "n"
    if columns > 1 and group_size and columns * group_size in (codes[1], 2 * codes[1]):
        return "k" if columns * group_size == 2 * codes[1] else ""
    return "k" if packed else ""


def _group(scale: Facts | None, k: int, part: str) -> int:
    """Columns per scale, 0 for one per row. Raises InputError if the groups do not divide K."""
    if scale is None or len(scale.shape) != 2 or scale.shape[1] == 1:
        return 0
    groups = scale.shape[1]
    if groups == 0 or k % groups:
        raise InputError(
            f"the groups of {part} do not divide the columns of the weight",
            expected=f"a number that divides {k}",
            found=groups,
        )
    return k // groups


def _sums(parts: Mapping[str, Facts]) -> int:
    """Columns of scale_bias."""
    if "scale_bias" not in parts:
        return 0
    shape = parts["scale_bias"].shape
    if len(shape) != 2 or shape[1] not in (1, 16):
        raise InputError("scale_bias has the wrong shape", expected="[N, 1] or [N, 16]", found=list(shape))
    return shape[1]
