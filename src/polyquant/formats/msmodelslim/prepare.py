"""What an msModelSlim folder needs to know of a text run through the float model: ranges of inputs, smoothing, the grid of the cache, Hessians.

The model runs once, layer by layer; of each layer only a few numbers a channel are kept. With effort "max" it runs a second time, while the weights are
quantized: a layer's Hessians are made when the first of its weights comes, and forgotten with the last.

Each expert has the numbers of the tokens that were routed to it. An expert that fewer than 64 reached has a range that holds what its layer's other experts
read too, no smoothing of its own, and no Hessian; its codes' note says so.

Ranges are those of the float model. The tool's older calibrator rounds the layers before while it watches, so its ranges of later layers hold that noise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from polyquant.calibration.hessians import LEAST_INPUTS, GatheringStages, Hessians, Tick, too_few
from polyquant.calibration.stages import calibration_stages
from polyquant.calibration.statistics import CacheRanges, InputRanges
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import InputError, PolyquantError, UnsupportedError
from polyquant.formats.msmodelslim.options import MsModelSlimOptions
from polyquant.formats.msmodelslim.smooth import Link, Smoothing, expert_families, last_norm, links
from polyquant.operations import Index
from polyquant.quantizers.affine import cache_grid
from polyquant.registry import codec
from polyquant.runtime import identity
from polyquant.types import F32, Checkpoint, Codec, TensorSpec

__all__ = ["Prepared", "derived", "prepare"]

WINDOWS = 32
"""Of the calibration text, where no Hessians are asked for: extremes are found sooner than means of products."""
_KEYS = ".self_attn.k_proj.weight"
_FUSED = ".self_attention.query_key_value.weight"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cache:
    """The scales of one attention's keys and values. keys, values: names of the tensors without `.kv_cache_scale`; channels: of each."""

    keys: str
    values: str
    channels: int


def derived(source: Checkpoint, options: MsModelSlimOptions, quantized: Collection[str]) -> dict[str, TensorSpec]:
    """Tensors that the folder has besides the source's, by name. quantized: names of the weights that become codes. Raises UnsupportedError.

    norm.module.weight and norm.module.bias of the dialect v0 are norm.weight and norm.bias once more, and are not listed.
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
    found = links(source, options.smooth)
    for norm in _norms_with_bias(source, options, found):
        weight = source[norm]
        add(_bias_of(norm), weight.shape[0], weight.codec if options.smooth == "shift" else codec("f32"))
    for name in (r for link in found for r in link.readers) if options.smooth == "shift" else ():
        if _bias_of(name) not in source:
            kept = source[name].codec if name not in quantized else own
            add(_bias_of(name), source[name].shape[0], kept)
    return {name: spec for name, spec in out.items() if name not in source}


def _norms_with_bias(source: Checkpoint, options: MsModelSlimOptions, found: Sequence[Link]) -> list[str]:
    """Norms that get a bias: those that are shifted; in the older dialects every smoothed one and the last, of zeros."""
    norms = [link.feeder for link in found if link.norm]
    if options.smooth == "shift":
        return norms
    last = last_norm(source)
    return [] if options.dialect == "v1" else [*norms, *([last] if last is not None else [])]


def _bias_of(weight: str) -> str:
    return f"{weight.removesuffix('.weight')}.bias"


def _caches(source: Checkpoint, names: Collection[str]) -> list[Cache]:
    """The attentions among `names`. Raises UnsupportedError where there is none in the whole checkpoint."""
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
            "no attention whose cache could be quantized: no k_proj, no query_key_value",
            file=source.path,
            hint="leave out --kv",
        )
    return out


class Prepared:
    """What the calibration found. values: float32, all tensors of `derived`, and vectors of the source that smoothing changes, by name. notes: of linears
    for which it found less than was asked."""

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
        """A linear's floats w [R, K], all or these rows of the source's weight, as smoothing leaves them."""
        return (
            w
            if self._smoothing is None
            else self._smoothing.weight(name, w, slice(0, len(w)) if rows is None else rows)
        )

    def bias(self, name: str) -> F32 | None:
        """The bias [N] of the linear whose weight is `name`, smoothed; None if it has none."""
        had = self._source.weights.get(_bias_of(name))
        bias = None if had is None else had.codec.dequantize(had.read(), had.shape)
        return bias if self._smoothing is None else self._smoothing.bias(name, bias)

    def input_range(self, name: str) -> tuple[float, float] | None:
        """Least and greatest input of a linear with a static type, smoothed."""
        return self._ranges.get(name)

    def order(self, name: str) -> int:
        """Ask for Hessians in this order."""
        return 0 if self._hessians is None else self._hessians.order(name)

    def hessian(self, name: str) -> F32 | None:
        """Mean of x x^T over the smoothed inputs of a linear, [K, K], for one request; None without effort "max" and for too few inputs."""
        found = None
        if self._hessians is not None and name in self._hessians.wanted:
            found, why = self._hessians.of(name)
            if why:
                self.notes.setdefault(name, why)
        if found is None or self._smoothing is None:
            return found
        shift, scale = self._smoothing.shift.get(name), self._smoothing.columns.get(name)
        if shift is not None:
            cross = np.outer(self._means[name], shift)
            found = found - cross - cross.T + np.outer(shift, shift)
        return found if scale is None else np.asarray(found / scale[:, None] / scale, np.float32)


def prepare(
    source: Checkpoint, options: MsModelSlimOptions, targets: Collection[tuple[str, MsModelSlim]], tick: Tick
) -> Prepared:
    """Run the calibration text through the float model. targets: whose inputs each weight that becomes codes reads (Step.inputs), and its codec.

    tick: told the share that is done, from 0 to 1. Raises InputError, UnsupportedError.
    """
    assert options.calibration is not None
    wants_hessians = options.effort == "max"
    size = {} if wants_hessians else {"windows": WINDOWS}
    stages = calibration_stages(source.path, options.calibration, **size)
    half = 0.5 if wants_hessians else 1.0
    smoothing = Smoothing(source, options.smooth) if options.smooth is not None else None
    found = _Found(source, options, {n for n, c in targets if c.static}, smoothing)
    found.run(stages, lambda share: tick(half * share))
    hessians = (
        Hessians(stages, (n for n, _ in targets), lambda share: tick(0.5 + 0.5 * share)) if wants_hessians else None
    )
    return Prepared(source, smoothing, found.values(), found.ranges, found.means, hessians, found.notes)


def _part(tick: Tick, index: int, count: int) -> Tick:
    """Tells the whole's share from that of part `index` of `count`."""
    return lambda share: tick((index + share) / count)


class _Found:
    """What one run of the stages leaves."""

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
        """All stages up to the last that is needed."""
        shifted = self.options.smooth == "shift"  # means of the inputs move Hessians
        readers = {r for link in self.links for r in (link.readers if shifted else link.readers[:1])}
        wanted = frozenset(self.static | readers)
        caches = [_caches(self.source, names) if self.options.kv is not None else [] for names in stages.names]
        last = max((i for i, names in enumerate(stages.names) if wanted & set(names) or caches[i]), default=-1)
        for i in range(last + 1):
            watched = CacheRanges(before=self.options.dialect != "v1") if caches[i] else None
            gathered = stages.gather(i, wanted, _part(tick, i, last + 1), InputRanges, watched)
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
        """Raises InputError for what the text did not reach."""
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
                hint="leave out --kv",
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
        """What the other experts of its stack read, where the text hardly reaches this one."""
        seen = gathered[name].count
        if seen >= LEAST_INPUTS or name not in self.static:
            return
        others = [gathered[n] for n in family if n != name and n in gathered and gathered[n].count]
        if others:
            self.notes[name] = f"{too_few(seen)}: the range holds what the other experts of its layer read"
        yield from others

    def _range(self, name: str, inputs: Sequence[InputRanges]) -> None:
        columns, shift = None, None
        if self.smoothing is not None:
            columns, shift = self.smoothing.columns.get(name), self.smoothing.shift.get(name)
        if shift is not None:
            self.means[name] = inputs[0].mean
        if name in self.static:
            mean, seen = self.options.dialect != "v1", [x for x in inputs if x.count] or inputs
            found = [self._named(name, lambda x=x: x.range(columns, shift, mean=mean)) for x in seen]
            self.ranges[name] = min(low for low, _ in found), max(high for _, high in found)

    def _cache_grid(self, cache: Cache, watched: CacheRanges) -> None:
        for name, end in ((cache.keys, "keys"), (cache.values, "values")):
            low, high = self._named(name, getattr, watched, end)
            if len(low) != cache.channels:
                raise UnsupportedError(
                    "the cache has other channels than the layer that fills it",
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
        """What smoothing divides the values by, [C]; None for nothing."""
        rows = {} if self.smoothing is None else self.smoothing.rows
        found = rows.get(f"{cache.values}.weight", rows.get(f"{cache.values.removesuffix('.v_proj')}.weight"))
        return None if found is None else found[-cache.channels :]

    def _named(self, name: str, find: Callable[..., T], *arguments: object) -> T:
        """find(*arguments), its error with the tensor's name."""
        try:
            return find(*arguments)
        except PolyquantError as problem:
            raise InputError(problem.message, file=self.source.path, tensor=name, hint=problem.hint) from None

    def values(self) -> dict[str, F32]:
        """Of derived tensors and changed vectors."""
        out = dict(self.cache)
        if self.smoothing is None:
            return out
        out |= self.smoothing.norms
        for norm in _norms_with_bias(self.source, self.options, self.links):
            out[_bias_of(norm)] = self.smoothing.norm_bias.get(norm, np.zeros(self.source[norm].shape[0], np.float32))
        for name in dict.fromkeys((*self.smoothing.biases, *self.smoothing.rows)):
            had = self.source.weights.get(_bias_of(name))
            bias = self.smoothing.bias(name, None if had is None else had.codec.dequantize(had.read(), had.shape))
            if bias is not None:
                out[_bias_of(name)] = bias
        return out
