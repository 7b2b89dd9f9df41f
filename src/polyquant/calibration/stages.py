"""Stages of a checkpoint on a calibration text: with the built-in decoder, or with transformers for other
architectures.

The built-in decoder keeps the states of all calibration tokens [T, hidden] float32 and the Hessians of one layer;
weights stay in their file. Windows are summed in a fixed order, so results are reproducible.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from polyquant.calibration.hessians import LEAST_INPUTS, G, GatheringStages, Moments, Tick, part_of
from polyquant.calibration.samples import OWN_TEXT, read_samples
from polyquant.calibration.sizes import SHARD, TOKENS, WINDOWS
from polyquant.calibration.statistics import CacheRanges
from polyquant.calibration.taps import LinearTap, tapped, taps_of
from polyquant.errors import InputError, UnsupportedError
from polyquant.ops.arithmetic import defined_order
from polyquant.runtime.attention import Attention
from polyquant.runtime.decoder import Decoder, Layer
from polyquant.runtime.kv_cache import KVCache, Passing
from polyquant.runtime.load import load
from polyquant.runtime.model import Model
from polyquant.runtime.text import read_text, text_tokens
from polyquant.types import F32

__all__ = [
    "OWN_TEXT",
    "DecoderStages",
    "States",
    "calibration_stages",
    "calibration_windows",
    "merge",
]

Tokens = NDArray[np.int64]
States: TypeAlias = list[tuple[F32, Passing]]
"""Per window: the inputs of a stage, [T, hidden], and the values that earlier layers pass on."""


class DecoderStages:
    """The built-in decoder: a stage per layer, and one for the head."""

    def __init__(self, model: Model, windows: Sequence[Tokens]) -> None:
        self.model, self.windows = model, windows
        decoder = model.decoder
        self._names = [_names(layer) for layer in decoder.layers]
        self._names.append([w.name for w in decoder.head.weights])
        self._tokens = sum(len(w) for w in windows)
        self.shards = [slice(a, a + SHARD) for a in range(0, len(windows), SHARD)]
        self._held: list[States] = []

    @property
    def names(self) -> Sequence[Sequence[str]]:
        """See Stages."""
        return self._names

    def expect(self, requests: frozenset[str]) -> None:
        """See Stages: here all are computed in order, and kept by the caller."""

    def run(self, index: int, wanted: frozenset[str], tick: Tick) -> Mapping[str, Moments]:
        """See Stages."""
        return self.gather(index, wanted, tick, Moments)

    def gather(
        self, index: int, wanted: frozenset[str], tick: Tick, make: Callable[[int], G], cache: CacheRanges | None = None
    ) -> Mapping[str, G]:
        """See GatheringStages."""
        with defined_order():
            return self._gather(index, wanted, tick, make, cache)

    def _gather(
        self, index: int, wanted: frozenset[str], tick: Tick, make: Callable[[int], G], cache: CacheRanges | None
    ) -> Mapping[str, G]:
        total: dict[str, G] = {}
        if index == 0:
            self._held = []
        for i, shard in enumerate(self.shards):
            states = self.first(shard) if index == 0 else self._held[i]
            part = part_of(tick, i, len(self.shards))
            states, gathered = self.advance(index, states, wanted, part, make, cache)
            self._held[i:] = [states, *self._held[i + 1 :]]
            merge(total, gathered)
        if index == len(self.model.decoder.layers):
            self._held = []
        return total

    def first(self, shard: slice) -> States:
        """The inputs of the first stage for some windows, and the values that its layers pass on."""
        decoder, out = self.model.decoder, []
        for tokens in self.windows[shard]:
            cache = decoder.cache()
            out.append((next(decoder.states(tokens, cache)).copy(), cache.passing))
        return out

    def advance(
        self, index: int, states: States, wanted: frozenset[str], tick: Tick, make: Callable[[int], G],
        cache: CacheRanges | None,
    ) -> tuple[States, Mapping[str, G]]:  # fmt: skip
        """Run a stage on a shard: the inputs of the next stage, and the statistics of these windows."""
        decoder, out = self.model.decoder, []
        if index < len(decoder.layers):
            layer = decoder.layers[index]
            taps = taps_of(layer, wanted, make, self._tokens)
            with tapped(taps), _kept(layer, decoder, cache) as empty:
                for i, (x, passing) in enumerate(states):
                    held = empty()
                    held.passing = passing
                    out.append((decoder.run_layer(index, x, held), held.passing))
                    tick((i + 1) / len(states))
            return out, {name: inputs for _, tap in taps for name, inputs in tap.gathered.items()}
        head = LinearTap(decoder.head, wanted, make)
        if head.gathered:
            for x, _ in states:
                head.add(decoder.norm(x))
        tick(1)
        return [], head.gathered


def merge(total: dict[str, G], gathered: Mapping[str, G]) -> None:
    """Add what a later shard gathered; tensors with the same inputs share an object."""
    if not total:
        total.update(gathered)
        return
    done: set[int] = set()
    for name, found in gathered.items():
        if id(total[name]) not in done:
            done.add(id(total[name]))
            total[name].merge(found)


def _names(layer: Layer) -> list[str]:
    """Names of a layer's matrices, including those of its stacks one by one."""
    stacks = [place.linear for place in layer.stacks]
    apart = [name for stack in stacks for e in range(stack.experts) for name in stack.names(e)]
    return [w.name for place in (*layer.places, *layer.reads) for w in place.linear.weights] + apart


@contextmanager
def _kept(layer: Layer, decoder: Decoder, ranges: CacheRanges | None) -> Iterator[Callable[[], KVCache]]:
    """Record keys and values in `ranges` within the block; yields a factory of empty caches."""
    if ranges is None or not ranges.before:
        yield decoder.cache if ranges is None else lambda: _Watched(decoder, ranges)
        return
    place = next(place for place in layer.places if place.key == "qkv")
    linear, split = place.linear, cast(Attention, place.part).split

    def recording(x: F32) -> Sequence[F32]:
        out: Sequence[F32] = linear(x)
        _, keys, values = split(out)
        ranges.add(keys, values)
        return out

    place.put(recording)
    try:
        yield decoder.cache
    finally:
        place.put(linear)


class _Watched(KVCache):
    """A float cache that records the ranges of keys and values."""

    def __init__(self, decoder: Decoder, ranges: CacheRanges) -> None:
        super().__init__([layer.state_spec for layer in decoder.layers])
        self._ranges = ranges

    def attend(self, layer: int, q: F32, k: F32, v: F32, **options: Any) -> F32:
        """See KVCache."""
        self._ranges.add(k, v)
        return super().attend(layer, q, k, v, **options)


def calibration_windows(
    model: Model, text: str | os.PathLike[str], *, windows: int = WINDOWS, tokens: int = TOKENS
) -> list[Tokens]:
    """Windows of at most `tokens` tokens, each after a BOS token if the tokenizer has one, spread evenly over the text.

    OWN_TEXT: windows of generated text. In a file of samples (calibration/samples.py) each sample is a window. Raises
    InputError for fewer than 64 tokens in total.
    """
    length = min(tokens, model.context)
    if text == OWN_TEXT:
        return _own_text(model, windows // 4, length)  # fewer, since generation is slow
    if (samples := read_samples(text)) is not None:
        return _sampled(model, samples, windows, length, text)
    ids, bos = text_tokens(model, read_text(text), None)
    return cut(ids, bos, windows, length, text)


def cut(ids: Tokens, bos: int | None, windows: int, length: int, text: object) -> list[Tokens]:
    """Split token ids into at most `windows` windows of `length`. Raises InputError for fewer than 64 tokens."""
    if len(ids) < LEAST_INPUTS:
        raise InputError(
            "too little text to calibrate on", file=text, expected=f"at least {LEAST_INPUTS} tokens", found=len(ids)
        )
    lead = [] if bos is None else [bos]
    room = length - len(lead)
    count = min(windows, -(-len(ids) // room))
    starts = np.linspace(0, max(0, len(ids) - room), count).astype(np.int64) if count > 1 else [0]
    return [np.concatenate([np.array(lead, np.int64), ids[a : a + room]]) for a in starts]


def _sampled(
    model: Model, samples: Sequence[str | Sequence[int]], windows: int, length: int, file: object
) -> list[Tokens]:
    """The first `windows` samples, each cut to `length` tokens; strings get a BOS token if the tokenizer has one."""
    out: list[Tokens] = []
    for sample in samples[:windows]:
        if isinstance(sample, str):
            ids, bos = text_tokens(model, sample, length)
            lead = [] if bos is None else [bos]
            ids = np.concatenate([np.array(lead, np.int64), ids])
        else:
            ids = np.array(sample, np.int64)
            if len(ids) and ids.max() >= model.vocab:
                raise InputError(
                    "a token is outside the vocabulary",
                    file=file,
                    expected=f"0 to {model.vocab - 1}",
                    found=int(ids.max()),
                )
        if len(ids):
            out.append(ids[:length])
    if (total := sum(map(len, out))) < LEAST_INPUTS:
        raise InputError(
            "too little text to calibrate on", file=file, expected=f"at least {LEAST_INPUTS} tokens", found=total
        )
    return out


def _own_text(model: Model, windows: int, length: int) -> list[Tokens]:
    """Text generated after BOS with seeds 0, 1, ...; short outputs are compensated by more of them."""
    bos = model.tokenizer.special.get("bos")
    if bos is None:
        raise UnsupportedError(
            "the tokenizer has no BOS token, so the model cannot generate calibration text",
            file=model.checkpoint.path,
            hint="give a file: --calibration FILE",
        )
    out: list[Tokens] = []
    seed = total = 0
    while total < windows * length and seed < 16 * windows:
        written = [t.id for t in model.generate([bos], max_tokens=length - 1, temperature=1.0, seed=seed)]
        out.append(np.array([bos, *written], np.int64))
        total, seed = total + len(out[-1]), seed + 1
    return out


def calibration_stages(
    path: str | os.PathLike[str], text: str | os.PathLike[str], *, windows: int = WINDOWS
) -> GatheringStages:
    """The calibration stages of a float checkpoint. Raises InputError, UnsupportedError."""
    try:
        model = load(path, activations="float")
    except UnsupportedError as refused:
        if find_spec("torch") is None or find_spec("transformers") is None:
            hint = "install torch and transformers, or choose a method without calibration"
            raise UnsupportedError(
                f"{refused.message}; it cannot be run for calibration", file=path, hint=hint
            ) from None
        from polyquant.calibration.hessians_torch import TorchStages

        if text == OWN_TEXT:
            raise UnsupportedError(
                f"{refused.message}, so it cannot generate its own text",
                file=path,
                hint="give a file: --calibration FILE",
            ) from None
        samples = read_samples(text)
        return TorchStages(path, read_text(text) if samples is None else samples, windows=windows, tokens=TOKENS)
    return DecoderStages(model, calibration_windows(model, text, windows=windows))
