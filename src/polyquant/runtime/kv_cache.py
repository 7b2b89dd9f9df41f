"""What a decoder keeps of the text so far: keys and values of its positions, and the states of recurrent parts (runtime/state.py). Keys and values grow
with the text, not with the context promised.

float32 and float16 keep what they are given. int8 keeps each full block of 32 positions with a step and an offset for each channel (1.25 bytes
a number), and the block under way in float32: see ops/decoder.py. c8 is int8 on levels that the checkpoint brings. Another way to keep a layer is one more class with `attend` and `nbytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from polyquant.ops.decoder import BLOCK, PLAIN, Scores, attend, attend_int8, dequantize_block
from polyquant.runtime.state import Arrays, Keeps, State
from polyquant.runtime.step import Step
from polyquant.types import F32

__all__ = ["INPUTS", "CacheType", "KVCache", "Passing"]

CacheType: TypeAlias = Literal["f32", "f16", "int8", "c8"]
T = TypeVar("T", bound=np.generic)
Passing: TypeAlias = dict[int, tuple[F32, ...]]
"""What is handed to later layers in the pass under way: by the number of a layer its keys and values, and for all layers INPUTS."""
INPUTS = -1
"""Of the tokens [T, layers, n], where every layer reads some numbers of them."""


class KeptLayer(Protocol):
    """The keys and values of one layer."""

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, room for the next positions included."""

    def attend(self, q: F32, k: F32, v: F32, start: int, scale: float, window: int, scores: Scores) -> F32:
        """Store k, v [T, G, D] at positions start ..., attend to them and all before. q [T, H, D] -> [T, H, D].

        What was stored at `start` and after is forgotten.
        """

    def again(self, q: F32, k: F32, v: F32, start: int, scale: float, window: int, scores: Scores) -> F32:
        """Other queries on the same keys and values: those that the last `attend` or `again` had."""

    def stored(self, end: int) -> None:
        """A recorded step stored the position before `end`, past `attend`."""


class KVCache:
    """`length`: positions that every layer holds; one who has fed all layers moves it. reach: how long the text will be at
    least, 0 for what is fed (runtime/rotary.py, longrope). layers, states: of the layers that keep keys and values, or states; None for others. passing: of the
    pass under way.
    grain: a cache truncated to a multiple of it is as if nothing had been there. step: the recorded step of one token (runtime/step.py); it
    knows the arrays of now, so whatever goes past it, `attend` or `truncate`, forgets it."""

    def __init__(
        self, keeps: Sequence[Keeps], kind: CacheType = "f32", grids: Sequence[F32 | None] | None = None
    ) -> None:
        """keeps: of each layer. grids: of c8, float32 [G, 4, D] for each layer with keys."""
        self.length, self.reach, self.grain = 0, 0, BLOCK if kind in ("int8", "c8") else 1
        self.step: Step | None = None
        self.passing: Passing = {}
        self.layers = [
            None if k.rows is None else _kept_layer(k.rows, kind, grids[i] if grids is not None else None)
            for i, k in enumerate(keeps)
        ]
        self.states = [State(k.states) if k.states else None for k in keeps]
        self._marks: dict[int, list[Arrays]] = {}

    @property
    def recurrent(self) -> bool:
        """True if some layer keeps states."""
        return any(state is not None for state in self.states)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' arrays, those of marks included."""
        held = [array for state in self.states if state is not None for array in state.arrays]
        held += [array for states in self._marks.values() for arrays in states for array in arrays]
        return sum({id(array): array.nbytes for array in held}.values()) + sum(
            layer.nbytes for layer in self.layers if layer is not None
        )

    def attend(
        self, layer: int, q: F32, k: F32, v: F32, *, scale: float, window: int = 0, scores: Scores = PLAIN
    ) -> F32:
        """Store k, v [T, G, D] of the T next positions and attend to them and all before. q [T, H, D] -> [T, H, D]."""
        self.step = None
        return self._kept(layer).attend(q, k, v, self.length, scale, window, scores)

    def again(self, layer: int, q: F32, k: F32, v: F32, *, scale: float, window: int = 0) -> F32:
        """Queries of a later layer on the keys and values of layer `layer`, which stored k, v in this pass (`passing` has them)."""
        self.step = None
        return self._kept(layer).again(q, k, v, self.length, scale, window, PLAIN)

    def recall(self, layer: int) -> Arrays:
        """The states of a layer as the tokens so far left them. Not to be changed."""
        return self._state(layer).read(self.length)

    def keep(self, layer: int, tokens: int, *states: F32) -> None:
        """Its states after so many tokens more. Nobody changes these arrays later."""
        self._state(layer).write(self.length, self.length + tokens, states)

    def mark(self) -> None:
        """Hold the states of now, so that the text can be cut back to here; of earlier marks the last one stays."""
        if self.recurrent and self.length:
            last = max(self._marks.keys() - {self.length}, default=None)
            marks = {} if last is None else {last: self._marks[last]}
            now = [state.read(self.length) for state in self.states if state is not None]
            self._marks = {**marks, self.length: now}

    def reachable(self, length: int) -> int:
        """The last position up to `length` to which the cache can be truncated as if nothing had been behind it."""
        if not self.recurrent:
            return length - length % self.grain
        if length >= self.length:
            return self.length
        return max((at for at in self._marks if at <= length and at % self.grain == 0), default=0)

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on, or, of a model with recurrent parts, from the last mark before it; `self.length` says where it stands then. In int8, positions
        of a block that was full stay as int8 left them."""
        self.step = None
        length = max(0, min(self.length, length))
        if self.recurrent and length < self.length:
            length = max((at for at in self._marks if at <= length), default=0)
            self._marks = {at: held for at, held in self._marks.items() if at <= length}
            held = iter(self._marks.get(length, ()))
            for state in self.states:
                if state is not None:
                    state.go_back(length, next(held, None))
        self.length = length

    def stepped(self) -> None:
        """The recorded step ran once more."""
        for layer in self.layers:
            if layer is not None:
                layer.stored(self.length + 1)
        self.length += 1

    def _kept(self, layer: int) -> KeptLayer:
        kept = self.layers[layer]
        assert kept is not None, "a layer that said it keeps no keys"
        return kept

    def _state(self, layer: int) -> State:
        state = self.states[layer]
        assert state is not None, "a layer that said it keeps no states"
        return state


def _kept_layer(rows: tuple[int, int], kind: CacheType, grid: F32 | None) -> KeptLayer:
    if kind in ("int8", "c8"):
        return Int8Layer(*rows, grid)
    return FloatLayer(*rows, np.float32 if kind == "f32" else np.float16)


class FloatLayer:
    """float32 or float16."""

    def __init__(self, groups: int, size: int, dtype: DTypeLike) -> None:
        self.room = 0
        self.keys = np.empty((groups, 0, size, BLOCK), dtype)
        self.values = np.empty((groups, 0, BLOCK, size), dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self.keys.nbytes + self.values.nbytes

    def attend(self, q: F32, k: F32, v: F32, start: int, scale: float, window: int, scores: Scores = PLAIN) -> F32:
        """See KeptLayer."""
        if (end := start + len(k)) > self.room:
            self.keys, self.values = grown(self.keys, end), grown(self.values, end)
            self.room = self.keys.shape[1] * BLOCK
        return attend(q, k, v, self.keys, self.values, start=start, scale=scale, window=window, scores=scores)

    def again(self, q: F32, k: F32, v: F32, start: int, scale: float, window: int, scores: Scores = PLAIN) -> F32:
        """See KeptLayer: the same is stored once more."""
        return self.attend(q, k, v, start, scale, window, scores)

    def stored(self, end: int) -> None:
        """See KeptLayer."""


class Int8Layer:
    """int8 per channel and block, or on a given grid. end: the positions that `recent` continues; before: what it was before the last tokens, of several."""

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
        """See KeptLayer."""
        if start != self.end:
            self._go_back(start)
        self.before = self.recent.copy() if len(k) > 1 else None
        if (end := start + len(k)) > self.room:
            self.keys, self.values, self.steps = grown(self.keys, end), grown(self.values, end), grown(self.steps, end)
            self.room = self.keys.shape[1] * BLOCK
        self.end = end  # before the kernel: an interrupt is raised as soon as it returns
        return self._attend(q, k, v, start, scale, window, scores)

    def again(self, q: F32, k: F32, v: F32, start: int, scale: float, window: int, scores: Scores = PLAIN) -> F32:
        """See KeptLayer: the same is stored once more, from where the block under way stood; one token's floats are still there. An empty layer stores it."""
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
        """See KeptLayer."""
        self.end = end

    def _go_back(self, start: int) -> None:
        block = start // BLOCK
        full = self.end // BLOCK
        if block < full and start % BLOCK:  # its floats are gone
            at = slice(block, block + 1)
            past = dequantize_block(self.keys[:, at], self.values[:, at], self.steps[:, at])
            self.recent[:] = np.stack([x.reshape(len(x), -1) for x in past], 1)


def grown(blocks: NDArray[T], positions: int) -> NDArray[T]:
    """blocks [G, B, ...] copied to where at least `positions` fit: half as many again, so that a long text is copied a few times only."""
    need = max(-(-positions // BLOCK), blocks.shape[1] * 3 // 2)
    out = np.zeros((blocks.shape[0], need, *blocks.shape[2:]), blocks.dtype)
    out[:, : blocks.shape[1]] = blocks
    return out
