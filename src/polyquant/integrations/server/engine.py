"""Prompt tokens -> pieces of text. One session is kept: what the next prompt has in common with the last text is not computed again.

A chat that goes on sends everything said so far once more, so all but the newest message is in the cache already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from polyquant.architectures.pooling import Kind, Pooling
from polyquant.errors import PolyquantError, UnsupportedError
from polyquant.integrations.server.refusal import RequestError
from polyquant.integrations.server.requests import GenerationRequest, Prompt
from polyquant.runtime.chat import render_chat
from polyquant.runtime.embed import settled, unit, vectors
from polyquant.runtime.generate import Generation
from polyquant.runtime.generate import generate as start
from polyquant.runtime.model import Model
from polyquant.runtime.session import Session, token_ids
from polyquant.types import F32

__all__ = ["Engine", "Event", "Finish", "Piece", "Vector"]

_PREFILL = 128  # tokens of a prompt between two looks at whether anybody still waits for it


@dataclass(frozen=True, slots=True)
class Piece:
    """A token; text: what it completes, perhaps nothing."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Finish:
    """An answer's end. reason: "stop" or "length"; cached_tokens: of the prompt, not computed again."""

    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """Of a text."""

    values: F32


Event = tuple[int, Piece | Finish | Vector]


class Engine:
    """A model with its one session, if it writes text. `prepare` and `text_ids` are safe in any thread; what `answers` and `vectors` give runs in one thread
    at a time. pooling: how vectors of texts are made; None if the model gives none."""

    def __init__(self, model: Model, pooling: Kind | None = None) -> None:
        """pooling: instead of what the model says. Raises UnsupportedError for an encoder that does not say it."""
        self.model, self.tokenizer = model, model.tokenizer
        self.writes = not model.architecture.encoder
        self.defaults = model.recommended.values if self.writes else {}
        self.pooling: Pooling | None = None
        try:
            self.pooling = settled(model, pooling)
        except UnsupportedError:
            if not self.writes:
                raise
        self._sessions = [model.session()] if self.writes else []

    @property
    def _session(self) -> Session:
        return self._sessions[0]

    def check_writes(self, name: str) -> None:
        """Raises RequestError for a model that writes no text."""
        if not self.writes:
            raise _other_model(f"the model '{name}' gives embeddings and writes no text: ask /v1/embeddings")

    def check_embeds(self, name: str) -> None:
        """Raises RequestError for a model that gives no vectors of texts."""
        if self.pooling is None:
            raise _other_model(f"the model '{name}' gives no embeddings: its files do not say how they are pooled")

    def text_ids(self, texts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of texts whose vectors are asked for. Raises PolyquantError for one that cannot be embedded."""
        found = [self._encode(text) if isinstance(text, str) else list(text) for text in texts]
        for ids in found:
            self._check(ids, "input")
            token_ids(ids, self.model.vocab, self.model.context)
        return found

    def vectors(
        self, ids: Sequence[Sequence[int]], dimensions: int | None, stopped: Callable[[], bool]
    ) -> Iterator[Event]:
        """The vector of one text after the other, cut to its first numbers if asked for; ends early once `stopped` says so."""
        assert self.pooling is not None
        try:
            for index, found in enumerate(vectors(self.model, ids, self.pooling)):
                cut = found[:dimensions]
                yield index, Vector(unit(cut) if self.pooling.normalize and len(cut) < len(found) else cut)
                if stopped():
                    return
        except PolyquantError as problem:  # the request was sound: the weights are not
            raise RequestError(problem.message, status=500, code="server_error") from None

    def prepare(self, request: GenerationRequest) -> list[Generation]:
        """The answers that a request asks for, not begun: n for each prompt. Raises PolyquantError for prompts that cannot be run."""
        if request.chat:
            prompts = [self._encode(render_chat(self.tokenizer, request.messages), add_special=False)]
        else:
            prompts = [self._encode(p) if isinstance(p, str) else list(p) for p in request.prompts]
        for ids in prompts:
            self._check(ids, "messages" if request.chat else "prompt")
        return [self._generation(request, ids, i) for ids in prompts for i in range(request.n)]

    def answers(self, generations: Sequence[Generation], stopped: Callable[[], bool]) -> Iterator[Event]:
        """One answer after the other, as (its index, what happens); ends early once `stopped` says so."""
        for index, generation in enumerate(generations):
            for event in self._answer(generation, stopped):
                yield index, event
            if stopped():
                return

    def _answer(self, generation: Generation, stopped: Callable[[], bool]) -> Iterator[Piece | Finish]:
        whole = False
        try:
            cached = self._feed(generation.prompt, stopped)
            if not stopped():
                for token in generation:
                    yield Piece(token.text, token.logprob)
                    if generation.finish is None and stopped():
                        break
            whole = True
        except PolyquantError as problem:  # the request was sound: the weights are not
            raise RequestError(problem.message, status=500, code="server_error") from None
        finally:
            if not whole:  # a step that failed half way leaves layers of different lengths
                self._session.rewind(0)
        if generation.finish is not None:
            yield Finish(generation.finish, generation.prompt_tokens, generation.generated, cached)

    def _feed(self, prompt: Sequence[int], stopped: Callable[[], bool]) -> int:
        """All of a prompt but its last token, from where it differs from the session -> how many tokens the session had."""
        session, last = self._session, len(prompt) - 1
        common = 0
        while common < min(session.position, last) and session.tokens[common] == prompt[common]:
            common += 1
        common = session.cache.reachable(common)
        session.rewind(common)
        for a in range(common, last, _PREFILL):
            if stopped():
                break
            session.feed(prompt[a : min(a + _PREFILL, last)])
        return common

    def _generation(self, request: GenerationRequest, ids: list[int], index: int) -> Generation:
        sampling = request.sampling
        if index and sampling.seed is not None:  # n answers of one seed differ, and are the same every time
            sampling = replace(sampling, seed=sampling.seed + index)
        return start(
            self.model,
            ids,
            max_tokens=request.max_tokens,
            sampling=sampling,
            stop=request.stop,
            session=self._session,
        )

    def _encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special=add_special)

    def _check(self, ids: list[int], param: str) -> None:
        if not ids:
            raise RequestError("the prompt is empty", code="invalid_value", param=param)
        if len(ids) > self.model.context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, the model's context {self.model.context}",
                code="context_length_exceeded",
                param=param,
            )


def _other_model(message: str) -> RequestError:
    return RequestError(message, code="unsupported_model", param="model")
