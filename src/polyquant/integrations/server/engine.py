"""Prompt tokens -> pieces of text. One session is kept: its common prefix with the next prompt is not recomputed.

A continued chat sends its whole history again, so everything except the newest message is already in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from polyquant.architectures.pooling import Kind, Pooling
from polyquant.errors import PolyquantError, UnsupportedError
from polyquant.integrations.server.refusal import RequestError
from polyquant.integrations.server.requests import GenerationRequest, Prompt
from polyquant.runtime.chat import render_chat
from polyquant.runtime.embed import resolved_pooling, unit, vectors
from polyquant.runtime.generate import Generation
from polyquant.runtime.generate import Token as Piece
from polyquant.runtime.generate import generate as start
from polyquant.runtime.grammar import Grammars, JsonConstraint
from polyquant.runtime.model import Model
from polyquant.runtime.session import Session, token_ids
from polyquant.types import F32

__all__ = ["Engine", "Event", "Finish", "Piece", "Vector"]

_PREFILL = 128  # prompt tokens between two checks for cancellation


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an answer. reason: "stop" or "length"; cached_tokens: prompt tokens that were not recomputed."""

    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """The embedding of an input."""

    values: F32


Event = tuple[int, Piece | Finish | Vector]


class Engine:
    """A model with its session, if it generates text.

    `prepare` and `text_ids` are thread-safe; the iterators of `answers` and `vectors` run in one thread at a time.
    pooling: of embeddings; None if the model has none.
    """

    def __init__(self, model: Model, pooling: Kind | None = None) -> None:
        """pooling: overrides the model's. Raises UnsupportedError for an encoder that does not specify one."""
        self.model, self.tokenizer = model, model.tokenizer
        self.generates = not model.architecture.encoder
        self.defaults = model.recommended.values if self.generates else {}
        self.pooling: Pooling | None = None
        try:
            self.pooling = resolved_pooling(model, pooling)
        except UnsupportedError:
            if not self.generates:
                raise
        self._grammars = Grammars(model.tokenizer, model.vocab)
        self._sessions = [model.session()] if self.generates else []

    @property
    def _session(self) -> Session:
        return self._sessions[0]

    def check_generates(self, name: str) -> None:
        """Raise RequestError for a model that generates no text."""
        if not self.generates:
            raise _other_model(f"the model '{name}' produces embeddings and generates no text: use /v1/embeddings")

    def check_embeds(self, name: str) -> None:
        """Raise RequestError for a model that produces no embeddings."""
        if self.pooling is None:
            raise _other_model(f"the model '{name}' produces no embeddings: its files do not specify a pooling")

    def text_ids(self, texts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of inputs to embed. Raises PolyquantError for one that cannot be embedded."""
        all_ids = [self._encode(text) if isinstance(text, str) else list(text) for text in texts]
        for ids in all_ids:
            self._check(ids, "input")
            token_ids(ids, self.model.vocab, self.model.context)
        return all_ids

    def vectors(
        self, ids: Sequence[Sequence[int]], dimensions: int | None, stopped: Callable[[], bool]
    ) -> Iterator[Event]:
        """Yield the vectors of the inputs, truncated to `dimensions` if requested; end early once `stopped` returns
        True."""
        assert self.pooling is not None
        try:
            for index, vector in enumerate(vectors(self.model, ids, self.pooling)):
                cut = vector[:dimensions]
                yield index, Vector(unit(cut) if self.pooling.normalize and len(cut) < len(vector) else cut)
                if stopped():
                    return
        except PolyquantError as problem:  # the request was valid, so the weights are at fault
            raise RequestError(problem.message, status=500, code="server_error") from None

    def prepare(self, request: GenerationRequest) -> list[Generation]:
        """Return the unstarted answers of a request: n per prompt. Raises PolyquantError for invalid prompts."""
        if request.chat:
            prompts = [self._encode(render_chat(self.tokenizer, request.messages), add_special=False)]
        else:
            prompts = [self._encode(p) if isinstance(p, str) else list(p) for p in request.prompts]
        for ids in prompts:
            self._check(ids, "messages" if request.chat else "prompt")
        grammar = None if request.schema is None else self._grammars.json(request.schema)
        return [self._generation(request, ids, i, grammar) for ids in prompts for i in range(request.n)]

    def answers(self, generations: Sequence[Generation], stopped: Callable[[], bool]) -> Iterator[Event]:
        """Generate the answers in sequence as (index, event); end early once `stopped` returns True."""
        for index, generation in enumerate(generations):
            for event in self._answer(generation, stopped):
                yield index, event
            if stopped():
                return

    def _answer(self, generation: Generation, stopped: Callable[[], bool]) -> Iterator[Piece | Finish]:
        complete = False
        try:
            cached = self._feed(generation.prompt, stopped)
            if not stopped():
                for token in generation:
                    yield token
                    if generation.finish is None and stopped():
                        break
            complete = True
        except UnsupportedError:  # a JSON schema that turns out to be too complex
            raise
        except PolyquantError as problem:  # the request was valid, so the weights are at fault
            raise RequestError(problem.message, status=500, code="server_error") from None
        finally:
            if not complete:  # a step that failed half way leaves layers of different lengths
                self._session.rewind(0)
        if generation.finish is not None:
            yield Finish(generation.finish, generation.prompt_tokens, generation.generated, cached)

    def _feed(self, prompt: Sequence[int], stopped: Callable[[], bool]) -> int:
        """Feed a prompt except its last token, after the prefix shared with the session; return the length of that
        prefix."""
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

    def _generation(
        self, request: GenerationRequest, ids: list[int], index: int, grammar: JsonConstraint | None
    ) -> Generation:
        sampling = request.sampling
        if index and sampling.seed is not None:  # n answers for one seed differ, but are reproducible
            sampling = replace(sampling, seed=sampling.seed + index)
        return start(
            self.model,
            ids,
            max_tokens=request.max_tokens,
            sampling=sampling,
            stop=request.stop,
            constraint=None if grammar is None else grammar.copy(),
            top=request.top,
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
