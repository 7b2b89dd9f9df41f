"""One text on its way through a decoder, which goes on where it stopped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError
from polyquant.runtime.decoder import Decoder
from polyquant.types import F32

__all__ = ["Session", "token_ids"]

_CHUNK = 512  # tokens that go through the layers at a time


class Session:
    """One text on its way through the model. tokens: those seen so far; position: how many."""

    def __init__(self, decoder: Decoder, context: int) -> None:
        """context: positions of a text."""
        self.decoder, self.context = decoder, context
        self.cache = decoder.cache()
        self.tokens: list[int] = []

    @property
    def position(self) -> int:
        """Tokens seen so far."""
        return self.cache.length

    def feed(self, tokens: Sequence[int] | NDArray[np.integer]) -> F32:
        """Go on with these tokens -> logits [vocab] after the last. Raises InputError."""
        ids = self._checked(tokens)
        self._reach(self.position + len(ids))
        for a in range(0, len(ids), _CHUNK):
            hidden = self.decoder.hidden(ids[a : a + _CHUNK], self.cache)
        self.tokens += ids.tolist()
        if len(ids) > 1:
            self.cache.mark()  # the end of a prompt: what is asked next often begins so
        logits: F32 = self.decoder.logits(hidden[-1:])[0]
        return logits

    def feed_all(self, tokens: Sequence[int] | NDArray[np.integer]) -> F32:
        """Go on with these tokens -> logits [T, vocab] after each. Raises InputError."""
        ids = self._checked(tokens)
        self._reach(self.position + len(ids))
        out = np.empty((len(ids), self.decoder.hyper.vocab), np.float32)
        for a in range(0, len(ids), _CHUNK):
            out[a : a + _CHUNK] = self.decoder.logits(self.decoder.hidden(ids[a : a + _CHUNK], self.cache))
        self.tokens += ids.tolist()
        return out

    def states(self, tokens: Sequence[int] | NDArray[np.integer]) -> F32:
        """Go on with these tokens -> states [T, hidden] after the last norm. Raises InputError."""
        ids = self._checked(tokens)
        self._reach(self.position + len(ids))
        pieces = [self.decoder.hidden(ids[a : a + _CHUNK], self.cache) for a in range(0, len(ids), _CHUNK)]
        self.tokens += ids.tolist()
        return np.concatenate(pieces)

    def _reach(self, length: int) -> None:
        """The text will have that length: what the cache holds is computed anew where it was rotated otherwise (longrope)."""
        before, self.cache.reach = self.cache.reach, length
        if self.position and any(r.of(before) is not r.of(length) for r in self.decoder.rotaries):
            past = self.tokens[: self.position]
            self.cache.truncate(0)
            self._again(past)

    def rewind(self, position: int) -> int:
        """Forget what came after the first `position` tokens -> how many of those were computed anew: a recurrent state cannot be cut back, so that the
        text goes through again from the last state that was held."""
        past = self.tokens[: max(0, position)]
        self.cache.truncate(position)
        return self._again(past)

    def _again(self, past: Sequence[int]) -> int:
        """Compute these tokens from where the cache ends -> how many were left to compute. An interrupt leaves a session of fewer tokens."""
        start = self.position
        self.tokens = list(past[:start])
        for a in range(start, len(past), _CHUNK):
            self.decoder.hidden(np.asarray(past[a : a + _CHUNK], np.int64), self.cache)
            self.tokens += past[a : a + _CHUNK]
        if len(past) > start:
            self.cache.mark()
        return max(0, len(past) - start)

    def _checked(self, tokens: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
        return token_ids(tokens, self.decoder.hyper.vocab, self.context, self.position)


def token_ids(
    tokens: Sequence[int] | NDArray[np.integer], vocab: int, context: int, position: int = 0
) -> NDArray[np.int64]:
    """The ids [T] of a text that goes on at this position. Raises InputError for ids outside the vocabulary, and for more than the context holds."""
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise InputError("tokens must be a list of ids", found=f"{ids.dtype} {list(ids.shape)}")
    listed = ids.tolist()  # of one token, the common case, Python finds the least and the greatest sooner than numpy
    if min(listed) < 0 or max(listed) >= vocab:
        raise InputError("a token is outside the vocabulary", expected=f"0 to {vocab - 1}", found=max(listed))
    if position + len(ids) > context:
        raise InputError(
            "the text is longer than the model's context",
            expected=f"at most {context} tokens",
            found=position + len(ids),
        )
    return ids.astype(np.int64)
