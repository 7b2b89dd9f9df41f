"""A loaded model: logits, and sessions that go on where they stopped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError
from polyquant.models.names import Family
from polyquant.runtime.decoder import Decoder
from polyquant.types import F32, Checkpoint

__all__ = ["Model", "Session"]

_CHUNK = 512  # tokens that go through the layers at a time


class Model:
    """A checkpoint with its decoder."""

    def __init__(self, checkpoint: Checkpoint, family: Family, decoder: Decoder) -> None:
        self.checkpoint, self.family, self.decoder = checkpoint, family, decoder

    @property
    def vocab(self) -> int:
        """Rows of the head."""
        return self.decoder.hyper.vocab

    @property
    def context(self) -> int:
        """Positions that the model was made for."""
        return self.decoder.hyper.context

    def session(self) -> Session:
        """A new text: an empty cache."""
        return Session(self)

    def logits(self, tokens: Sequence[int] | NDArray[np.integer]) -> F32:
        """float32 [T, vocab]: row t after token t. Raises InputError for tokens outside the vocabulary, or more than the context."""
        return self.session().feed_all(tokens)


class Session:
    """One text on its way through the model. position: tokens seen."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.cache = model.decoder.cache()

    @property
    def position(self) -> int:
        """Tokens seen so far."""
        return self.cache.length

    def feed(self, tokens: Sequence[int] | NDArray[np.integer]) -> F32:
        """Go on with these tokens -> logits [vocab] after the last. Raises InputError."""
        ids = self._checked(tokens)
        for a in range(0, len(ids), _CHUNK):
            hidden = self.model.decoder.hidden(ids[a : a + _CHUNK], self.cache)
        logits: F32 = self.model.decoder.logits(hidden[-1:])[0]
        return logits

    def feed_all(self, tokens: Sequence[int] | NDArray[np.integer]) -> F32:
        """Go on with these tokens -> logits [T, vocab] after each. Raises InputError."""
        ids = self._checked(tokens)
        out = np.empty((len(ids), self.model.vocab), np.float32)
        for a in range(0, len(ids), _CHUNK):
            out[a : a + _CHUNK] = self.model.decoder.logits(self.model.decoder.hidden(ids[a : a + _CHUNK], self.cache))
        return out

    def rewind(self, position: int) -> None:
        """Forget what came after the first `position` tokens."""
        self.cache.truncate(position)

    def _checked(self, tokens: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
        ids = np.asarray(tokens)
        if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise InputError("tokens must be a list of ids", found=f"{ids.dtype} {list(ids.shape)}")
        if ids.min() < 0 or ids.max() >= self.model.vocab:
            raise InputError(
                "a token is outside the vocabulary", expected=f"0 to {self.model.vocab - 1}", found=int(ids.max())
            )
        if self.position + len(ids) > self.model.context:
            raise InputError(
                "the text is longer than the model's context",
                expected=f"at most {self.model.context} tokens",
                found=self.position + len(ids),
            )
        return ids.astype(np.int64)
