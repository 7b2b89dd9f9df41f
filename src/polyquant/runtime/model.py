"""A loaded model: logits, and sessions that go on where they stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.architectures.record import Architecture
from polyquant.errors import InputError
from polyquant.runtime.chat import render_chat
from polyquant.runtime.decoder import Decoder
from polyquant.runtime.generate import Generation, generate
from polyquant.runtime.sampling import Sampling
from polyquant.tokenizers.tokenizer import Tokenizer, open_tokenizer
from polyquant.types import F32, Checkpoint

__all__ = ["Model", "Session"]

_CHUNK = 512  # tokens that go through the layers at a time


class Model:
    """A checkpoint with its decoder."""

    def __init__(
        self, checkpoint: Checkpoint, architecture: Architecture, decoder: Decoder, *, context: int | None = None
    ) -> None:
        self.checkpoint, self.architecture, self.decoder = checkpoint, architecture, decoder
        self._context = decoder.hyper.context if context is None else context

    @property
    def vocab(self) -> int:
        """Rows of the head."""
        return self.decoder.hyper.vocab

    @property
    def context(self) -> int:
        """Positions of a text: what the model was made for, or fewer if `load` was told so."""
        return self._context

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Text <-> ids. Raises UnsupportedError where there is none that can be run, InputError where it is broken."""
        return open_tokenizer(self.checkpoint)

    def session(self) -> Session:
        """A new text: an empty cache."""
        return Session(self)

    def logits(self, tokens: Sequence[int] | NDArray[np.integer]) -> F32:
        """float32 [T, vocab]: row t after token t. Raises InputError for tokens outside the vocabulary, or more than the context."""
        return self.session().feed_all(tokens)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        repetition_window: int = 64,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        session: Session | None = None,
        add_special: bool = True,
    ) -> Generation:
        """Tokens that follow a prompt, to iterate over; see runtime/generate.py and runtime/sampling.py. Raises InputError, UnsupportedError."""
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, repetition_window, seed)
        return generate(
            self, prompt, max_tokens=max_tokens, sampling=sampling, stop=stop, session=session, add_special=add_special
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Generation:
        """The answer to messages such as {"role": "user", "content": "Hello"}. template: a name among the checkpoint's templates.
        options: as of `generate`. Raises InputError, UnsupportedError."""
        return self.generate(
            render_chat(self.tokenizer, messages, name=template, tools=tools), **{**options, "add_special": False}
        )


class Session:
    """One text on its way through the model. tokens: those seen so far; position: how many."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.cache = model.decoder.cache()
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
            hidden = self.model.decoder.hidden(ids[a : a + _CHUNK], self.cache)
        self.tokens += ids.tolist()
        logits: F32 = self.model.decoder.logits(hidden[-1:])[0]
        return logits

    def feed_all(self, tokens: Sequence[int] | NDArray[np.integer]) -> F32:
        """Go on with these tokens -> logits [T, vocab] after each. Raises InputError."""
        ids = self._checked(tokens)
        self._reach(self.position + len(ids))
        out = np.empty((len(ids), self.model.vocab), np.float32)
        for a in range(0, len(ids), _CHUNK):
            out[a : a + _CHUNK] = self.model.decoder.logits(self.model.decoder.hidden(ids[a : a + _CHUNK], self.cache))
        self.tokens += ids.tolist()
        return out

    def _reach(self, length: int) -> None:
        """The text will have that length: what the cache holds is computed anew where it would rotate otherwise."""
        past, self.cache.reach = self.position, length
        if past and any(r.of(past) is not r.of(length) for r in self.model.decoder.rotaries):
            self.cache.truncate(0)
            ids = np.asarray(self.tokens, np.int64)
            for a in range(0, past, _CHUNK):
                self.model.decoder.hidden(ids[a : min(a + _CHUNK, past)], self.cache)

    def rewind(self, position: int) -> None:
        """Forget what came after the first `position` tokens."""
        self.cache.truncate(position)
        del self.tokens[position:]

    def _checked(self, tokens: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
        ids = np.asarray(tokens)
        if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise InputError("tokens must be a list of ids", found=f"{ids.dtype} {list(ids.shape)}")
        listed = (
            ids.tolist()
        )  # of one token, the common case, Python finds the least and the greatest sooner than numpy
        if min(listed) < 0 or max(listed) >= self.model.vocab:
            raise InputError(
                "a token is outside the vocabulary", expected=f"0 to {self.model.vocab - 1}", found=max(listed)
            )
        if self.position + len(ids) > self.model.context:
            raise InputError(
                "the text is longer than the model's context",
                expected=f"at most {self.model.context} tokens",
                found=self.position + len(ids),
            )
        return ids.astype(np.int64)
