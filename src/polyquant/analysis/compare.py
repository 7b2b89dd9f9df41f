"""How far one checkpoint is from another, tensor by tensor: SNR, cosine, largest error, share of equal codes; totals.

Two formats call the same tensor by different names and keep some of its rows in another order: both sides are first said in
GGUF's words, so that a Hugging Face folder compares with the GGUF made of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.architectures import translate
from polyquant.codecs.tl import Tile
from polyquant.errors import PlanError
from polyquant.formats.steps import Progress
from polyquant.opening import accepted, detect, open_checkpoint
from polyquant.ops.metrics import ErrorSums, error_sums
from polyquant.quantizers.absmean import absmean_floats
from polyquant.types import F32, Checkpoint, Ternary, Weight, as_matrix

__all__ = ["Comparison", "TensorComparison", "compare", "compare_checkpoints"]

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """One tensor: codecs of both sides, error of b against a, share of weights whose codes are equal (None: other forms)."""

    name: str
    shape: tuple[int, ...]
    a: str
    b: str
    error: ErrorSums
    equal_codes: float | None
    b_bytes: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """All tensors that both have, and the names that only one has."""

    a: str
    b: str
    tensors: tuple[TensorComparison, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def error(self) -> ErrorSums:
        """Sums over all common tensors."""
        return sum((t.error for t in self.tensors), ErrorSums())

    @property
    def bpw(self) -> float:
        """Effective bits per weight of b over the common tensors."""
        return 8 * sum(t.b_bytes for t in self.tensors) / max(1, sum(math.prod(t.shape) for t in self.tensors))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""

        def figures(e: ErrorSums) -> dict[str, float]:
            return {"snr_db": e.snr, "rrmse": e.rrmse, "cosine": e.cosine, "max_error": e.worst}

        return {
            "a": self.a,
            "b": self.b,
            "bpw": self.bpw,
            **figures(self.error),
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "tensors": [
                {
                    "name": t.name,
                    "shape": list(t.shape),
                    "a": t.a,
                    "b": t.b,
                    "equal_codes": t.equal_codes,
                    "bytes": t.b_bytes,
                    **figures(t.error),
                }
                for t in self.tensors
            ],
        }


@dataclass(frozen=True, slots=True)
class _Side:
    weight: Weight
    order: NDArray[np.int64] | None
    ternarize: bool


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    ternary_layout: str | None = None,
    a_layout: str | None = None,
    tile: Tile | None = None,
    repair: bool = False,
    axes: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Comparison:
    """Compare the checkpoint at `b` with the truth at `a`.

    ternary_layout and a_layout say how I2_S lies in b and in a, tile (BM, BK, bm) how TL1 and TL2 lie in either;
    repair and axes are those of a Trellis folder b. Raises InputError.
    """
    said = {"tile": tile}
    left = open_checkpoint(a, ternary_layout=a_layout, **accepted(detect(a)[0], said))
    right = open_checkpoint(b, ternary_layout=ternary_layout, repair=repair, axes=axes, **accepted(detect(b)[0], said))
    return compare_checkpoints(left, right, on_progress=on_progress)


def compare_checkpoints(
    a: Checkpoint, b: Checkpoint, *, on_progress: Callable[[Progress], None] | None = None
) -> Comparison:
    """Compare opened checkpoints. Raises PlanError if they have no tensor in common or shapes contradict."""
    left, right = _sides(a, b)
    common = [n for n in left if n in right]
    if not common:
        raise PlanError(f"no tensor of {b.path} is in {a.path}", hint="are these the same model?")
    total = sum(math.prod(left[n].weight.shape) for n in common)
    done, out = 0, []
    for name in common:
        out.append(_tensor(name, left[name], right[name]))
        done += math.prod(left[name].weight.shape)
        if on_progress is not None:
            on_progress(Progress(done, total, name, 0.0))
    return Comparison(
        str(a.path), str(b.path), tuple(out), tuple(n for n in left if n not in right), tuple(n for n in right if n not in left)
    )  # fmt: skip


def _sides(a: Checkpoint, b: Checkpoint) -> tuple[dict[str, _Side], dict[str, _Side]]:
    def plain(c: Checkpoint) -> dict[str, _Side]:
        return {w.name: _Side(w, None, False) for w in c.values()}

    def said_in_gguf(c: Checkpoint) -> dict[str, _Side]:
        maps = translate.to_gguf(c, with_tokenizer=False).tensors
        return {t.target: _Side(c[t.source], t.row_order, t.ternarize) for t in maps}

    if a.naming == b.naming:
        return plain(a), plain(b)  # also where config.json is missing
    return tuple(plain(c) if c.naming == "gguf" else said_in_gguf(c) for c in (a, b))  # type: ignore[return-value]


def _tensor(name: str, a: _Side, b: _Side) -> TensorComparison:
    shape = a.weight.shape
    if shape != b.weight.shape:
        raise PlanError("the two have different shapes", tensor=name, expected=list(shape), found=list(b.weight.shape))
    equal = _equal_codes(a, b)
    rows, k = as_matrix(shape)
    step = max(1, _BLOCK // max(1, k))
    whole_a, whole_b = _whole(a), _whole(b)
    error = ErrorSums()
    for start in range(0, rows, step):
        part = slice(start, min(rows, start + step))
        error += error_sums(_rows(a, whole_a, part), _rows(b, whole_b, part))
    return TensorComparison(name, shape, str(a.weight.codec), str(b.weight.codec), error, equal, b.weight.nbytes)


def _whole(side: _Side) -> F32 | None:
    """The dequantized tensor where it cannot be cut by rows; a BitNet master weight as its codes say."""
    if side.ternarize:
        return absmean_floats(side.weight)
    if side.weight.codec.row_sliced:
        return None
    w = side.weight.codec.dequantize(side.weight.read(), side.weight.shape)
    return w.reshape(as_matrix(side.weight.shape))


def _rows(side: _Side, whole: F32 | None, part: slice) -> F32:
    if side.order is not None and len(side.weight.shape) == 1:
        return side.weight.dequantize()[None, side.order]
    rows: slice | NDArray[np.int64] = part if side.order is None else side.order[part]
    if whole is not None:
        return np.ascontiguousarray(whole[rows])
    k = as_matrix(side.weight.shape)[1]
    if isinstance(rows, slice):
        return side.weight.codec.dequantize(side.weight.read(rows), (part.stop - part.start, k))
    low, high = int(rows.min()), int(rows.max()) + 1
    return side.weight.codec.dequantize(side.weight.read(slice(low, high)), (high - low, k))[rows - low]


def _equal_codes(a: _Side, b: _Side) -> float | None:
    """Share of weights with equal codes: ternaries by code, equal codecs by their bytes; None where codes cannot be compared."""
    shape = a.weight.shape
    if a.weight.codec.form is Ternary and b.weight.codec.form is Ternary:
        x: Ternary = a.weight.codec.unpack(a.weight.read(), shape)
        y: Ternary = b.weight.codec.unpack(b.weight.read(), shape)
        left = x.codes if a.order is None else x.codes[a.order]
        right = y.codes if b.order is None else y.codes[b.order]
        return float(np.mean(left == right)) if left.size else 1.0
    if a.weight.codec.name == b.weight.codec.name and a.order is None and b.order is None:
        mine, theirs = a.weight.read(), b.weight.read()
        same = sum(int((x.view(np.uint8) == theirs[part].view(np.uint8)).sum()) for part, x in mine.items())
        return same / max(1, sum(x.nbytes for x in mine.values()))
    return None
