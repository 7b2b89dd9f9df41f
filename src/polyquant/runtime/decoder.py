"""Embedding, layers, last norm, head: what every architecture shares."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from polyquant.architectures.hyper import Hyper
from polyquant.ops import native
from polyquant.runtime.ends import Embedding, Head, LayerInputs
from polyquant.runtime.kv_cache import INPUTS, CacheType, KVCache
from polyquant.runtime.linear import Linear
from polyquant.runtime.norm import Norm
from polyquant.runtime.rotary import Rotary, Turns, angles
from polyquant.runtime.site import Place
from polyquant.runtime.state import Keeps
from polyquant.runtime.step import Step
from polyquant.types import F32

__all__ = ["Decoder", "Layer"]


class Layer(Protocol):
    """A decoder layer: x [T, hidden] -> [T, hidden]. places: of its linear layers, in the order of the computation; stacks: of its experts; reads: of what matrices
    read that are multiplied in other forms. keeps: what it keeps of a text.

    recordable: for one token it does nothing to activations but run the operations of ops/decoder.py and Linear and take views of their
    outputs, and what it runs does not depend on them or on the position: see runtime/step.py.
    """

    recordable: bool

    @property
    def keeps(self) -> Keeps:
        """See above."""

    @property
    def places(self) -> Sequence[Place]:
        """See above."""

    @property
    def stacks(self) -> Sequence[Place]:
        """Of ExpertLinears."""

    @property
    def reads(self) -> Sequence[Place]:
        """Of Readers."""

    def __call__(self, x: F32, turns: Sequence[Turns], cache: KVCache) -> F32:
        """turns: of the positions of the T tokens, one of each of the decoder's rotations."""


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
        behind: Head | None = None,
        inputs: LayerInputs | None = None,
    ) -> None:
        """grids: of the cache c8, see KVCache. behind: what is done to the logits. inputs: what each layer reads of the tokens, where they do."""
        self.hyper, self.embed, self.layers = hyper, embedding, tuple(layers)
        self.norm, self.head, self.rotaries, self.cache_type, self.grids = norm, head, tuple(rotaries), cache, grids
        self.behind, self.inputs = behind or Head(), inputs
        self._recordable = all(layer.recordable for layer in self.layers)

    def cache(self) -> KVCache:
        """An empty cache for what its layers keep."""
        return KVCache([layer.keeps for layer in self.layers], self.cache_type, self.grids)

    def hidden(self, tokens: NDArray[np.int64], cache: KVCache) -> F32:
        """States after the last norm [T, hidden] of the T tokens that follow those in the cache."""
        if len(tokens) == 1 and self._recordable and native.lib() is not None:
            return self._step(tokens, cache)
        return deque(self.states(tokens, cache), maxlen=1).pop()

    def _step(self, tokens: NDArray[np.int64], cache: KVCache) -> F32:
        """`hidden` of one token: as recorded, or recorded for those that follow."""
        step, position = cache.step, cache.length
        known = step is not None and step.owner is self and position < step.tape.room
        if step is None or not known:
            step = Step(self, self.hyper.hidden, self.rotaries, 0 if self.inputs is None else self.inputs.width)
        self.embed(tokens, position, step.x)
        if self.inputs is not None:
            self.inputs.look(tokens, step.looked)
        self._turns(cache, 1, step.turns)
        if known:
            step.tape.run(position)
            cache.stepped()
        else:
            with step.tape:
                self._hand_on(step.x, step.looked, cache)
                step.out = deque(self._through(step.x, step.turns, cache), maxlen=1).pop()
            if step.tape.complete:
                cache.step = step
        return step.out.copy()

    def states(self, tokens: NDArray[np.int64], cache: KVCache) -> Iterator[F32]:
        """The same step by step, each [T, hidden]: the embeddings, the output of every layer, and that of the last norm.

        An array is good until the next is asked for: a layer may work in place.
        """
        x = self.embed(tokens, cache.length, np.empty((len(tokens), self.hyper.hidden), np.float32))
        turns = self._turns(cache, len(tokens))
        if self.inputs is not None:
            looked = self.inputs.look(tokens, np.empty((len(tokens), self.inputs.width), np.float32))
            self._hand_on(x, looked, cache)
        yield x
        yield from self._through(x, turns, cache)

    def _hand_on(self, x: F32, looked: F32, cache: KVCache) -> None:
        """What the layers read of the tokens beside the embeddings x goes into the cache."""
        if self.inputs is not None:
            cache.passing[INPUTS] = (self.inputs(x, looked),)

    def _through(self, x: F32, turns: Sequence[Turns], cache: KVCache) -> Iterator[F32]:
        """The output of every layer, and that of the last norm."""
        for layer in self.layers:
            x = layer(x, turns, cache)
            yield x
        cache.length += len(x)
        yield self.norm(x)

    def alone(self, index: int, x: F32, cache: KVCache) -> F32:
        """The output [T, hidden] of one layer for the input x [T, hidden]; the caller moves cache.length on after all layers, and sees to it that
        cache.passing has what earlier layers, and the beginning of `states`, left there."""
        return self.layers[index](x, self._turns(cache, len(x)), cache)

    def logits(self, hidden: F32) -> F32:
        """[T, hidden] -> [T, vocab]."""
        return self.behind(self.head, hidden)

    def _turns(self, cache: KVCache, tokens: int, out: Sequence[Turns] | None = None) -> tuple[Turns, ...]:
        """Of the next positions."""
        return angles(self.rotaries, cache.length, tokens, max(cache.reach, cache.length + tokens), out)
