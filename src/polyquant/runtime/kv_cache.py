"""The per-layer state of a decoder: keys and values of all positions, and the states of recurrent parts
(runtime/state.py).

Memory grows with the number of tokens, not with the declared context. float32 and float16 store values unchanged. int8
stores each full block of 32 positions with a step and an offset per channel (1.25 bytes per value), and the current
block in float32: see ops/decoder.py. c8 is int8 on grids from the checkpoint. Another storage type is one more class
with `attend` and `nbytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from math import prod
from typing import Literal, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from polyquant.ops.decoder import BLOCK, PLAIN, Scores, attend, attend_int8, dequantize_block
from polyquant.runtime.state import Arrays, Recurrence, State, StateSpec
from polyquant.runtime.step import Step
from polyquant.types import F32

__all__ = ["INPUTS", "CacheType", "KVCache", "LayerCache", "Passing", "cache_bytes"]

CacheType: TypeAlias = Literal["f32", "f16", "int8", "c8"]
T = TypeVar("T", bound=np.generic)
Passing: TypeAlias = dict[int, tuple[F32, ...]]
"""Values handed to later layers in the current pass: keys and values by layer index, and INPUTS for all layers."""
_STATES = 4  # copies of recurrent states: now, one token before, and two marks
INPUTS = -1
"""The key of the per-layer embeddings [T, layers, n], in models that have them."""


class LayerCache(Protocol):
    """The cache as a decoder layer uses it: of one sequence (KVCache) or of several (runtime/joint_cache.py)."""

    passing: Passing

    def attend(
        self, layer: int, q: F32, k: F32, v: F32, *, scale: float, window: int = 0, scores: Scores = PLAIN
    ) -> F32:
        """See KVCache."""

    def again(self, layer: int, q: F32, k: F32, v: F32, *, scale: float, window: int = 0) -> F32:
        """See KVCache."""

    def scan(self, layer: int, recurrence: Recurrence, *inputs: F32) -> F32:
        """See KVCache."""

    def advance(self, tokens: int) -> None:
        """See KVCache."""


class CachedLayer(Protocol):
    """The stored keys and values of one layer."""

    room: int  # positions that its arrays hold

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, including room for the next positions."""

    def attend(self, q: F32, k: F32, v: F32, start: int, scale: float, window: int, scores: Scores) -> F32:
        """Store k, v [T, G, D] at positions start ..., attend to them and all earlier ones. q [T, H, D] -> [T, H, D].

        Positions stored at `start` and later are dropped.
        """

    def again(self, q: F32, k: F32, v: F32, start: int, scale: float, window: int, scores: Scores) -> F32:
        """Attend with other queries to the keys and values of the last `attend` or `again`."""

    def stored(self, end: int) -> None:
        """Update after a recorded step stored the position before `end` without calling `attend`."""

    def fork(self, positions: int) -> CachedLayer:
        """Return a copy of the first positions, to which a cache can be truncated."""


class KVCache:
    """The cache of a decoder.

    length: positions that every layer holds; the caller that feeds all layers advances it. reach: minimum length that
    the sequence will have, 0 for the fed length (runtime/rotary.py, longrope). layers, states: of the layers with keys
    and values, or with recurrent states; None for others. passing: of the current pass. grain: truncating to a multiple
    of it restores the exact earlier state. step: the recorded step of one token (runtime/step.py); it refers to the
    current arrays, so it is discarded when they are replaced, and when their last block is.
    """

    def __init__(
        self, specs: Sequence[StateSpec], kind: CacheType = "f32", grids: Sequence[F32 | None] | None = None
    ) -> None:
        """specs: of each layer. grids: of c8, float32 [G, 4, D] for each layer with keys."""
        self.length, self.reach, self.grain = 0, 0, BLOCK if kind in ("int8", "c8") else 1
        self.step: Step | None = None
        self.passing: Passing = {}
        self.layers = [
            None if k.rows is None else _cached_layer(k.rows, kind, grids[i] if grids is not None else None)
            for i, k in enumerate(specs)
        ]
        self.states = [State(k.states) if k.states else None for k in specs]
        self._marks: dict[int, list[Arrays]] = {}

    @property
    def recurrent(self) -> bool:
        """True if a layer has recurrent states."""
        return any(state is not None for state in self.states)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' arrays, including those of marks."""
        arrays = [array for state in self.states if state is not None for array in state.arrays]
        arrays += [array for states in self._marks.values() for arrays in states for array in arrays]
        return sum({id(array): array.nbytes for array in arrays}.values()) + sum(
            layer.nbytes for layer in self.layers if layer is not None
        )

    def attend(
        self,
        layer: int,
        q: F32,
        k: F32,
        v: F32,
        *,
        scale: float,
        window: int = 0,
        scores: Scores = PLAIN,
        ahead: int = 0,
    ) -> F32:
        """Store k, v [T, G, D] of the next T positions, attend to them and all earlier ones. q [T, H, D] -> [T, H, D].

        ahead: positions of this pass that the layer holds already.
        """
        stored = self._layer(layer)
        room = stored.room
        out = stored.attend(q, k, v, self.length + ahead, scale, window, scores)
        if stored.room != room:
            self.step = None
        return out

    def again(self, layer: int, q: F32, k: F32, v: F32, *, scale: float, window: int = 0, ahead: int = 0) -> F32:
        """Attend with queries of a later layer to the keys and values of `layer`, which stored k, v in this pass (see
        `passing`)."""
        return self._layer(layer).again(q, k, v, self.length + ahead, scale, window, PLAIN)

    def scan(self, layer: int, recurrence: Recurrence, *inputs: F32) -> F32:
        """Apply a recurrence to the inputs [T, ...] of the next T positions and the states of a layer -> [T, ...]."""
        out, states = recurrence(self.recall(layer), *inputs)
        self.keep(layer, len(out), *states)
        return out

    def advance(self, tokens: int) -> None:
        """Count tokens that every layer holds now."""
        self.length += tokens

    def recall(self, layer: int) -> Arrays:
        """Return the states of a layer after the tokens so far. Do not modify them."""
        return self._state(layer).read(self.length)

    def keep(self, layer: int, tokens: int, *states: F32) -> None:
        """Set its states after `tokens` more tokens. These arrays must not be modified later."""
        self._state(layer).write(self.length, self.length + tokens, states)

    def mark(self) -> None:
        """Keep the current states, so that the sequence can be truncated to here; of earlier marks only the last one
        stays."""
        if self.recurrent and self.length:
            last = max(self._marks.keys() - {self.length}, default=None)
            marks = {} if last is None else {last: self._marks[last]}
            now = [state.read(self.length) for state in self.states if state is not None]
            self._marks = {**marks, self.length: now}

    def reachable(self, length: int) -> int:
        """Return the last position up to `length` to which the cache can be truncated exactly."""
        if not self.recurrent:
            return length - length % self.grain
        if length >= self.length:
            return self.length
        return max((at for at in self._marks if at <= length and at % self.grain == 0), default=0)

    def truncate(self, length: int) -> None:
        """Drop the positions from `length` on; with recurrent parts, those after the last mark before it, see
        `self.length`.

        In int8, positions of a block that was full stay rounded to int8.
        """
        length = max(0, min(self.length, length))
        if self.recurrent or (self.grain > 1 and length // BLOCK != self.length // BLOCK):
            self.step = None
        if self.recurrent and length < self.length:
            length = max((at for at in self._marks if at <= length), default=0)
            self._marks = {at: marked for at, marked in self._marks.items() if at <= length}
            marked = iter(self._marks.get(length, ()))
            for state in self.states:
                if state is not None:
                    state.rewind(length, next(marked, None))
        self.length = length

    def fork(self, length: int) -> KVCache:
        """Return an independent copy that can be truncated to `length` or less, and must be before it is used."""
        out = copy(self)
        out.step, out.passing, out._marks = None, {}, dict(self._marks)
        out.layers = [None if layer is None else layer.fork(length) for layer in self.layers]
        out.states = [None if state is None else state.fork() for state in self.states]
        return out

    def stepped(self) -> None:
        """Update after one more run of the recorded step."""
        for layer in self.layers:
            if layer is not None:
                layer.stored(self.length + 1)
        self.length += 1

    def _layer(self, layer: int) -> CachedLayer:
        stored = self.layers[layer]
        assert stored is not None, "this layer declares no keys"
        return stored

    def _state(self, layer: int) -> State:
        state = self.states[layer]
        assert state is not None, "this layer declares no states"
        return state


def cache_bytes(specs: Sequence[StateSpec], kind: CacheType, tokens: int) -> int:
    """Return the memory of a cache that holds this many tokens: keys, values, and states with those of their marks."""
    positions = -(-tokens // BLOCK) * BLOCK
    size = {"f32": 4.0, "f16": 2.0, "int8": 1.25, "c8": 1.25}[kind]
    rows = sum(2 * spec.rows[0] * spec.rows[1] for spec in specs if spec.rows is not None)
    states = sum(4 * prod(shape) for spec in specs for shape in spec.states)
    return int(positions * size * rows) + _STATES * states


def _cached_layer(rows: tuple[int, int], kind: CacheType, grid: F32 | None) -> CachedLayer:
    if kind in ("int8", "c8"):
        return Int8Layer(*rows, grid)
    return FloatLayer(*rows, np.float32 if kind == "f32" else np.float16)


class FloatLayer:
    """Keys and values in float32 or float16."""

    def __init__(self, groups: int, size: int, dtype: DTypeLike) -> None:
        self.room = 0
        self.keys = np.empty((groups, 0, size, BLOCK), dtype)
        self.values = np.empty((groups, 0, BLOCK, size), dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self.keys.nbytes + self.values.nbytes

    def attend(self, q: F32, k: F32, v: F32, start: int, scale: float, window: int, scores: Scores = PLAIN) -> F32:
        """See CachedLayer."""
        if (end := start + len(k)) > self.room:
            self.keys, self.values = grown(self.keys, end), grown(self.values, end)
            self.room = self.keys.shape[1] * BLOCK
        return attend(q, k, v, self.keys, self.values, start=start, scale=scale, window=window, scores=scores)

    def again(self, q: F32, k: F32, v: F32, start: int, scale: float, window: int, scores: Scores = PLAIN) -> F32:
        """See CachedLayer. Stores the same values once more."""
        return self.attend(q, k, v, start, scale, window, scores)

    def stored(self, end: int) -> None:
        """See CachedLayer."""

    def fork(self, positions: int) -> FloatLayer:
        """See CachedLayer."""
        out, blocks = copy(self), -(-positions // BLOCK)
        out.keys, out.values = self.keys[:, :blocks].copy(), self.values[:, :blocks].copy()
        out.room = out.keys.shape[1] * BLOCK
        return out


class Int8Layer:
    """Keys and values in int8 per channel and block, or on a given grid.

    end: the position after `recent`. before: `recent` before the last call with several tokens.
    """

    def __init__(self, groups: int, size: int, grid: F32 | None = None) -> None:
        self.room = self.end = 0
        self.grid = grid
        self.keys = np.empty((groups, 0, size, BLOCK), np.int8)
        self.values = np.empty((groups, 0, BLOCK, size), np.int8)
        self.steps = np.empty((groups, 0, 4, size), np.float32)
        self.recent = np.zeros((groups, 2, BLOCK * size), np.float32)
        self.before: F32 | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self.keys.nbytes + self.values.nbytes + self.steps.nbytes + self.recent.nbytes

    def attend(self, q: F32, k: F32, v: F32, start: int, scale: float, window: int, scores: Scores = PLAIN) -> F32:
        """See CachedLayer."""
        if start != self.end:
            self._rewind(start)
        self.before = self.recent.copy() if len(k) > 1 else None
        if (end := start + len(k)) > self.room:
            self.keys, self.values, self.steps = grown(self.keys, end), grown(self.values, end), grown(self.steps, end)
            self.room = self.keys.shape[1] * BLOCK
        self.end = end  # before the kernel: an interrupt is raised when it returns
        return self._attend(q, k, v, start, scale, window, scores)

    def again(self, q: F32, k: F32, v: F32, start: int, scale: float, window: int, scores: Scores = PLAIN) -> F32:
        """See CachedLayer.

        Stores the same values once more, from the earlier `recent`; a single token's floats are still in it.
        """
        if self.end != start + len(k):
            return self.attend(q, k, v, start, scale, window, scores)
        if self.before is not None:
            self.recent[:] = self.before
        return self._attend(q, k, v, start, scale, window, scores)

    def _attend(self, q: F32, k: F32, v: F32, start: int, scale: float, window: int, scores: Scores) -> F32:
        return attend_int8(
            q, k, v, self.keys, self.values, self.steps, self.recent,
            start=start, scale=scale, window=window, grid=self.grid, scores=scores,
        )  # fmt: skip

    def stored(self, end: int) -> None:
        """See CachedLayer."""
        self.end = end

    def fork(self, positions: int) -> Int8Layer:
        """See CachedLayer."""
        out, blocks = copy(self), -(-positions // BLOCK)
        out.keys, out.values = self.keys[:, :blocks].copy(), self.values[:, :blocks].copy()
        out.steps = self.steps[:, :blocks].copy()
        out.room, out.recent, out.before = out.keys.shape[1] * BLOCK, self.recent.copy(), None
        return out

    def _rewind(self, start: int) -> None:
        block = start // BLOCK
        full = self.end // BLOCK
        if block < full and start % BLOCK:  # the block's floats are no longer available
            at = slice(block, block + 1)
            past = dequantize_block(self.keys[:, at], self.values[:, at], self.steps[:, at])
            self.recent[:] = np.stack([x.reshape(len(x), -1) for x in past], 1)


def grown(blocks: NDArray[T], positions: int) -> NDArray[T]:
    """Copy blocks [G, B, ...] into an array with room for `positions`, at least 1.5 times as many, so that copies are
    rare."""
    need = max(-(-positions // BLOCK), blocks.shape[1] * 3 // 2)
    out = np.zeros((blocks.shape[0], need, *blocks.shape[2:]), blocks.dtype)
    out[:, : blocks.shape[1]] = blocks
    return out
