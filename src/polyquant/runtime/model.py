"""A loaded model: logits, sessions, embeddings and text generation."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.architectures.hyper import Hyper
from polyquant.architectures.pooling import Kind, Pooling, pooling_of
from polyquant.architectures.record import Architecture
from polyquant.errors import printable
from polyquant.runtime.chat import render_chat
from polyquant.runtime.decoder import Decoder
from polyquant.runtime.embed import Texts, embed
from polyquant.runtime.generate import Generation, generate
from polyquant.runtime.generate_batch import Answer, generate_batch
from polyquant.runtime.recommended import Recommended, recommended
from polyquant.runtime.sampling import Sampling
from polyquant.runtime.session import Session
from polyquant.tokenizers.tokenizer import Tokenizer, open_tokenizer
from polyquant.types import F32, Checkpoint

__all__ = ["Model"]


class Model:
    """A checkpoint with its decoder."""

    def __init__(
        self, checkpoint: Checkpoint, architecture: Architecture, decoder: Decoder | None, *, context: int | None = None
    ) -> None:
        self.checkpoint, self.architecture = checkpoint, architecture
        self._decoder, self._context = decoder, context

    def __repr__(self) -> str:
        sizes = f"{self.hyper.layers} layers of {self.hyper.hidden}, vocabulary {self.vocab}, context {self.context}"
        return f"<{type(self).__name__} {self.architecture.name} {printable(self.checkpoint.path)}: {sizes}>"

    @property
    def decoder(self) -> Decoder:
        """The decoder."""
        assert self._decoder is not None
        return self._decoder

    @property
    def hyper(self) -> Hyper:
        """Its hyper-parameters."""
        return self.decoder.hyper

    @property
    def vocab(self) -> int:
        """The vocabulary size."""
        return self.hyper.vocab

    @property
    def context(self) -> int:
        """The maximum number of tokens: the model's, or less if passed to `load`."""
        return self.hyper.context if self._context is None else self._context

    @cached_property
    def pooling(self) -> Pooling | None:
        """The pooling of token states into a vector; None if the files do not specify it.

        Raises InputError, UnsupportedError.
        """
        return pooling_of(self.checkpoint, self.architecture.name)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises UnsupportedError if there is none that is supported, InputError if it is invalid."""
        return open_tokenizer(self.checkpoint)

    @cached_property
    def recommended(self) -> Recommended:
        """The sampling recommended by the files; `generate` does not use it. Raises InputError for an invalid file."""
        return recommended(self.checkpoint)

    def session(self) -> Session:
        """Return a new session with an empty cache."""
        return Session(self.decoder, self.context)

    def logits(self, tokens: Sequence[int] | NDArray[np.integer]) -> F32:
        """Return the logits float32 [T, vocab]; row t follows token t.

        Raises InputError for invalid tokens or too many.
        """
        return self.session().feed_all(tokens)

    def states(self, tokens: Sequence[int] | NDArray[np.integer]) -> F32:
        """Return the states after the final norm, float32 [T, hidden]. Raises InputError as `logits`."""
        return self.session().states(tokens)

    def embed(self, texts: Texts, *, pooling: Kind | None = None, normalize: bool | None = None) -> F32:
        """Return embeddings float32 [n, hidden] of strings or lists of token ids; see runtime/embed.py.

        Raises InputError, UnsupportedError.
        """
        return embed(self, texts, pooling=pooling, normalize=normalize)

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
        prompt_lookup: int = 0,
    ) -> Generation:
        """Generate tokens from a prompt; iterate over the result. See runtime/generate.py and runtime/sampling.py.

        prompt_lookup: maximum number of tokens per pass that are drafted from the text so far: up to 3 change the speed
        only, more are faster and may decide near ties of two tokens differently (runtime/prompt_lookup.py).

        Warns if a seed is given at temperature 0, which draws nothing. Raises InputError, UnsupportedError.
        """
        if seed is not None and temperature == 0:
            warnings.warn("seed has no effect at temperature 0; pass temperature=0.8, for example", stacklevel=2)
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, repetition_window, seed)
        return generate(
            self, prompt, max_tokens=max_tokens, sampling=sampling, stop=stop, session=session,
            add_special=add_special, prompt_lookup=prompt_lookup,
        )  # fmt: skip

    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
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
        add_special: bool = True,
        parallel: int | None = None,
        memory: int | None = None,
    ) -> Iterator[Answer]:
        """Generate from many prompts together; iterate over the answers, in the order in which they end.

        parallel: answers computed at once. memory: limit of their caches in bytes. See runtime/generate_batch.py; the
        other options are those of `generate`, answer i uses `seed + i`. Raises InputError, UnsupportedError.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, repetition_window, seed)
        return generate_batch(
            self, prompts, max_tokens=max_tokens, sampling=sampling, stop=stop, add_special=add_special,
            parallel=parallel, memory=memory,
        )  # fmt: skip

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
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
        prompt_lookup: int = 0,
    ) -> Generation:
        """Generate the answer to messages such as {"role": "user", "content": "Hello"}.

        template: the name of one of the checkpoint's templates. The other options are those of `generate`. Raises
        InputError, UnsupportedError.
        """
        return self.generate(
            render_chat(self.tokenizer, messages, name=template, tools=tools),
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, repetition_window=repetition_window, seed=seed, stop=stop,
            session=session, add_special=False, prompt_lookup=prompt_lookup,
        )  # fmt: skip
