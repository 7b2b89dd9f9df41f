"""Transcoding between ternary codecs: codes stay equal, and any change of the scale is reported.

    one scale per tensor   i2_s.*, tl1, tl2 (float32), hf_bitnet.* (bf16; bitlinear stores 1 / scale)
    block scales           tq1_0, tq2_0 (256), trinity.tq2_0 (32), all fp16; 0 for a block of zeros
    none                   trinity.i2_s

Block scales merge into one only if they are equal. Layouts of four symbols per byte convert byte by byte, all others
through int8 codes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.hf_bitnet import HFBitNet
from polyquant.codecs.i2_s import I2S
from polyquant.codecs.tl import TL
from polyquant.errors import UnsupportedError
from polyquant.ops import native
from polyquant.types import F32, I8, Codec, Parts, Shape, Ternary

__all__ = ["ScaleChange", "ScaleFate", "transcode"]

_STEP = 1 << 14  # bytes per step of a layout change; their int8 codes fit in cache
_LANES = (I2S, HFBitNet)
_SCRATCH = 1 << 22  # no byte-wise path if the common block size of both layouts exceeds this


class ScaleFate(Enum):
    """The change of the scale by transcoding."""

    KEPT = "kept exactly"
    ROUNDED = "rounded"
    DROPPED = "dropped"
    INVENTED = "set to 1"


@dataclass(frozen=True, slots=True)
class ScaleChange:
    """A change of scales.

    before, after: stored scales. relative: largest |after - before| / |before| over used scales.
    """

    fate: ScaleFate
    before: int
    after: int
    relative: float = 0.0

    @property
    def exact(self) -> bool:
        """True if every weight keeps its value."""
        return self.relative == 0.0 and self.fate in (ScaleFate.KEPT, ScaleFate.INVENTED)

    def __str__(self) -> str:
        if self.fate is ScaleFate.DROPPED:
            return "scale dropped: the target cannot store one"
        if self.fate is ScaleFate.INVENTED:
            return "scale set to 1: the source has none"
        rounded = f", by at most {self.relative:.2g} of its value" if self.fate is ScaleFate.ROUNDED else ""
        counts = f" ({self.before} equal scales merged into one)" if self.before > self.after == 1 else ""
        counts = f" (repeated for {self.after} blocks)" if self.before == 1 < self.after else counts
        return f"scale {self.fate.value}{rounded}{counts}"


def transcode(parts: Parts, shape: Shape, src: Codec, dst: Codec) -> tuple[dict[str, NDArray[Any]], ScaleChange]:
    """Convert parts of `src` to parts of `dst` with equal codes; also return the change of the scale.

    Raises UnsupportedError if the codecs differ in form or are not ternary; CodecError if the shape does not fit one of
    them, or if block scales differ and the target has one per tensor.
    """
    if src.form is not Ternary or dst.form is not Ternary:
        raise UnsupportedError(f"{src} and {dst} do not share ternary codes", hint="requantize")
    if isinstance(src, _LANES) and isinstance(dst, _LANES):
        moved = _by_bytes(parts, shape, src, dst)
        if moved is not None:
            return moved, _compare(src, dst, src.scale(parts, shape), dst.scale(moved, shape), None)
    form: Ternary = src.unpack(parts, shape)
    out = dst.pack(Ternary(form.codes, _coarsest(form)))
    return out, _compare(src, dst, form.scale, _scale(dst, out, shape), form.codes)


def _by_bytes(parts: Parts, shape: Shape, src: I2S | HFBitNet, dst: I2S | HFBitNet) -> dict[str, NDArray[Any]] | None:
    """Convert the layout without int8 codes of the whole weight; None where that is not possible."""
    lib, a, b = native.lib(), src.lanes(shape), dst.lanes(shape)
    if lib is None or a is None or b is None:
        return None
    unit = math.lcm(a.width, b.width)
    if unit > _SCRATCH:
        return None
    source = src.payload(parts, shape)
    out, payload = dst.frame(shape, src.scale(parts, shape)[0])
    lib.relayout_lanes(source, payload, -(-_STEP // unit) * unit, *a, *b)
    return dict(out)


def _scaleless(codec: Codec) -> bool:
    return isinstance(codec, I2S) and codec.trinity


def _scale(codec: Codec, parts: Parts, shape: Shape) -> F32:
    """Return the scales as stored, float32 [1] or [rows, groups]."""
    if isinstance(codec, (I2S, HFBitNet, TL)):
        return codec.scale(parts, shape)
    codes: Ternary = codec.unpack(parts, shape)
    return codes.scale


def _used(codes: I8, groups: int) -> NDArray[np.bool_]:
    """Return which groups have nonzero codes, bool [rows, groups]."""
    rows, k = codes.shape
    return np.asarray(codes.reshape(rows, groups, k // groups).any(axis=2))


def _coarsest(form: Ternary) -> F32:
    """Return the scale with neighbouring groups merged pairwise while they are equal or all zero."""
    scale, codes = form.scale, form.codes
    if scale.size <= 1:
        return scale
    used = _used(codes, scale.shape[1])
    scale = np.broadcast_to(scale, used.shape)
    while scale.shape[1] % 2 == 0:
        left, right = scale[:, 0::2], scale[:, 1::2]
        if not ((left == right) | ~(used[:, 0::2] & used[:, 1::2])).all():
            break
        scale, used = np.where(used[:, 0::2], left, right), used[:, 0::2] | used[:, 1::2]
    return np.ascontiguousarray(scale)


def _spread(scale: F32, groups: int) -> F32:
    """Expand the scale to float32 [1 or rows, groups]."""
    matrix = scale.reshape(-1, scale.shape[-1])
    return np.repeat(matrix, groups // matrix.shape[1], axis=1)


def _compare(src: Codec, dst: Codec, before: F32, after: F32, codes: I8 | None) -> ScaleChange:
    """Compare scales before and after. codes: tell which groups are used; None if both scales are per tensor."""
    if before.size == 0 or after.size == 0:
        return ScaleChange(ScaleFate.KEPT, before.size, after.size)
    groups = math.lcm(before.shape[-1], after.shape[-1])
    a, b = _spread(before, groups), _spread(after, groups)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        relative = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.abs(b - a) / np.abs(a))
    if codes is not None and relative.size > 1:
        relative = np.where(_used(codes, groups), relative, 0)
    worst = float(np.nan_to_num(relative, nan=np.inf).max(initial=0))
    if _scaleless(dst):
        fate = ScaleFate.DROPPED if worst else ScaleFate.KEPT
        return ScaleChange(fate, before.size, 0)
    if _scaleless(src):
        return ScaleChange(ScaleFate.INVENTED, 0, after.size)
    return ScaleChange(ScaleFate.ROUNDED if worst else ScaleFate.KEPT, before.size, after.size, worst)
