"""Smoothing of a checkpoint: which norm or linear layer feeds which linears, and what becomes of their weights so that the model computes the same.

    m1, shift   input norm -> q, k, v; norm after attention -> gate, up
    m4          these, and v -> o, up -> down: rows of the first are divided by what columns of the second are multiplied with

The norm before experts feeds them all, the router and the shared expert: one scale for all. Its numbers are powers of two, which no float type rounds: the
router, which is stored in half precision, gives the logits that it gave, and chooses as it did. up -> down has a scale of
its own in each expert, of the tokens that were routed to it. Who feeds whom is said by the architecture's record. Ternary weights have no columns to scale:
models trained so are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from polyquant.architectures.changes import PairedRows
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.parts import Feed
from polyquant.architectures.record import Architecture
from polyquant.calibration.hessians import LEAST_INPUTS
from polyquant.calibration.statistics import InputRanges
from polyquant.errors import UnsupportedError
from polyquant.formats.linears import is_linear
from polyquant.operations import Index, Stack
from polyquant.quantizers.smooth import ALPHA, power_of_two, shared_by_heads, smoothing_scale
from polyquant.rows import matrix_name
from polyquant.runtime import identity
from polyquant.runtime.derived import derived_maps
from polyquant.types import F32, Checkpoint, Codec, Floats, Weight, as_matrix

__all__ = ["Link", "Smoothing", "expert_families", "floats", "last_norm", "left_alone", "links", "rows_of"]

_CHUNK = 1 << 22  # weights that are dequantized at a time


@dataclass(frozen=True, slots=True)
class Link:
    """One product to smooth: the outputs of `feeder` (a norm's weight, or rows from `start` on of a linear's) are what `readers` read.

    heads: (of values, numbers of each) where heads share them, else None. routed: it is one expert's: left alone where the text hardly reaches it.
    """

    feeder: str
    readers: tuple[str, ...]
    start: int | None = None
    heads: tuple[int, int] | None = None
    routed: bool = False

    @property
    def norm(self) -> bool:
        """True if a norm feeds it."""
        return self.start is None


def links(source: Checkpoint, method: str) -> list[Link]:
    """What a method smooths, layer by layer. Raises UnsupportedError for a model whose structure is not known."""
    found = [link for links, _ in _by_feed(source, method) for link in links]
    if not found:
        raise UnsupportedError(
            "smoothing finds no norms before its linear layers", file=source.path, hint="leave out --smooth"
        )
    return found


def left_alone(source: Checkpoint, method: str) -> dict[str, str]:
    """Norms before experts that a method cannot smooth -> why. Raises as `links`."""
    return {name: why for _, left in _by_feed(source, method) for name, why in left.items()}


def _by_feed(source: Checkpoint, method: str) -> Iterator[tuple[list[Link], dict[str, str]]]:
    """Of each feed of each layer: links, and norms that are left alone."""
    record = identity.architecture(source)
    if source.naming == "gguf" or record.ternary is not None:
        raise UnsupportedError(
            f"smoothing does not know which norm feeds which layer in '{record.name}' ({source.format})",
            file=source.path,
            hint="leave out --smooth",
        )
    layers = _Layers(source, record)
    feeds = (*record.feeds("norm"), *(record.feeds("values", "product") if method == "m4" else ()))
    for block in layers.blocks:
        for feed in feeds:
            yield layers.links(block, feed, method)


class _Layers:
    """The layers of a folder: which of its tensors a feed speaks of."""

    def __init__(self, source: Checkpoint, record: Architecture) -> None:
        self.source, self.record = source, record
        self.names = identity.names(source, record)
        self.hyper = identity.hyper_parameters(source, record, self.names)
        self.derived = derived_maps(source, record, self.hyper)
        ends = ".attn_norm.weight"
        self.blocks = list(dict.fromkeys(n.removesuffix(ends[1:]) for n in self.names if n.endswith(ends)))

    def links(self, block: str, feed: Feed, method: str) -> tuple[list[Link], dict[str, str]]:
        """See _by_feed."""
        shapes = self.record.layer.shapes(self.hyper, int(block.split(".")[1]))
        here = [r for r in feed.readers if r in shapes or f"{block}{r}.weight" in self.names]
        stems = [f"{block}{stem}.weight" for stem in (feed.source, *here)]
        if not here or not self._scales(stems):
            return [], {}
        found = [self._matrices(stem) for stem in stems]
        routed = any(stem in self.derived for stem in stems)
        if [] in found:
            stacked = self._stack(stems) if feed.kind == "norm" and found[0] else None
            return [], {found[0][0]: f"{stacked} holds all experts in one tensor"} if stacked else {}
        if feed.kind == "norm":
            if routed and method == "shift":
                return [], {found[0][0]: "router and experts have no bias that could take a shift"}
            return [Link(found[0][0], tuple(r for names in found[1:] for r in names))], {}
        pairs = zip(*found, strict=True) if len({len(names) for names in found}) == 1 else ()
        return [_link(self.source, feed, names, self.hyper, routed=routed) for names in pairs], {}

    def _matrices(self, stem: str) -> list[str]:
        """The tensors of a stem in the folder: one, or one for each expert; [] where they lie in another way."""
        if stem in self.names:
            return [self.names[stem]] if len(self.source[self.names[stem]].shape) < 3 else []
        made = self.derived.get(stem)
        alone = made is not None and isinstance(made.op, Stack) and all(len(self.source[n].shape) == 2 for n in made.sources)  # fmt: skip
        return list(made.sources) if made is not None and alone else []

    def _stack(self, stems: Sequence[str]) -> str | None:
        """The first tensor among those of the stems that holds several matrices."""
        sources = (n for stem in stems for n in (self.derived[stem].sources if stem in self.derived else (self.names.get(stem, ""),)))  # fmt: skip
        return next((n for n in sources if n in self.source and len(self.source[n].shape) > 2), None)

    def _scales(self, stems: Sequence[str]) -> bool:
        """False where rows and columns of these tensors, a feeder and its readers, do not lie in the folder as the decoder takes them (Conv1D, norms as
        their distance from one, rows in another order), or a norm has a bias, which nobody would divide."""
        feeder, *readers = stems
        biased = feeder.endswith("_norm.weight") and f"{feeder.removesuffix('.weight')}.bias" in self.names
        change = self.record.change
        return change(feeder) is None and not biased and all(isinstance(change(r), PairedRows | None) for r in readers)


def _link(source: Checkpoint, feed: Feed, names: Sequence[str], hyper: Hyper, *, routed: bool) -> Link:
    """names: of a linear layer that feeds, and of its readers."""
    feeder, readers = names[0], tuple(names[1:])
    rows = source[feeder].shape[0]
    if feed.kind == "values":
        return Link(feeder, readers, rows - hyper.value_width, (hyper.kv_heads, hyper.head_size))
    return Link(feeder, readers, rows - source[readers[0]].shape[1], routed=routed)


def expert_families(source: Checkpoint) -> dict[str, tuple[str, ...]]:
    """Matrix of an expert, as calibration calls it -> those of all experts of its stack. Raises as `links`."""
    out: dict[str, tuple[str, ...]] = {}
    for made in _Layers(source, identity.architecture(source)).derived.values():
        if isinstance(made.op, Stack):
            out |= dict.fromkeys(made.sources, made.sources)
    for weight in source.values():
        if len(weight.shape) == 3:
            family = tuple(matrix_name(weight.name, e) for e in range(weight.shape[0]))
            out |= dict.fromkeys(family, family)
    return out


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
        """Smooth one product. inputs: of the first reader. Raises InputError.

        An expert that fewer than 64 tokens reached stays what it is: a channel that is small in them may be large in others.
        """
        if link.routed and inputs[link.readers[0]].count < LEAST_INPUTS:
            return
        low, high = inputs[link.readers[0]].extremes
        half = np.float32(0.5)
        shift: F32 | None = (low + high) * half if self.method == "shift" else None
        size = np.maximum(-low, high) if shift is None else (high - low) * half
        rounded = [r for r in link.readers if is_linear(r, self.source[r].shape)]  # a router stays float
        scale = smoothing_scale(size, self._column_sizes(rounded or link.readers), ALPHA[self.method])
        if link.norm and len(rounded) < len(link.readers):
            scale = power_of_two(scale)
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
