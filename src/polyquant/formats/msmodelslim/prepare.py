"""Calibrate an msModelSlim folder: input ranges, smoothing, cache scales and Hessians from a run of the float model.

The model runs once, layer by layer; only a few values per channel are kept of each layer. With effort "max" it runs a
second time while the weights are quantized: a layer's Hessians are computed with its first weight and freed after its
last.

Each expert has the statistics of its routed tokens. An expert reached by fewer than 64 gets a range that includes the
inputs of its layer's other experts, no separate smoothing, and no Hessian; the note of its codes reports this.

Ranges are those of the float model. The tool's older calibrator quantizes the previous layers while it observes, so its
ranges of later layers include that noise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from polyquant.calibration.hessians import LEAST_INPUTS, GatheringStages, Hessians, Tick, part_of, too_few
from polyquant.calibration.stages import calibration_stages
from polyquant.calibration.statistics import CacheRanges, InputRanges
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import InputError, PolyquantError, UnsupportedError
from polyquant.formats.msmodelslim.options import MsModelSlimOptions
from polyquant.formats.smoothing import Link, Smoothing, expert_families, last_norm, links
from polyquant.operations import Index
from polyquant.quantizers.affine import cache_grid
from polyquant.registry import codec
from polyquant.runtime import identity
from polyquant.types import F32, Checkpoint, Codec, TensorSpec

__all__ = ["Prepared", "derived", "prepare"]

WINDOWS = 32
"""Windows of the calibration text without Hessians: extremes converge faster than mean products."""
_KEYS = ".self_attn.k_proj.weight"
_FUSED = ".self_attention.query_key_value.weight"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cache:
    """The cache scales of one attention. keys, values: tensor names without `.kv_cache_scale`; channels: of each."""

    keys: str
    values: str
    channels: int


def derived(source: Checkpoint, options: MsModelSlimOptions, quantized: Collection[str]) -> dict[str, TensorSpec]:
    """Tensors that the folder has in addition to the source's, by name.

    quantized: names of the weights that become codes. Raises UnsupportedError. norm.module.weight and norm.module.bias
    of the dialect v0 duplicate norm.weight and norm.bias, and are not listed.
    """
    out: dict[str, TensorSpec] = {}

    def add(name: str, size: int, kind: Codec) -> None:
        out[name] = TensorSpec(name, (size,), kind)

    own = codec("f32" if options.dialect == "v1" else options.dtype)
    for cache in _caches(source, source) if options.kv is not None else ():
        for name in (cache.keys, cache.values):
            add(f"{name}.kv_cache_scale", cache.channels, own)
            add(f"{name}.kv_cache_offset", cache.channels, own)
    if options.smooth is None:
        return out
    smoothed = links(source, options.smooth)
    for norm in _norms_with_bias(source, options, smoothed):
        weight = source[norm]
        add(_bias_of(norm), weight.shape[0], weight.codec if options.smooth == "shift" else codec("f32"))
    for name in (r for link in smoothed for r in link.readers) if options.smooth == "shift" else ():
        if _bias_of(name) not in source:
            kept = source[name].codec if name not in quantized else own
            add(_bias_of(name), source[name].shape[0], kept)
    return {name: spec for name, spec in out.items() if name not in source}


def _norms_with_bias(source: Checkpoint, options: MsModelSlimOptions, smoothed: Sequence[Link]) -> list[str]:
    """Norms that get a bias: shifted ones; in the older dialects every smoothed one and the last, with zeros."""
    norms = [link.feeder for link in smoothed if link.norm]
    if options.smooth == "shift":
        return norms
    last = last_norm(source)
    return [] if options.dialect == "v1" else [*norms, *([last] if last is not None else [])]


def _bias_of(weight: str) -> str:
    return f"{weight.removesuffix('.weight')}.bias"


def _caches(source: Checkpoint, names: Collection[str]) -> list[Cache]:
    """The attentions among `names`. Raises UnsupportedError if the whole checkpoint has none."""
    out = []
    for name in names:
        if name.endswith(_KEYS) and name in source:
            keys = name.removesuffix(".weight")
            out.append(Cache(keys, f"{keys[: -len('k_proj')]}v_proj", source[name].shape[0]))
        elif name.endswith(_FUSED) and name in source:
            fused, record = name.removesuffix(".weight"), identity.architecture(source)
            hyper = identity.hyper_parameters(source, record, identity.names(source, record))
            out.append(Cache(f"{fused}.k_proj", f"{fused}.v_proj", hyper.kv_heads * hyper.head_size))
    if not out and names is source:
        raise UnsupportedError(
            "no attention with a cache that could be quantized: no k_proj, no query_key_value",
            file=source.path,
            hint="omit --kv",
        )
    return out


class Prepared:
    """The results of the calibration.

    values: float32, all tensors of `derived`, and vectors of the source that smoothing changes, by name. notes: about
    linear layers with incomplete calibration.
    """

    def __init__(
        self,
        source: Checkpoint,
        smoothing: Smoothing | None,
        values: Mapping[str, F32],
        ranges: Mapping[str, tuple[float, float]],
        means: Mapping[str, F32],
        hessians: Hessians | None,
        notes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.values, self.notes = values, dict(notes)
        self._source, self._smoothing, self._ranges, self._means, self._hessians = (
            source,
            smoothing,
            ranges,
            means,
            hessians,
        )

    def changes(self, name: str) -> bool:
        """True if smoothing changes a matrix of the source, quantized or not."""
        return self._smoothing is not None and (name in self._smoothing.columns or name in self._smoothing.rows)

    def weight(self, name: str, w: F32, rows: slice | Index | None = None) -> F32:
        """Apply smoothing to floats w [R, K] of a linear layer, all or these rows of the source's weight."""
        return (
            w
            if self._smoothing is None
            else self._smoothing.weight(name, w, slice(0, len(w)) if rows is None else rows)
        )

    def bias(self, name: str) -> F32 | None:
        """The smoothed bias [N] of the linear layer with the weight `name`; None if it has none."""
        stored = self._source.weights.get(_bias_of(name))
        bias = None if stored is None else stored.codec.dequantize(stored.read(), stored.shape)
        return bias if self._smoothing is None else self._smoothing.bias(name, bias)

    def input_range(self, name: str) -> tuple[float, float] | None:
        """Minimum and maximum of the smoothed inputs of a static linear layer."""
        return self._ranges.get(name)

    def order(self, name: str) -> int:
        """The order in which to request Hessians."""
        return 0 if self._hessians is None else self._hessians.order(name)

    def hessian(self, name: str) -> F32 | None:
        """Mean of x x^T over the smoothed inputs of a linear layer, [K, K], for one request.

        None without effort "max" and for too few inputs.
        """
        h = None
        if self._hessians is not None and name in self._hessians.wanted:
            h, why = self._hessians.of(name)
            if why:
                self.notes.setdefault(name, why)
        if h is None or self._smoothing is None:
            return h
        shift, scale = self._smoothing.shift.get(name), self._smoothing.columns.get(name)
        if shift is not None:
            cross = np.outer(self._means[name], shift)
            h = h - cross - cross.T + np.outer(shift, shift)
        return h if scale is None else np.asarray(h / scale[:, None] / scale, np.float32)


def prepare(
    source: Checkpoint, options: MsModelSlimOptions, targets: Collection[tuple[str, MsModelSlim]], tick: Tick,
    stages_on: Callable[..., GatheringStages] | None = None, own: Iterable[str] | None = None,
) -> Prepared:  # fmt: skip
    """Run the calibration text through the float model.

    targets: the source of each quantized weight's inputs (Step.inputs), and its codec. tick: called with the finished
    share, from 0 to 1. stages_on: returns the stages on a text, by default of this process alone. own: the inputs whose
    Hessians this process will request, one for each request; by default those of all targets. Raises InputError,
    UnsupportedError.
    """
    assert options.calibration is not None
    wants_hessians = options.effort == "max"
    size = {} if wants_hessians else {"windows": WINDOWS}
    make = stages_on if stages_on is not None else partial(calibration_stages, source.path)
    stages = make(options.calibration, **size)
    half = 0.5 if wants_hessians else 1.0
    smoothing = Smoothing(source, options.smooth) if options.smooth is not None else None
    run = _CalibrationRun(source, options, {n for n, c in targets if c.static}, smoothing)
    run.run(stages, lambda share: tick(half * share))
    hessians = None
    if wants_hessians:
        wanted = [name for name, _ in targets]
        requests = wanted if own is None else own
        hessians = Hessians(stages, requests, lambda share: tick(0.5 + 0.5 * share), others=wanted)
    return Prepared(source, smoothing, run.values(), run.ranges, run.means, hessians, run.notes)


class _CalibrationRun:
    """The results of one run of the stages."""

    def __init__(
        self, source: Checkpoint, options: MsModelSlimOptions, static: set[str], smoothing: Smoothing | None
    ) -> None:
        self.source, self.options, self.static, self.smoothing = source, options, static, smoothing
        self.links = links(source, options.smooth) if options.smooth is not None else []
        self.ranges: dict[str, tuple[float, float]] = {}
        self.means: dict[str, F32] = {}
        self.cache: dict[str, F32] = {}
        self.notes: dict[str, str] = {}

    def run(self, stages: GatheringStages, tick: Tick) -> None:
        """Run all stages up to the last needed one."""
        shifted = self.options.smooth == "shift"  # input means are needed to shift Hessians
        readers = {r for link in self.links for r in (link.readers if shifted else link.readers[:1])}
        wanted = frozenset(self.static | readers)
        caches = [_caches(self.source, names) if self.options.kv is not None else [] for names in stages.names]
        last = max((i for i, names in enumerate(stages.names) if wanted & set(names) or caches[i]), default=-1)
        for i in range(last + 1):
            watched = CacheRanges(before=self.options.dialect != "v1") if caches[i] else None
            gathered = stages.gather(i, wanted, part_of(tick, i, last + 1), InputRanges, watched)
            self._smooth(gathered)
            rare = {name for name, inputs in gathered.items() if inputs.count < LEAST_INPUTS} & self.static
            families = expert_families(self.source) if rare else {}
            for name, inputs in gathered.items():
                self._range(name, [inputs, *self._others(name, families.get(name, ()), gathered)])
            for cache in caches[i]:
                assert watched is not None
                self._cache_grid(cache, watched)
        self._refuse_unseen()

    def _refuse_unseen(self) -> None:
        """Raise InputError for layers and caches that the text did not reach."""
        unfilled = [
            c.keys
            for c in (_caches(self.source, self.source) if self.options.kv is not None else ())
            if f"{c.keys}.kv_cache_scale" not in self.cache
        ]
        if unfilled:
            raise InputError(
                "not calibrated: the text does not reach this cache",
                file=self.source.path,
                tensor=unfilled[0],
                hint="omit --kv",
            )
        if unseen := self.static - set(self.ranges):
            name = min(unseen)
            raise InputError(
                "not calibrated: the model gives this layer no inputs",
                file=self.source.path,
                tensor=name,
                hint="keep it float: --keep"
                + (
                    f" '{module}'"
                    if (module := name.removesuffix(".weight")) != name
                    else " and its name in the folder"
                ),
            )

    def _smooth(self, gathered: Mapping[str, InputRanges]) -> None:
        for link in self.links:
            if self.smoothing is not None and link.readers[0] in gathered:
                self._named(link.readers[0], self.smoothing.add, link, gathered)

    def _others(self, name: str, family: Sequence[str], gathered: Mapping[str, InputRanges]) -> Iterator[InputRanges]:
        """Inputs of the other experts of its stack, if the text hardly reaches this one."""
        seen = gathered[name].count
        if seen >= LEAST_INPUTS or name not in self.static:
            return
        others = [gathered[n] for n in family if n != name and n in gathered and gathered[n].count]
        if others:
            self.notes[name] = f"{too_few(seen)}: the range includes the inputs of the other experts of its layer"
        yield from others

    def _range(self, name: str, inputs: Sequence[InputRanges]) -> None:
        columns, shift = None, None
        if self.smoothing is not None:
            columns, shift = self.smoothing.columns.get(name), self.smoothing.shift.get(name)
        if shift is not None:
            self.means[name] = inputs[0].mean
        if name in self.static:
            mean, seen = self.options.dialect != "v1", [x for x in inputs if x.count] or inputs
            ranges = [self._named(name, lambda x=x: x.range(columns, shift, mean=mean)) for x in seen]
            self.ranges[name] = min(low for low, _ in ranges), max(high for _, high in ranges)

    def _cache_grid(self, cache: Cache, watched: CacheRanges) -> None:
        for name, end in ((cache.keys, "keys"), (cache.values, "values")):
            low, high = self._named(name, getattr, watched, end)
            if len(low) != cache.channels:
                raise UnsupportedError(
                    "the cache and the layer that fills it have different numbers of channels",
                    file=self.source.path,
                    tensor=name,
                    expected=cache.channels,
                    found=len(low),
                )
            if (divided := self._value_rows(cache)) is not None and end == "values":
                low, high = low / divided, high / divided
            scale, offset = cache_grid(low, high, symmetric=self.options.kv != "c8.asym")
            self.cache |= {f"{name}.kv_cache_scale": scale, f"{name}.kv_cache_offset": offset}

    def _value_rows(self, cache: Cache) -> F32 | None:
        """The factors by which smoothing divides the values, [C]; None for none."""
        rows = {} if self.smoothing is None else self.smoothing.rows
        factors = rows.get(f"{cache.values}.weight", rows.get(f"{cache.values.removesuffix('.v_proj')}.weight"))
        return None if factors is None else factors[-cache.channels :]

    def _named(self, name: str, find: Callable[..., T], *arguments: object) -> T:
        """Call find(*arguments), adding the tensor's name to its errors."""
        try:
            return find(*arguments)
        except PolyquantError as problem:
            raise InputError(problem.message, file=self.source.path, tensor=name, hint=problem.hint) from None

    def values(self) -> dict[str, F32]:
        """Values of derived tensors and changed vectors."""
        out = dict(self.cache)
        if self.smoothing is None:
            return out
        out |= self.smoothing.norms
        for norm in _norms_with_bias(self.source, self.options, self.links):
            out[_bias_of(norm)] = self.smoothing.norm_bias.get(norm, np.zeros(self.source[norm].shape[0], np.float32))
        for name in dict.fromkeys((*self.smoothing.biases, *self.smoothing.rows)):
            stored = self.source.weights.get(_bias_of(name))
            bias = self.smoothing.bias(
                name, None if stored is None else stored.codec.dequantize(stored.read(), stored.shape)
            )
            if bias is not None:
                out[_bias_of(name)] = bias
        return out
