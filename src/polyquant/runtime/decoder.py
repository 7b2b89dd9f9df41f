"""Embedding, layers, last norm, head: what every architecture shares."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from polyquant.architectures.hyper import Hyper
from polyquant.ops import native
from polyquant.runtime.kv_cache import CacheType, KVCache
from polyquant.runtime.linear import Linear
from polyquant.runtime.norm import Norm
from polyquant.runtime.rotary import Rotary
from polyquant.runtime.site import Place
from polyquant.runtime.step import Step
from polyquant.types import F32, Weight

__all__ = ["Decoder", "Layer"]


class Layer(Protocol):
    """A decoder layer: x [T, hidden] -> [T, hidden]. places: of its linear layers, in the order of the computation.

    recordable: for one token it does nothing to activations but run the operations of ops/decoder.py and Linear and take views of their
    outputs, and what it runs does not depend on them or on the position: see runtime/step.py.
    """

    recordable: bool

    @property
    def places(self) -> Sequence[Place]:
        """See above."""

    def __call__(self, x: F32, cos: F32, sin: F32, rotary: Rotary, cache: KVCache) -> F32:
        """cos, sin [T, R] of the positions of the T tokens."""


class Decoder:
    """tokens -> hidden states -> logits."""

    def __init__(
        self,
        hyper: Hyper,
        embedding: Weight,
        layers: Sequence[Layer],
        norm: Norm,
        head: Linear,
        rotary: Rotary,
        cache: CacheType = "f32",
        grids: Sequence[F32] | None = None,
    ) -> None:
        """grids: of the cache c8, see KVCache."""
        self.hyper, self.embedding, self.layers = hyper, embedding, tuple(layers)
        self.norm, self.head, self.rotary, self.cache_type, self.grids = norm, head, rotary, cache, grids
        self._recordable = all(layer.recordable for layer in self.layers)
        self._table = dict(embedding.parts)  # looked up once: each look maps the file anew

    def cache(self) -> KVCache:
        """An empty cache of this decoder's shape."""
        return KVCache(self.hyper.layers, self.hyper.kv_heads, self.hyper.head_size, self.cache_type, self.grids)

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
            step = Step(self, self.hyper.hidden, len(self.rotary.frequencies))
        self._embed(tokens, step.x)
        self.rotary.angles(position, 1, (step.cos, step.sin))
        if known:
            step.tape.run(position)
            cache.stepped()
        else:
            with step.tape:
                step.out = deque(self._through(step.x, step.cos, step.sin, cache), maxlen=1).pop()
            if step.tape.complete:
                cache.step = step
        return step.out.copy()

    def states(self, tokens: NDArray[np.int64], cache: KVCache) -> Iterator[F32]:
        """The same step by step, each [T, hidden]: the embeddings, the output of every layer, and that of the last norm.

        An array is good until the next is asked for: a layer may work in place.
        """
        x = self._embed(tokens, np.empty((len(tokens), self.hyper.hidden), np.float32))
        cos, sin = self.rotary.angles(cache.length, len(tokens))
        yield x
        yield from self._through(x, cos, sin, cache)

    def _through(self, x: F32, cos: F32, sin: F32, cache: KVCache) -> Iterator[F32]:
        """The output of every layer, and that of the last norm."""
        for layer in self.layers:
            x = layer(x, cos, sin, self.rotary, cache)
            yield x
        cache.length += len(x)
        yield self.norm(x)

    def alone(self, index: int, x: F32, cache: KVCache) -> F32:
        """The output [T, hidden] of one layer for the input x [T, hidden]; the caller moves cache.length on after all layers."""
        cos, sin = self.rotary.angles(cache.length, len(x))
        return self.layers[index](x, cos, sin, self.rotary, cache)

    def logits(self, hidden: F32) -> F32:
        """[T, hidden] -> [T, vocab]."""
        (y,) = self.head(hidden)
        return y

    def _embed(self, tokens: NDArray[np.int64], out: F32) -> F32:
        """Rows of the embedding into out [T, hidden]."""
        codec, shape = self.embedding.codec, self.embedding.shape
        for i, token in enumerate(tokens.tolist()):
            codec.dequantize(self._table, shape, rows=slice(token, token + 1), out=out[i : i + 1])
        return out
