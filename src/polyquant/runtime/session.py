"""A token sequence fed to a decoder incrementally."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError
from polyquant.runtime.decoder import Decoder
from polyquant.runtime.prompt_lookup import EXACT
from polyquant.types import F32

__all__ = ["Session", "common_prefix", "feed_together", "token_ids"]

_CHUNK = 512  # tokens per forward pass


class Session:
    """A token sequence and its cache. tokens: those fed so far; position: their number."""

    def __init__(self, decoder: Decoder, context: int) -> None:
        """context: maximum number of tokens."""
        self.decoder, self.context = decoder, context
        self.cache = decoder.cache()
        self.tokens: list[int] = []

    @property
    def position(self) -> int:
        """The number of tokens fed so far."""
        return self.cache.length

    def common(self, tokens: Sequence[int]) -> int:
        """Return the length of the prefix that these tokens share with the fed ones."""
        return common_prefix(self.tokens, tokens)

    def fork(self, position: int) -> Session:
        """Return an independent session that can be rewound to `position` or earlier, as this one can."""
        out = Session(self.decoder, self.context)
        out.cache, out.tokens = self.cache.fork(position), list(self.tokens)
        return out

    def feed(self, tokens: Sequence[int] | NDArray[np.integer]) -> F32:
        """Feed tokens -> logits [vocab] after the last one. Raises InputError."""
        ids = self._checked(tokens)
        self._reach(self.position + len(ids))
        for a in range(0, len(ids), _CHUNK):
            hidden = self.decoder.hidden(ids[a : a + _CHUNK], self.cache)
        self.tokens += ids.tolist()
        if len(ids) > 1:
            self.cache.mark()  # the end of a prompt: the next prompt often shares this prefix
        logits: F32 = self.decoder.logits(hidden[-1:])[0]
        return logits

    def prefill(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Feed tokens of a prompt without computing logits; more tokens of it follow. Raises InputError."""
        ids = self._checked(tokens)
        self._reach(self.position + len(ids))
        for a in range(0, len(ids), _CHUNK):
            self.decoder.hidden(ids[a : a + _CHUNK], self.cache)
            self.tokens += ids[a : a + _CHUNK].tolist()
        self.cache.mark()

    def feed_all(self, tokens: Sequence[int] | NDArray[np.integer]) -> F32:
        """Feed tokens -> logits [T, vocab] after each. Raises InputError."""
        ids = self._checked(tokens)
        self._reach(self.position + len(ids))
        out = np.empty((len(ids), self.decoder.hyper.vocab), np.float32)
        for a in range(0, len(ids), _CHUNK):
            out[a : a + _CHUNK] = self.decoder.logits(self.decoder.hidden(ids[a : a + _CHUNK], self.cache))
        self.tokens += ids.tolist()
        return out

    def passable(self, most: int) -> int:
        """Return how many tokens, at most `most` and at least 1, `verify` may take now: those that `rewind` can drop,
        in any number, with the exact earlier state."""
        start, grain = self.position, self.cache.grain
        room = self.context - start if grain == 1 else min(self.context - start, grain - 1 - start % grain)
        count = max(1, min(most, room))
        turns = any(r.of(start + 1) is not r.of(start + count) for r in self.decoder.rotaries)
        return 1 if turns or self.cache.recurrent else count

    def lookup_problem(self, drafts: int) -> str | None:
        """Return the reason why prompt lookup with `drafts` per pass is not used with this model; None if it is."""
        if self.cache.recurrent:
            return "the recurrent states of this model cannot drop drafted tokens"
        if drafts <= EXACT and not self.decoder.exact_passes:
            return (
                "on this machine, products of several tokens differ in the last bits from those of single ones; "
                f"with more than {EXACT} drafts it is used, and near ties of two tokens may be decided differently"
            )
        return None

    def verify(self, tokens: Sequence[int], *, stepwise: bool) -> F32:
        """Feed tokens -> logits [T, vocab] after each; stepwise: see Decoder.stepwise. Raises InputError."""
        ids = self._checked(tokens)
        self._reach(self.position + len(ids))
        hidden = self.decoder.stepwise(ids, self.cache) if stepwise else self.decoder.hidden(ids, self.cache)
        self.tokens += ids.tolist()
        return self.decoder.logits(hidden)

    def states(self, tokens: Sequence[int] | NDArray[np.integer]) -> F32:
        """Feed tokens -> states [T, hidden] after the final norm. Raises InputError."""
        ids = self._checked(tokens)
        self._reach(self.position + len(ids))
        pieces = [self.decoder.hidden(ids[a : a + _CHUNK], self.cache) for a in range(0, len(ids), _CHUNK)]
        self.tokens += ids.tolist()
        return np.concatenate(pieces)

    def _reach(self, length: int) -> None:
        """Prepare for a sequence of that length: recompute the cache if that changes its rotations (longrope)."""
        before, self.cache.reach = self.cache.reach, length
        if self.position and any(r.of(before) is not r.of(length) for r in self.decoder.rotaries):
            past = self.tokens[: self.position]
            self.cache.truncate(0)
            self._recompute(past)

    def rewind(self, position: int) -> int:
        """Drop the tokens after the first `position`; return how many were recomputed.

        A recurrent state cannot be truncated, so the tokens after the last mark are run again.
        """
        past = self.tokens[: max(0, position)]
        self.cache.truncate(position)
        return self._recompute(past)

    def _recompute(self, past: Sequence[int]) -> int:
        """Recompute these tokens from the end of the cache; return their number.

        After an interrupt the session is shorter.
        """
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


def feed_together(sessions: Sequence[Session], tokens: Sequence[int]) -> F32:
    """Feed one token to each of several sessions of the same decoder -> logits [N, vocab].

    Every matrix is multiplied by all N rows at once. Raises InputError, before any session changes.
    """
    if len({id(s) for s in sessions}) != len(sessions) or any(s.decoder is not sessions[0].decoder for s in sessions):
        raise InputError("tokens can only be fed together to different sessions of one decoder")
    ids = np.concatenate([s._checked([token]) for s, token in zip(sessions, tokens, strict=True)])
    for s in sessions:
        s._reach(s.position + 1)
    decoder = sessions[0].decoder
    hidden = decoder.together(ids, [s.cache for s in sessions])
    for s, token in zip(sessions, ids.tolist(), strict=True):
        s.tokens.append(token)
    return decoder.logits(hidden)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two lists of tokens."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def token_ids(
    tokens: Sequence[int] | NDArray[np.integer], vocab: int, context: int, position: int = 0
) -> NDArray[np.int64]:
    """Return the ids [T] of tokens that start at `position`.

    Raises InputError for ids outside the vocabulary, and beyond the context.
    """
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise InputError("tokens must be a list of ids", found=f"{ids.dtype} {list(ids.shape)}")
    listed = ids.tolist()  # for a single token, the common case, Python's min and max are faster than numpy's
    if min(listed) < 0 or max(listed) >= vocab:
        raise InputError("a token is outside the vocabulary", expected=f"0 to {vocab - 1}", found=max(listed))
    if position + len(ids) > context:
        raise InputError(
            "the input is longer than the model's context",
            expected=f"at most {context} tokens",
            found=position + len(ids),
        )
    return ids.astype(np.int64)
