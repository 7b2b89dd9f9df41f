"""Compare two checkpoints tensor by tensor: SNR, cosine, largest error, share of equal codes; totals.

Formats differ in tensor names and in the order of some rows. Both sides are translated to GGUF's naming first, so that
a Hugging Face folder can be compared with the GGUF file made from it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.analysis.side import Reader, Side
from polyquant.architectures import translate
from polyquant.codecs.tl import Tile
from polyquant.errors import PlanError, printable
from polyquant.formats.progress import shows_progress
from polyquant.formats.steps import Progress
from polyquant.opening import accepted, detect, open_checkpoint
from polyquant.operations import Same
from polyquant.ops.metrics import ErrorSums, error_sums, stored_errors
from polyquant.ops.native import cores
from polyquant.tables import Row, Table, decibel, tensor_columns
from polyquant.types import Checkpoint, TensorMap, Ternary, as_matrix

__all__ = ["Comparison", "Named", "TensorComparison", "compare", "compare_checkpoints", "compare_tensor", "sides"]

_BLOCK = 1 << 20

Named = tuple[dict[str, Side], dict[str, Side]]
"""The tensors of two checkpoints, with the same names."""


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """One tensor: codecs of both sides, error of b against a, share of weights with equal codes (or None)."""

    name: str
    shape: tuple[int, ...]
    a: str
    b: str
    error: ErrorSums
    equal_codes: float | None
    b_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """The common tensors, and the names that only one side has."""

    a: str
    b: str
    tensors: tuple[TensorComparison, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    def __repr__(self) -> str:
        sides = f"{printable(self.b)} against {printable(self.a)}"
        alone = (
            f", {len(self.only_a)} only in the first, {len(self.only_b)} only in the second"
            if self.only_a or self.only_b
            else ""
        )
        figures = f"SNR {decibel(self.error.snr)}, {self.bpw:.3f} bits per weight"
        return f"<Comparison {sides}: {len(self.tensors)} tensors, {figures}{alone}>"

    def _repr_html_(self) -> str:
        rows = (
            (
                t.name,
                list(t.shape),
                t.a,
                t.b,
                decibel(t.error.snr),
                f"{t.error.cosine:.6f}",
                "" if t.equal_codes is None else f"{t.equal_codes:.2%}",
            )
            for t in self.tensors
        )
        columns = ("tensor", "shape", "first", "second", "SNR", "cosine", "equal codes")
        alone = [
            f"only in the {side}: {name}"
            for side, names in (("first", self.only_a), ("second", self.only_b))
            for name in names
        ]
        return Table(repr(self).strip("<>"), columns, rows, len(self.tensors), alone).html()

    def rows(self) -> list[Row]:
        """One row per common tensor: tensor, shape, weights, bytes and bpw (of b), a, b (codecs), snr_db, rrmse,
        cosine, max_error, equal_codes.
        """
        return [
            {
                **tensor_columns(t.name, t.shape, t.b_bytes), "a": t.a, "b": t.b, **t.error.columns(),
                "equal_codes": t.equal_codes,
            }
            for t in self.tensors
        ]  # fmt: skip

    @property
    def error(self) -> ErrorSums:
        """Error sums over all common tensors."""
        return sum((t.error for t in self.tensors), ErrorSums())

    @property
    def bpw(self) -> float:
        """Effective bits per weight of b over the common tensors."""
        return 8 * sum(t.b_bytes for t in self.tensors) / max(1, sum(math.prod(t.shape) for t in self.tensors))

    def to_json(self) -> dict[str, Any]:
        """The values as JSON-compatible types."""
        return {
            "a": self.a,
            "b": self.b,
            "bpw": self.bpw,
            **self.error.columns(),
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
                    **t.error.columns(),
                }
                for t in self.tensors
            ],
        }


@shows_progress("compare")
def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    ternary_layout: str | None = None,
    a_layout: str | None = None,
    tile: Tile | None = None,
    repair: bool = False,
    axes: str | None = None,
    progress: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Comparison:
    """Compare the checkpoint at `b` with the reference at `a`.

    ternary_layout, a_layout: I2_S layouts of b and of a; tile: (BM, BK, bm) of TL1 and TL2 in either; repair, axes:
    options of a Trellis folder b. Raises InputError.
    """
    tile_option = {"tile": tile}
    left = open_checkpoint(a, ternary_layout=a_layout, **accepted(detect(a)[0], tile_option))
    right = open_checkpoint(
        b, ternary_layout=ternary_layout, repair=repair, axes=axes, **accepted(detect(b)[0], tile_option)
    )
    return compare_checkpoints(left, right, on_progress=on_progress)


def compare_checkpoints(
    a: Checkpoint,
    b: Checkpoint,
    *,
    named: Named | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_tensor: Callable[[TensorComparison], None] = lambda compared: None,
) -> Comparison:
    """Compare opened checkpoints. named: what `sides(a, b)` returned, if the caller has it; on_tensor: called with each
    result.

    Raises PlanError if they have no tensor in common or shapes differ.
    """
    left, right = named or sides(a, b)
    common = [n for n in left if n in right]
    if not common:
        raise PlanError(f"no tensor of {b.path} is in {a.path}", hint="are these the same model?")
    total = sum(math.prod(left[n].shape) for n in common)
    done, out = 0, []
    for compared in _in_order(common, left, right):
        out.append(compared)
        on_tensor(compared)
        done += math.prod(compared.shape)
        if on_progress is not None:
            on_progress(Progress(done, total, compared.name, 0.0))
    return Comparison(
        str(a.path),
        str(b.path),
        tuple(out),
        tuple(n for n in left if n not in right),
        tuple(n for n in right if n not in left),
    )


def _in_order(names: Sequence[str], left: Mapping[str, Side], right: Mapping[str, Side]) -> Iterator[TensorComparison]:
    """Compare tensors on all cores; yields results in the order of the names.

    Of the tensors that cannot be read by rows, one is decoded at a time.
    """
    whole = Lock()

    def one(name: str) -> TensorComparison:
        a, b = left[name], right[name]
        with nullcontext() if a.streams and b.streams else whole:
            return compare_tensor(name, a, b)

    with ThreadPoolExecutor(cores()) as pool:
        try:
            yield from pool.map(one, names)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def sides(a: Checkpoint, b: Checkpoint) -> Named:
    """Return the tensors of both, with the same names: as stored, or by GGUF's names if they have different schemes.

    Folders of one model with different names (stacked, fused or separate experts) have those of transformers.
    """

    def plain(c: Checkpoint) -> dict[str, Side]:
        return {w.name: Side((w,), w.shape) for w in c.values()}

    def translated(c: Checkpoint, maps: Sequence[TensorMap]) -> dict[str, Side]:
        return {t.target: Side(tuple(c[n] for n in t.sources), t.shape, t.op, t.ternarize) for t in maps}

    if a.naming != b.naming:
        left, right = (
            plain(c) if c.naming == "gguf" else translated(c, translate.to_gguf(c, with_tokenizer=False).tensors)
            for c in (a, b)
        )
    elif a.naming == "hf" and a.keys() != b.keys():
        left, right = (translated(c, translate.usual_tensors(c)) for c in (a, b))
    else:
        left, right = plain(a), plain(b)
    return left, right


def compare_tensor(
    name: str, a: Side, b: Side, *, on_rows: Callable[[int, int], None] = lambda done, total: None
) -> TensorComparison:
    """Compare one tensor. on_rows: called with (rows done, all rows) after each block; may raise to stop.

    Raises PlanError if shapes differ.
    """
    shape = a.shape
    if shape != b.shape:
        raise PlanError("shapes differ", tensor=name, expected=list(shape), found=list(b.shape))
    equal = _equal_codes(a, b)
    rows, k = as_matrix(shape)
    step = max(1, _BLOCK // max(1, k))
    left, right = Reader(a), Reader(b)
    error = ErrorSums()
    for start in range(0, rows, step):
        part = slice(start, min(rows, start + step))
        error += _errors(left, right, part, k)
        on_rows(part.stop, rows)
    nbytes = sum(w.nbytes for w in b.weights)
    return TensorComparison(name, shape, a.codec, b.codec, error, equal, nbytes)


def _errors(left: Reader, right: Reader, part: slice, k: int) -> ErrorSums:
    """The sums over some rows of K columns, from stored blocks where both sides are such."""
    a, b = left.blocks, right.blocks
    if a is not None and b is not None:
        found = stored_errors(a, left.stored(part), b, right.stored(part), (part.stop - part.start) * k)
        if found is not None:
            return found
    return error_sums(left.rows(part), right.rows(part))


def _keeps_codes(side: Side) -> bool:
    """True if it consists of ternary codes with unchanged rows."""
    shapes = [w.shape for w in side.weights]
    return all(w.codec.form is Ternary for w in side.weights) and side.op.keeps_rows(shapes)


def _equal_codes(a: Side, b: Side) -> float | None:
    """Share of weights with equal codes: ternary by code, equal codecs by bytes; None if codes cannot be compared."""
    if _keeps_codes(a) and _keeps_codes(b):
        left, right = _codes(a), _codes(b)
        return float(np.mean(left == right)) if left.size else 1.0
    if isinstance(a.op, Same) and isinstance(b.op, Same) and a.weights[0].codec.name == b.weights[0].codec.name:
        mine, theirs = a.weights[0].read(), b.weights[0].read()
        same = sum(int((x.view(np.uint8) == theirs[part].view(np.uint8)).sum()) for part, x in mine.items())
        return same / max(1, sum(x.nbytes for x in mine.values()))
    return None


def _codes(side: Side) -> NDArray[np.int8]:
    """The ternary codes, int8 [rows, K]."""
    codes = [w.codec.unpack(w.read(), w.shape).codes for w in side.weights]
    index, shapes = np.arange(as_matrix(side.shape)[0]), [w.shape for w in side.weights]
    wanted = side.op.needs(index, shapes)
    return np.asarray(side.op.make([c[r] for c, r in zip(codes, wanted, strict=True)], index, shapes), np.int8)
