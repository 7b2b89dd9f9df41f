"""Generate tokens from a prompt, one at a time.

    for token in model.generate("Once upon a time", max_tokens=64):
        print(token.text, end="", flush=True)

Generation finishes with "stop" (an end token or a stop string) or with "length" (max_tokens, or a full context).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from time import perf_counter
from typing import Literal, Protocol

import numpy as np

from polyquant.errors import InputError, UnsupportedError
from polyquant.runtime.prompt_lookup import PromptLookup, checked_drafts
from polyquant.runtime.sampling import Constraint, Sampler, Sampling, log_probabilities, log_probability
from polyquant.runtime.session import Session
from polyquant.tokenizers.tokenizer import TextStream, Tokenizer
from polyquant.types import F32

__all__ = ["Finish", "Generation", "Generator", "Token", "generate"]

Finish = Literal["stop", "length"]
_LONGEST = 256  # characters per token, on average: longer prompts are rejected without tokenizing


class Generator(Protocol):
    """The members of a model that generation uses (runtime.model.Model)."""

    @property
    def vocab(self) -> int:
        """The vocabulary size."""

    @property
    def context(self) -> int:
        """The maximum number of tokens."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises UnsupportedError if there is none that is supported."""

    def session(self) -> Session:
        """Return a new session."""


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token.

    text: the characters that it completes; empty within a multi-byte character or a possible stop string. The joined
    `text` of all tokens is the answer. logprob: natural, of the model itself (before temperature and sampling cuts).
    top: the most likely tokens as (id, logprob), if requested.
    """

    id: int
    text: str
    logprob: float
    top: Sequence[tuple[int, float]] = ()


class Generation:
    """A generation in progress; iterate over it once.

    prompt_tokens, generated: counts, including the end token. finish: None until the end. prompt_seconds, seconds: time
    for the prompt, and for the tokens after the first. unlimited: only the context limits the answer. lookup: the
    drafts, None without prompt lookup.
    """

    def __init__(
        self,
        session: Session,
        prompt: Sequence[int],
        sampler: Sampler,
        limit: int | None,
        ends: frozenset[int],
        text: _Text,
        top: int = 0,
        lookup: PromptLookup | None = None,
    ) -> None:
        self.session, self.prompt, self.lookup = session, tuple(prompt), lookup
        self.prompt_tokens, self.generated = len(prompt), 0
        self.finish: Finish | None = None
        self.prompt_seconds = self.seconds = 0.0
        self.reused = 0
        self.unlimited = limit is None
        self._sampler, self._ends, self._text, self._top = sampler, ends, text, top
        self._history = list(prompt)
        self._room = session.context - len(prompt) + 1  # the last token is not fed
        self._limit = self._room if limit is None else min(limit, self._room)
        self._tokens = self._run()

    def __iter__(self) -> Iterator[Token]:
        return self._tokens

    @property
    def full(self) -> bool:
        """True if the answer ended because the context is full."""
        return self.finish == "length" and self.generated >= self._room

    @property
    def prompt_rate(self) -> float:
        """Processed prompt tokens per second; 0 before the first token."""
        return (self.prompt_tokens - self.reused) / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def rate(self) -> float:
        """Tokens per second after the first one; 0 until there are two."""
        return (self.generated - 1) / self.seconds if self.seconds else 0.0

    @property
    def limit(self) -> int:
        """The maximum number of generated tokens."""
        return self._limit

    def _run(self) -> Iterator[Token]:
        token = self.choose(self._start())
        yield token
        while self.finish is None:
            for following in self.step(token.id):
                token = following
                yield token

    def step(self, token: int) -> Iterator[Token]:
        """Feed a token, and drafts of the next ones; yield the tokens that are chosen, at least one.

        When the iterator ends, the session holds all except the last one.
        """
        drafts = self._drafts()
        began = perf_counter()
        if drafts and self.lookup is not None:
            rows = self.session.verify([token, *drafts], stepwise=self.lookup.exact)
        else:
            rows = self.session.feed([token])[None]
        seconds = perf_counter() - began
        self.seconds += seconds
        for i, logits in enumerate(rows):
            chosen = self.choose(logits)
            if i < len(drafts) and chosen.id == drafts[i] and self.finish is None:
                yield chosen
                continue
            if drafts:
                self.session.rewind(len(self._history) - 1)
            if self.lookup is not None:
                self.lookup.add(len(drafts), i, seconds)
            yield chosen
            return

    def _drafts(self) -> list[int]:
        """Return the drafts of the tokens after the next one."""
        if self.lookup is None:
            return []
        most = min(self.lookup.most, self._limit - self.generated - 1)
        return self.lookup.draft(self._history, self.session.passable(1 + most) - 1) if most > 0 else []

    def choose(self, logits: F32) -> Token:
        """Return the next token, sampled from logits [vocab]; sets `finish` at the end of the answer."""
        token = self._sampler.pick(logits, self._history)
        self._history.append(token)
        self.generated += 1
        if token in self._ends:
            self.finish, text = "stop", self._text.finish()
        else:
            text = self._text.push(token)
            if self._text.stopped:
                self.finish = "stop"
            elif self.generated >= self._limit:
                self.finish, text = "length", text + self._text.finish()
                if self._text.stopped:
                    self.finish = "stop"
        top = log_probabilities(logits, self._top) if self._top else ()
        return Token(token, text, log_probability(logits, token), top)

    def _start(self) -> F32:
        """Return the logits after the prompt; tokens that the session has already processed are not run again."""
        reusable = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.session.tokens, self.prompt, strict=False))
        )
        reusable = min(reusable, len(self.prompt) - 1)  # feed at least one token, for its logits
        began = perf_counter()
        self.reused = reusable - self.session.rewind(reusable)
        logits = self.session.feed(self.prompt[reusable:])
        self.prompt_seconds = perf_counter() - began
        return logits


class _Text:
    """The text of the tokens so far, held back while it may be the start of a stop string."""

    def __init__(self, stream: TextStream | None, stop: Sequence[str]) -> None:
        self._stream, self._stop, self._held = stream, tuple(stop), ""
        self.stopped = False

    def push(self, token: int) -> str:
        return self._pass(self._stream.push(token)) if self._stream is not None else ""

    def finish(self) -> str:
        text = self._pass(self._stream.finish()) if self._stream is not None else ""
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _pass(self, text: str) -> str:
        """Return the text that is final: up to a stop string, or up to its possible start."""
        text = self._held + text
        positions = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if positions:
            self.stopped, self._held = True, ""
            return text[: min(positions)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of the text that starts the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def generate(
    model: Generator,
    prompt: str | Sequence[int],
    *,
    max_tokens: int | None = 128,
    sampling: Sampling | None = None,
    stop: str | Sequence[str] = (),
    session: Session | None = None,
    add_special: bool = True,
    constraint: Constraint | None = None,
    top: int = 0,
    prompt_lookup: int = 0,
) -> Generation:
    """Generate from a prompt: a string, or token ids, which are used unchanged.

    max_tokens: None for until the context is full. session: continues this one; its common prefix with the prompt is
    not run again. add_special: add BOS and EOS to a string as the tokenizer specifies. constraint: restricts the
    answer, such as to a grammar. top: number of most likely tokens to report with each token. prompt_lookup: maximum
    number of tokens that are drafted from earlier ones per pass, see runtime/prompt_lookup.py.

    Token ids need no tokenizer; without one the tokens have no text. Raises InputError, UnsupportedError, before any
    work.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(s, str) and s for s in stops):
        raise InputError("stop strings must not be empty", found=stops)
    if max_tokens is not None and (isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1):
        raise InputError("max_tokens is out of range", expected="an integer of at least 1", found=max_tokens)
    drafts = checked_drafts(prompt_lookup)
    ids = _ids(model, prompt, add_special)
    tokenizer = _tokenizer(model, needed=isinstance(prompt, str) or bool(stops))
    text = _Text(tokenizer.stream() if tokenizer is not None else None, stops)
    ends = tokenizer.ends if tokenizer is not None else frozenset()
    sampler = Sampler(_within(sampling or Sampling(), model.vocab), constraint)
    session = session or model.session()
    used = drafts > 0 and session.lookup_problem(drafts) is None
    lookup = PromptLookup(drafts, session.decoder.pass_times) if used else None
    return Generation(session, ids, sampler, max_tokens, ends, text, top, lookup)


def _within(sampling: Sampling, vocab: int) -> Sampling:
    """Return the parameters, unless they bias a token outside the vocabulary."""
    if sampling.logit_bias and (last := max(sampling.logit_bias)) >= vocab:
        raise InputError("logit_bias has a token outside the vocabulary", expected=f"0 to {vocab - 1}", found=last)
    return sampling


def _tokenizer(model: Generator, *, needed: bool) -> Tokenizer | None:
    try:
        return model.tokenizer
    except UnsupportedError:
        if needed:
            raise
        return None


def _ids(model: Generator, prompt: str | Sequence[int], add_special: bool) -> list[int]:
    limit = model.context
    if isinstance(prompt, str):
        if len(prompt) > _LONGEST * limit:
            raise _too_long(limit, f"a prompt of {len(prompt)} characters")
        ids = model.tokenizer.encode(prompt, add_special=add_special)
    else:
        array = np.asarray(prompt)
        ids = [int(i) for i in array] if array.ndim == 1 and array.dtype.kind in "iu" else []
    if not ids:
        raise InputError("the prompt is empty", expected="a string or token ids")
    if len(ids) > limit:
        raise _too_long(limit, f"{len(ids)} tokens")
    if min(ids) < 0 or max(ids) >= model.vocab:
        raise InputError(
            "a token is outside the vocabulary",
            expected=f"0 to {model.vocab - 1}",
            found=max(ids) if min(ids) >= 0 else min(ids),
        )
    return ids


def _too_long(limit: int, found: str) -> InputError:
    return InputError("the prompt is longer than the model's context", expected=f"at most {limit} tokens", found=found)
