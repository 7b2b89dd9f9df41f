"""Prompt tokens -> pieces of text. All requests generate in one batch, which keeps the caches of ended ones.

A continued chat sends its whole history again, so everything except the newest message is already in a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from polyquant.architectures.pooling import Kind, Pooling
from polyquant.errors import PolyquantError, UnsupportedError
from polyquant.integrations.server.queue import Turn, Work
from polyquant.integrations.server.refusal import RequestError
from polyquant.integrations.server.requests import GenerationRequest, Prompt
from polyquant.runtime.batch import Batch, Job, default_parallel
from polyquant.runtime.chat import render_chat
from polyquant.runtime.embed import resolved_pooling, unit, vectors
from polyquant.runtime.generate import Generation
from polyquant.runtime.generate import Token as Piece
from polyquant.runtime.generate import generate as start
from polyquant.runtime.grammar import Grammars, JsonConstraint
from polyquant.runtime.memory import default_memory
from polyquant.runtime.model import Model
from polyquant.runtime.session import token_ids
from polyquant.types import F32

__all__ = ["Engine", "Event", "Finish", "Piece", "Vector"]


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an answer. reason: "stop" or "length"; cached_tokens: prompt tokens that were not recomputed.

    drafted_tokens, accepted_tokens: of prompt lookup.
    """

    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """The embedding of an input."""

    values: F32


Event = tuple[int, Piece | Finish | Vector]


class Engine:
    """A model with its batch, if it generates text.

    `prepare` and `text_ids` are thread-safe; the iterators of `answers` and `vectors` run in one thread.
    pooling: of embeddings; None if the model has none.
    """

    def __init__(
        self,
        model: Model,
        pooling: Kind | None = None,
        *,
        parallel: int | None = None,
        memory: int | None = None,
        prompt_lookup: int = 0,
    ) -> None:
        """pooling: overrides the model's. parallel, memory: of the batch, see runtime/batch.py. prompt_lookup: maximum
        number of drafts while one answer is generated alone, see runtime/prompt_lookup.py.

        Raises UnsupportedError for an encoder without a pooling.
        """
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
        self.parallel, self.prompt_lookup = parallel or default_parallel(), prompt_lookup
        self.batch: Batch | None = None
        if self.generates:
            limit = memory or default_memory(model.checkpoint.nbytes)
            self.batch = Batch(model.decoder, model.context, parallel=self.parallel, memory=limit)

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

    def vectors(self, ids: Sequence[Sequence[int]], dimensions: int | None) -> Work[Event]:
        """Yield the vectors of the inputs, truncated to `dimensions` if requested, each in its own turn."""
        assert self.pooling is not None
        try:
            for index, vector in enumerate(vectors(self.model, ids, self.pooling)):
                cut = vector[:dimensions]
                yield index, Vector(unit(cut) if self.pooling.normalize and len(cut) < len(vector) else cut)
                yield Turn.RUNNING
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

    def answers(self, generations: Sequence[Generation]) -> Work[Event]:
        """Generate the answers of a request together: yield (index, event), and the end of each turn."""
        assert self.batch is not None
        owner = object()
        jobs = {index: self.batch.submit(generation, owner) for index, generation in enumerate(generations)}
        try:
            while jobs:
                news = 0
                for index, job in tuple(jobs.items()):
                    for token in job.taken():
                        news += 1
                        yield index, token
                    if job.ended:
                        news += 1
                        yield index, _finish(jobs.pop(index))
                if not news:
                    self.batch.advance()
                yield Turn.RUNNING if any(job.running for job in jobs.values()) else Turn.WAITING
        finally:
            for job in jobs.values():
                self.batch.cancel(job)

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
            prompt_lookup=self.prompt_lookup,
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


def _finish(job: Job) -> Finish:
    """Return the end of an answer. Raises RequestError if it failed."""
    generation = job.generation
    if isinstance(job.problem, UnsupportedError):  # a JSON schema that turns out to be too complex
        raise job.problem
    if generation.finish is None:  # the request was valid, so the weights are at fault, or the memory
        message = job.problem.message if isinstance(job.problem, PolyquantError) else "out of memory"
        raise RequestError(message, status=500, code="server_error")
    lookup = generation.lookup
    drafted, accepted = (lookup.drafted, lookup.accepted) if lookup is not None else (0, 0)
    return Finish(
        generation.finish, generation.prompt_tokens, generation.generated, generation.reused, drafted, accepted
    )


def _other_model(message: str) -> RequestError:
    return RequestError(message, code="unsupported_model", param="model")
