"""The decoder of all architectures: embedding, layers, final norm, head."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from polyquant.architectures.hyper import Hyper
from polyquant.ops.arithmetic import fast_kernels
from polyquant.runtime.ends import Embedding, Head, LayerInputs
from polyquant.runtime.joint_cache import JointCache, StepwiseCache
from polyquant.runtime.kv_cache import INPUTS, CacheType, KVCache, LayerCache, cache_bytes
from polyquant.runtime.linear import Linear
from polyquant.runtime.norm import Norm
from polyquant.runtime.prompt_lookup import PassTimes, rows_agree
from polyquant.runtime.rotary import Rotary, Rotation, rotations_at
from polyquant.runtime.site import Place
from polyquant.runtime.state import StateSpec
from polyquant.runtime.step import Step
from polyquant.types import F32

__all__ = ["Decoder", "Layer"]


class Layer(Protocol):
    """A decoder layer: x [T, hidden] -> [T, hidden].

    places: of its linear layers, in computation order. stacks: of its experts. reads: of its Readers.
    state_spec: its per-layer state.

    recordable: for a single token, it only runs operations of ops/decoder.py and Linear and takes views of their
    outputs, independently of values and position: see runtime/step.py.

    separable: the rows of x may be tokens of different sequences. It then accesses the past only through `attend`,
    `again` and `scan` of the cache, and computes everything else row by row. Optional, False by default.

    stepwise: separable, and a row of x has the same bits if the linears' rows do. Optional, as `separable` by default.
    """

    recordable: bool

    @property
    def state_spec(self) -> StateSpec:
        """See above."""

    @property
    def places(self) -> Sequence[Place]:
        """See above."""

    @property
    def stacks(self) -> Sequence[Place]:
        """The places of ExpertLinears."""

    @property
    def reads(self) -> Sequence[Place]:
        """The places of Readers."""

    def __call__(self, x: F32, rotations: Sequence[Rotation], cache: LayerCache) -> F32:
        """rotations: the positions of the T tokens, one entry per rotation of the decoder."""


class Decoder:
    """tokens -> hidden states -> logits."""

    def __init__(
        self,
        hyper: Hyper,
        embedding: Embedding,
        layers: Sequence[Layer],
        norm: Norm,
        head: Linear,
        rotaries: Sequence[Rotary],
        cache: CacheType = "f32",
        grids: Sequence[F32 | None] | None = None,
        logit_head: Head | None = None,
        inputs: LayerInputs | None = None,
    ) -> None:
        """grids: of the cache c8, see KVCache. logit_head: computes the logits. inputs: per-layer embeddings."""
        self.hyper, self.embed, self.layers = hyper, embedding, tuple(layers)
        self.norm, self.head, self.rotaries, self.cache_type, self.grids = norm, head, tuple(rotaries), cache, grids
        self.logit_head, self.inputs = logit_head or Head(), inputs
        self._recordable = all(layer.recordable for layer in self.layers)
        self._separable = all(getattr(layer, "separable", False) for layer in self.layers)
        self.pass_times = PassTimes()

    def cache(self) -> KVCache:
        """Return an empty cache for the state of its layers."""
        return KVCache([layer.state_spec for layer in self.layers], self.cache_type, self.grids)

    def cache_bytes(self, tokens: int) -> int:
        """Return the memory of a cache that holds this many tokens."""
        return cache_bytes([layer.state_spec for layer in self.layers], self.cache_type, tokens)

    def hidden(self, tokens: NDArray[np.int64], cache: KVCache) -> F32:
        """Return the states after the final norm [T, hidden] of the T tokens that follow the cached ones."""
        if len(tokens) == 1 and self._recordable and fast_kernels() is not None:
            return self._step(tokens, cache)
        return deque(self.states(tokens, cache), maxlen=1).pop()

    def _step(self, tokens: NDArray[np.int64], cache: KVCache) -> F32:
        """Compute `hidden` of one token: replay the recorded step, or record it."""
        step, position = cache.step, cache.length
        known = step is not None and step.owner is self and position < step.tape.room
        if step is None or not known:
            step = Step(self, self.hyper.hidden, self.rotaries, 0 if self.inputs is None else self.inputs.width)
        self.embed(tokens, position, step.x)
        if self.inputs is not None:
            self.inputs.look(tokens, step.looked)
        self._rotations(cache, 1, step.rotations)
        if known:
            step.tape.run(position)
            cache.stepped()
        else:
            with step.tape:
                self._set_layer_inputs(step.x, step.looked, cache)
                step.out = deque(self._run_layers(step.x, step.rotations, cache), maxlen=1).pop()
            if step.tape.complete:
                cache.step = step
        return step.out.copy()

    def states(self, tokens: NDArray[np.int64], cache: KVCache) -> Iterator[F32]:
        """Yield intermediate states [T, hidden]: the embeddings, the output of every layer, and that of the final norm.

        An array is valid until the next one is requested: layers may work in place.
        """
        x = self.embed(tokens, cache.length, np.empty((len(tokens), self.hyper.hidden), np.float32))
        rotations = self._rotations(cache, len(tokens))
        if self.inputs is not None:
            looked = self.inputs.look(tokens, np.empty((len(tokens), self.inputs.width), np.float32))
            self._set_layer_inputs(x, looked, cache)
        yield x
        yield from self._run_layers(x, rotations, cache)

    def together(self, tokens: NDArray[np.int64], caches: Sequence[KVCache]) -> F32:
        """Return the states after the final norm [N, hidden]: of the next token of each of N sequences.

        Layers that are not `separable` compute one sequence after the other.
        """
        if len(tokens) == 1 or not self._separable:
            return np.concatenate([self.hidden(tokens[i : i + 1], cache) for i, cache in enumerate(caches)])
        joint, count = JointCache(caches), len(caches)
        x = np.empty((count, self.hyper.hidden), np.float32)
        angles = [np.empty((2, count, len(r.frequencies)), np.float32) for r in self.rotaries]
        for i, cache in enumerate(caches):
            row = slice(i, i + 1)
            self.embed(tokens[row], cache.length, x[row])
            out = [Rotation(a[0, row], a[1, row], r.interleaved) for a, r in zip(angles, self.rotaries, strict=True)]
            self._rotations(cache, 1, out)
        if self.inputs is not None:
            self._set_layer_inputs(x, self.inputs.look(tokens, np.empty((count, self.inputs.width), np.float32)), joint)
        rotations = [Rotation(a[0], a[1], r.interleaved) for a, r in zip(angles, self.rotaries, strict=True)]
        return deque(self._run_layers(x, rotations, joint), maxlen=1).pop()

    @cached_property
    def exact_passes(self) -> bool:
        """True if `stepwise` passes of 2 to 1 + prompt_lookup.EXACT tokens have the bits of single steps."""
        layers = all(getattr(layer, "stepwise", getattr(layer, "separable", False)) for layer in self.layers)
        places = [place for layer in self.layers for place in (*layer.places, *layer.stacks)]
        inputs = [] if self.inputs is None else [self.inputs.project]
        return layers and rows_agree([*(place.linear for place in places), *inputs, self.head])

    def stepwise(self, tokens: NDArray[np.int64], cache: KVCache) -> F32:
        """Return `hidden` of the T tokens that follow the cached ones, each attending as in a single step.

        Needs separable layers without recurrent states; see `exact_passes`.
        """
        x = self.embed(tokens, cache.length, np.empty((len(tokens), self.hyper.hidden), np.float32))
        stepwise = StepwiseCache(cache)
        if self.inputs is not None:
            looked = self.inputs.look(tokens, np.empty((len(tokens), self.inputs.width), np.float32))
            self._set_layer_inputs(x, looked, stepwise)
        return deque(self._run_layers(x, self._rotations(cache, len(tokens)), stepwise), maxlen=1).pop()

    def _set_layer_inputs(self, x: F32, looked: F32, cache: LayerCache) -> None:
        """Store the per-layer embeddings of the tokens, if any, in the cache; x: their embeddings."""
        if self.inputs is not None:
            cache.passing[INPUTS] = (self.inputs(x, looked),)

    def _run_layers(self, x: F32, rotations: Sequence[Rotation], cache: LayerCache) -> Iterator[F32]:
        """Yield the output of every layer, and that of the final norm."""
        for layer in self.layers:
            x = layer(x, rotations, cache)
            yield x
        cache.advance(len(x))
        yield self.norm(x)

    def run_layer(self, index: int, x: F32, cache: KVCache) -> F32:
        """Run one layer: x [T, hidden] -> [T, hidden].

        The caller advances cache.length after the last layer, and provides cache.passing of earlier layers and of the
        start of `states`.
        """
        return self.layers[index](x, self._rotations(cache, len(x)), cache)

    def logits(self, hidden: F32) -> F32:
        """Return the logits: [T, hidden] -> [T, vocab]."""
        return self.logit_head(self.head, hidden)

    def _rotations(self, cache: KVCache, tokens: int, out: Sequence[Rotation] | None = None) -> tuple[Rotation, ...]:
        """Return the rotations of the next positions."""
        return rotations_at(self.rotaries, cache.length, tokens, max(cache.reach, cache.length + tokens), out)
