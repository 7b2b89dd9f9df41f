"""Smoothing of a checkpoint: which norm or linear layer feeds which linears, and what becomes of their weights so that the model computes the same.

    m1, shift   input norm -> q, k, v; norm after attention -> gate, up
    m4          these, and v -> o, up -> down: rows of the first are divided by what columns of the second are multiplied with

Who feeds whom is said by the architecture's record. Ternary weights have no columns to scale: models trained so are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from polyquant.architectures.changes import PairedRows
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.parts import Feed
from polyquant.architectures.record import Architecture
from polyquant.calibration.statistics import InputRanges
from polyquant.errors import UnsupportedError
from polyquant.operations import Index
from polyquant.quantizers.smooth import ALPHA, shared_by_heads, smoothing_scale
from polyquant.runtime import identity
from polyquant.types import F32, Checkpoint, Codec, Floats, Weight, as_matrix

__all__ = ["Link", "Smoothing", "floats", "last_norm", "links", "rows_of"]

_CHUNK = 1 << 22  # weights that are dequantized at a time


@dataclass(frozen=True, slots=True)
class Link:
    """One product to smooth: the outputs of `feeder` (a norm's weight, or rows from `start` on of a linear's) are what `readers` read.

    heads: (of values, numbers of each) where heads share them, else None.
    """

    feeder: str
    readers: tuple[str, ...]
    start: int | None = None
    heads: tuple[int, int] | None = None

    @property
    def norm(self) -> bool:
        """True if a norm feeds it."""
        return self.start is None


def links(source: Checkpoint, method: str) -> list[Link]:
    """What a method smooths, layer by layer. Raises UnsupportedError for a model whose structure is not known."""
    record = identity.architecture(source)
    if source.naming == "gguf" or record.ternary is not None:
        raise UnsupportedError(
            f"smoothing does not know which norm feeds which layer in '{record.name}' ({source.format})",
            file=source.path,
            hint="leave out --smooth",
        )
    names = identity.names(source, record)
    hyper = identity.hyper_parameters(source, record, names)
    feeds = (*record.feeds("norm"), *(record.feeds("values", "product") if method == "m4" else ()))
    out = []
    for index in range(hyper.layers):
        here = record.layer.shapes(hyper, index)  # another part in each layer of a hybrid
        for feed in feeds:
            stems = [f"blk.{index}.{s}.weight" for s in (feed.source, *(r for r in feed.readers if r in here))]
            if len(stems) > 1 and all(stem in names for stem in stems) and _scales(record, names, stems):
                _refuse_stacks(source, [names[stem] for stem in stems])
                out.append(_link(source, feed, [names[stem] for stem in stems], hyper))
    if not out:
        raise UnsupportedError(
            "smoothing finds no norms before its linear layers", file=source.path, hint="leave out --smooth"
        )
    return out


def _scales(record: Architecture, names: Mapping[str, str], stems: Sequence[str]) -> bool:
    """False where rows and columns of these tensors, a feeder and its readers, do not lie in the folder as the decoder takes them (Conv1D, norms as their
    distance from one, rows in another order), or a norm has a bias, which nobody would divide."""
    feeder, *readers = stems
    biased = feeder.endswith("_norm.weight") and f"{feeder.removesuffix('.weight')}.bias" in names
    return (
        record.change(feeder) is None
        and not biased
        and all(isinstance(record.change(r), PairedRows | None) for r in readers)
    )


def _refuse_stacks(source: Checkpoint, names: Sequence[str]) -> None:
    """Raises UnsupportedError for experts: each reads inputs of its own, one norm feeds them all."""
    for name in names:
        if len(source[name].shape) > 2:
            raise UnsupportedError(
                "smoothing does not spread over the experts of a stack",
                file=source.path,
                tensor=name,
                found=list(source[name].shape),
                hint="leave out --smooth",
            )


def _link(source: Checkpoint, feed: Feed, names: Sequence[str], hyper: Hyper) -> Link:
    """names: of the feeder and of its readers."""
    feeder, readers = names[0], tuple(names[1:])
    if feed.kind == "norm":
        return Link(feeder, readers)
    rows = source[feeder].shape[0]
    if feed.kind == "values":
        return Link(feeder, readers, rows - hyper.value_width, (hyper.kv_heads, hyper.head_size))
    return Link(feeder, readers, rows - source[readers[0]].shape[1])


def last_norm(source: Checkpoint) -> str | None:
    """The weight of the norm before the output head."""
    record = identity.architecture(source)
    return identity.names(source, record).get(f"{record.ends.last_stem}.weight")


def rows_of(weight: Weight) -> list[slice]:
    """Blocks of rows of a matrix that are dequantized at a time."""
    rows, k = as_matrix(weight.shape)
    step = max(1, _CHUNK // max(1, k)) if weight.codec.row_sliced else max(1, rows)
    return [slice(a, min(rows, a + step)) for a in range(0, rows, step)]


def floats(weight: Weight, rows: slice) -> F32:
    """Rows of a weight [R, K]."""
    if not weight.codec.row_sliced:
        return weight.codec.dequantize(weight.read(), weight.shape)[rows]
    return weight.codec.dequantize(weight.read(rows), (rows.stop - rows.start, weight.shape[1]))


def _as_stored(codec: Codec, x: F32) -> F32:
    """A vector [K] as a file holds it."""
    return codec.dequantize(codec.pack(Floats(x[None])), x.shape)


@dataclass(slots=True)
class Smoothing:
    """What smoothing does to tensors, by name; fills as the calibration comes to the layers.

    columns: [K], columns of a linear's weight are multiplied by it. rows: [N], its rows and its bias are divided by it. shift: [K] or absent: is taken from
    the inputs, before they are divided by `columns`. norms: [K], a norm's new weight; norm_bias: [K], added to what a norm gives. biases: [N], W @ shift
    of the float weight, added to a linear's bias.

    Norms are rounded to the type that they are stored in first, and the linears made to fit what is left of them: the model computes the same but for
    float32's rounding, however short the norm's own type is.
    """

    source: Checkpoint
    method: str
    columns: dict[str, F32] = field(default_factory=dict)
    rows: dict[str, F32] = field(default_factory=dict)
    shift: dict[str, F32] = field(default_factory=dict)
    norms: dict[str, F32] = field(default_factory=dict)
    norm_bias: dict[str, F32] = field(default_factory=dict)
    biases: dict[str, F32] = field(default_factory=dict)

    def add(self, link: Link, inputs: Mapping[str, InputRanges]) -> None:
        """Smooth one product. inputs: of the linears of its layer. Raises InputError."""
        low, high = inputs[link.readers[0]].extremes
        half = np.float32(0.5)
        shift: F32 | None = (low + high) * half if self.method == "shift" else None
        size = np.maximum(-low, high) if shift is None else (high - low) * half
        scale = smoothing_scale(size, self._column_sizes(link.readers), ALPHA[self.method])
        if link.start is None:
            scale, shift = self._norm(link.feeder, scale, shift)
        else:
            fed = scale
            if link.heads is not None:
                scale, fed = shared_by_heads(scale, *link.heads)
            rows = np.ones(self.source[link.feeder].shape[0], np.float32)
            rows[link.start :] = fed
            self.rows[link.feeder] = rows
        for name in link.readers:
            self.columns[name] = scale
            if shift is not None:
                self.shift[name] = shift
                self.biases[name] = self._shifted(name, shift)

    def _norm(self, name: str, scale: F32, shift: F32 | None) -> tuple[F32, F32 | None]:
        """Divide a norm by the scale -> (scale, shift) that the rounded norm really has."""
        weight = self.source[name]
        old = weight.codec.dequantize(weight.read(), weight.shape)
        new = _as_stored(weight.codec, old / scale)
        kept = (new != 0) & np.isfinite(new) & (old != 0)
        new = np.where(kept, new, old)
        scale = np.where(kept, old / np.where(kept, new, 1), np.float32(1)).astype(np.float32)
        self.norms[name] = new.astype(np.float32)
        if shift is not None:
            self.norm_bias[name] = _as_stored(weight.codec, -shift / scale)
            shift = -self.norm_bias[name] * scale
        return scale, shift

    def weight(self, name: str, w: F32, rows: slice | Index) -> F32:
        """Rows of a linear's float weight as smoothing leaves them, [R, K]."""
        if name in self.columns:
            w = w * self.columns[name]
        if name in self.rows:
            w = w / self.rows[name][rows, None]
        return w

    def bias(self, name: str, bias: F32 | None) -> F32 | None:
        """The bias [N] of the linear whose weight is `name`; None if it has none and needs none."""
        added, divided = self.biases.get(name), self.rows.get(name)
        if added is None and (bias is None or divided is None):
            return bias
        total = np.zeros(self.source[name].shape[0], np.float32)
        for part in (bias, added):
            total += 0 if part is None else part
        return total if divided is None else np.asarray(total / divided, np.float32)

    def _column_sizes(self, names: Sequence[str]) -> F32:
        """max|w| of every column over weights that read the same, [K], as rows stand now."""
        found = np.zeros(self.source[names[0]].shape[1], np.float32)
        for name in names:
            for rows in rows_of(self.source[name]):
                w = self.weight(name, floats(self.source[name], rows), rows)
                np.maximum(found, np.abs(w).max(0, initial=0), out=found)
        return found

    def _shifted(self, name: str, shift: F32) -> F32:
        """W @ shift, [N]."""
        weight = self.source[name]
        return np.concatenate([floats(weight, rows) @ shift for rows in rows_of(weight)])
