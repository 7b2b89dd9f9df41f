"""Smooth a checkpoint: scale norms or linear layers and their readers so that the model computes the same.

    m1, shift   input norm -> q, k, v; norm after attention -> gate, up
    m4, awq     these, and v -> o, up -> down: rows of the first are divided by the factors of the second's columns

The norm before experts feeds them all, the router and the shared expert: one scale for all. Its factors are powers of
two, which are exact in every float type: the router, stored in half precision, gives the same logits and makes the same
choices. up -> down has a separate scale in each expert, from its routed tokens. The architecture's record defines the
readers. Models with ternary weights, which have no columns to scale, are rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from polyquant.architectures.changes import PairedRows
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.parts import Feed
from polyquant.architectures.record import Architecture
from polyquant.calibration.hessians import LEAST_INPUTS
from polyquant.errors import UnsupportedError
from polyquant.formats.linears import is_linear
from polyquant.formats.steps import Step
from polyquant.operations import Index, Stack
from polyquant.ops import exact
from polyquant.quantizers.smooth import ALPHA, power_of_two, shared_by_heads, smoothing_scale
from polyquant.rows import matrix_name
from polyquant.runtime import identity
from polyquant.runtime.derived import derived_maps
from polyquant.types import F32, Action, Checkpoint, Codec, Floats, Weight, as_matrix

__all__ = ["Link", "Smoothing", "expert_families", "floats", "last_norm", "links", "marked", "rows_of", "unsmoothed"]

_CHUNK = 1 << 22  # weights dequantized at a time


@dataclass(frozen=True, slots=True)
class Link:
    """One product to smooth: the outputs of `feeder` (a norm's weight, or rows from `start` on of a linear layer) feed
    `readers`.

    heads: (number of value heads, size of each) if heads share values, else None. routed: belongs to one expert,
    skipped if the text hardly reaches it.
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
    """All links that a method smooths, layer by layer. Raises UnsupportedError for a model with unknown structure."""
    all_links = [link for links, _ in _by_feed(source, method) for link in links]
    if not all_links:
        raise UnsupportedError("smoothing found no norms before linear layers", file=source.path, hint="omit --smooth")
    return all_links


def marked(source: Checkpoint, steps: Sequence[Step], method: str) -> list[Step]:
    """The steps, with the ones whose floats smoothing changes marked as such. Raises as `links`."""
    smoothed = links(source, method)
    changed = {name for link in smoothed for name in (link.feeder, *link.readers)}
    changed |= {f"{name.removesuffix('.weight')}.bias" for name in changed}
    return [
        replace(
            s,
            action=Action.TRANSCODE if s.action is Action.COPY else s.action,
            exact=False,
            why=f"smoothed, {method}",
        )
        if changed & set(s.map.sources)
        else s
        for s in steps
    ]


def unsmoothed(source: Checkpoint, method: str) -> dict[str, str]:
    """Norms before experts that a method cannot smooth -> reason. Raises as `links`."""
    return {name: why for _, left in _by_feed(source, method) for name, why in left.items()}


def _by_feed(source: Checkpoint, method: str) -> Iterator[tuple[list[Link], dict[str, str]]]:
    """Yield links and unsmoothed norms of each feed of each layer."""
    record = identity.architecture(source)
    if source.naming == "gguf" or record.ternary is not None:
        raise UnsupportedError(
            f"smoothing does not support the architecture '{record.name}' in {source.format}",
            file=source.path,
            hint="omit --smooth",
        )
    layers = _Layers(source, record)
    feeds = (*record.feeds("norm"), *(record.feeds("values", "product") if method in ("m4", "awq") else ()))
    for block in layers.blocks:
        for feed in feeds:
            yield layers.links(block, feed, method)


class _Layers:
    """The layers of a folder, and the tensors of their feeds."""

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
        matrices = [self._matrices(stem) for stem in stems]
        routed = any(stem in self.derived for stem in stems)
        if [] in matrices:
            stacked = self._stack(stems) if feed.kind == "norm" and matrices[0] else None
            return [], {matrices[0][0]: f"{stacked} contains all experts in one tensor"} if stacked else {}
        if feed.kind == "norm":
            if routed and method == "shift":
                return [], {matrices[0][0]: "router and experts have no bias to absorb a shift"}
            return [Link(matrices[0][0], tuple(r for names in matrices[1:] for r in names))], {}
        pairs = zip(*matrices, strict=True) if len({len(names) for names in matrices}) == 1 else ()
        return [_link(self.source, feed, names, self.hyper, routed=routed) for names in pairs], {}

    def _matrices(self, stem: str) -> list[str]:
        """The tensors of a stem in the folder: one, or one per expert; [] if they are stored differently."""
        if stem in self.names:
            return [self.names[stem]] if len(self.source[self.names[stem]].shape) < 3 else []
        tensor_map = self.derived.get(stem)
        separate = (
            tensor_map is not None
            and isinstance(tensor_map.op, Stack)
            and all(len(self.source[n].shape) == 2 for n in tensor_map.sources)
        )
        return list(tensor_map.sources) if tensor_map is not None and separate else []

    def _stack(self, stems: Sequence[str]) -> str | None:
        """The first tensor of these stems that contains several matrices."""
        sources = (
            n
            for stem in stems
            for n in (self.derived[stem].sources if stem in self.derived else (self.names.get(stem, ""),))
        )
        return next((n for n in sources if n in self.source and len(self.source[n].shape) > 2), None)

    def _scales(self, stems: Sequence[str]) -> bool:
        """True if a feeder and its readers can be scaled.

        Not if their rows and columns are stored differently from the decoder's layout (Conv1D, norms as their distance
        from one, permuted rows), or if the norm has a bias, which would not be divided.
        """
        feeder, *readers = stems
        biased = feeder.endswith("_norm.weight") and f"{feeder.removesuffix('.weight')}.bias" in self.names
        change = self.record.change
        return change(feeder) is None and not biased and all(isinstance(change(r), PairedRows | None) for r in readers)


def _link(source: Checkpoint, feed: Feed, names: Sequence[str], hyper: Hyper, *, routed: bool) -> Link:
    """The link of a linear layer and its readers."""
    feeder, readers = names[0], tuple(names[1:])
    rows = source[feeder].shape[0]
    if feed.kind == "values":
        return Link(feeder, readers, rows - hyper.value_width, (hyper.kv_heads, hyper.head_size))
    return Link(feeder, readers, rows - source[readers[0]].shape[1], routed=routed)


def expert_families(source: Checkpoint) -> dict[str, tuple[str, ...]]:
    """Matrix of an expert, as named in calibration -> those of all experts of its stack. Raises as `links`."""
    out: dict[str, tuple[str, ...]] = {}
    for tensor_map in _Layers(source, identity.architecture(source)).derived.values():
        if isinstance(tensor_map.op, Stack):
            out |= dict.fromkeys(tensor_map.sources, tensor_map.sources)
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
    """Blocks of rows of a matrix to be dequantized at a time."""
    rows, k = as_matrix(weight.shape)
    step = max(1, _CHUNK // max(1, k)) if weight.codec.row_sliced else max(1, rows)
    return [slice(a, min(rows, a + step)) for a in range(0, rows, step)]


def floats(weight: Weight, rows: slice) -> F32:
    """Rows of a weight [R, K]."""
    if not weight.codec.row_sliced:
        return weight.codec.dequantize(weight.read(), weight.shape)[rows]
    return weight.codec.dequantize(weight.read(rows), (rows.stop - rows.start, weight.shape[1]))


def _as_stored(codec: Codec, x: F32) -> F32:
    """A vector [K] rounded to its stored type."""
    return codec.dequantize(codec.pack(Floats(x[None])), x.shape)


@dataclass(slots=True)
class Smoothing:
    """Smoothing factors by tensor name, filled as the calibration reaches the layers. A subclass may choose them
    differently (`_scale`).

    columns: [K], factors of a linear weight's columns. rows: [N], divisors of its rows and its bias. shift: [K] or
    absent: subtracted from the inputs before they are divided by `columns`. norms: [K], a norm's new weight; norm_bias:
    [K], added to a norm's outputs. biases: [N], W @ shift of the float weight, added to a linear layer's bias.

    Norms are first rounded to their stored type, and the linear layers adjusted to the result: the model computes the
    same except for float32 rounding, even if the norm's type is short.
    """

    source: Checkpoint
    method: str
    columns: dict[str, F32] = field(default_factory=dict)
    rows: dict[str, F32] = field(default_factory=dict)
    shift: dict[str, F32] = field(default_factory=dict)
    norms: dict[str, F32] = field(default_factory=dict)
    norm_bias: dict[str, F32] = field(default_factory=dict)
    biases: dict[str, F32] = field(default_factory=dict)

    def _scale(self, readers: Sequence[str], inputs: Any) -> tuple[F32, F32 | None]:
        """The factors of the columns of these readers and the shift of their inputs, [K] each. Raises InputError."""
        low, high = inputs.extremes
        half = np.float32(0.5)
        shift: F32 | None = (low + high) * half if self.method == "shift" else None
        size = np.maximum(-low, high) if shift is None else (high - low) * half
        return smoothing_scale(size, self._column_sizes(readers), ALPHA[self.method]), shift

    def add(self, link: Link, inputs: Mapping[str, Any]) -> None:
        """Smooth one product. inputs: of the first reader. Raises InputError.

        An expert reached by fewer than 64 tokens is unchanged: a channel that is small in them may be large in others.
        """
        if link.routed and inputs[link.readers[0]].count < LEAST_INPUTS:
            return
        rounded = [r for r in link.readers if is_linear(r, self.source[r].shape)]  # a router stays float
        scale, shift = self._scale(rounded or link.readers, inputs[link.readers[0]])
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
        """Divide a norm by the scale -> (scale, shift) realized by the rounded norm."""
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
        """Rows of a linear layer's smoothed float weight, [R, K]."""
        if name in self.columns:
            w = w * self.columns[name]
        if name in self.rows:
            w = w / self.rows[name][rows, None]
        return w

    def bias(self, name: str, bias: F32 | None) -> F32 | None:
        """The smoothed bias [N] of the linear layer with the weight `name`; None if it has and needs no bias."""
        added, divided = self.biases.get(name), self.rows.get(name)
        if added is None and (bias is None or divided is None):
            return bias
        total = np.zeros(self.source[name].shape[0], np.float32)
        for part in (bias, added):
            total += 0 if part is None else part
        return total if divided is None else np.asarray(total / divided, np.float32)

    def _column_sizes(self, names: Sequence[str]) -> F32:
        """max|w| of every column over weights with the same inputs, [K], with the current row factors."""
        largest = np.zeros(self.source[names[0]].shape[1], np.float32)
        for name in names:
            for rows in rows_of(self.source[name]):
                w = self.weight(name, floats(self.source[name], rows), rows)
                np.maximum(largest, np.abs(w).max(0, initial=0), out=largest)
        return largest

    def _shifted(self, name: str, shift: F32) -> F32:
        """W @ shift, [N]."""
        weight = self.source[name]
        return np.concatenate([exact.product(floats(weight, rows), shift[:, None])[:, 0] for rows in rows_of(weight)])
