"""Prompt tokens -> pieces of text. One session is kept: what the next prompt has in common with the last text is not computed again.

A chat that goes on sends everything said so far once more, so all but the newest message is in the cache already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from polyquant.errors import PolyquantError
from polyquant.integrations.server.refusal import RequestError
from polyquant.integrations.server.requests import GenerationRequest
from polyquant.runtime.chat import render_chat
from polyquant.runtime.generate import Generation
from polyquant.runtime.generate import generate as start
from polyquant.runtime.model import Model

__all__ = ["Engine", "Event", "Finish", "Piece"]

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


Event = tuple[int, Piece | Finish]


class Engine:
    """A model with its one session. `prepare` is safe in any thread; what `answers` gives runs in one thread at a time."""

    def __init__(self, model: Model) -> None:
        self.model, self.tokenizer = model, model.tokenizer
        self._session = model.session()

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
        common -= common % session.cache.grain
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
