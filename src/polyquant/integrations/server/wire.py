"""OpenAI's JSON: completions and chat completions, complete or in chunks, usage, errors, models."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from polyquant.integrations.server.engine import Finish, Piece
from polyquant.integrations.server.refusal import RequestError
from polyquant.integrations.server.requests import GenerationRequest

__all__ = ["Choice", "Envelope", "Json", "Usage", "error_body", "model_body"]

Json: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class Usage:
    """Tokens of a request. A prompt with n answers counts once."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, finish: Finish, *, first: bool) -> None:
        """Add an answer; first: the first one to its prompt."""
        self.completion += finish.completion_tokens
        self.drafted += finish.drafted_tokens
        self.accepted += finish.accepted_tokens
        if first:
            self.prompt += finish.prompt_tokens
            self.cached += finish.cached_tokens

    def body(self) -> Json:
        """Return the `usage` object."""
        body = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        if self.drafted:
            body["completion_tokens_details"] = {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.drafted - self.accepted,
            }
        return body


@dataclass(slots=True)
class Choice:
    """One answer in progress."""

    index: int
    pieces: list[Piece] = field(default_factory=list)
    reason: str | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(p.text for p in self.pieces)


@dataclass(frozen=True, slots=True)
class Envelope:
    """Fields common to all objects of one answer: id, creation time, model; and what it contains.

    chat: chat or completion. logprobs, token_ids: with these. spelled: the text of a token id, for alternatives.
    """

    chat: bool
    model: str
    logprobs: bool
    token_ids: bool
    spelled: Callable[[int], str]
    id: str
    created: int

    @classmethod
    def new(cls, request: GenerationRequest, model: str, spelled: Callable[[int], str]) -> Envelope:
        """Create one with a new id."""
        name = ("chatcmpl-" if request.chat else "cmpl-") + secrets.token_hex(12)
        return cls(request.chat, model, request.logprobs, request.token_ids, spelled, name, int(time.time()))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Json:
        """Return a complete answer."""
        return self._object("chat.completion", [self._whole(c) for c in choices], usage=usage.body())

    def opening(self, index: int) -> Json:
        """Return the first chunk of a chat answer, with its role."""
        return self._chunk(index, {"role": "assistant", "content": ""}, "", ())

    def chunk(self, index: int, piece: Piece, offset: int) -> Json:
        """Return the chunk of a piece; offset: characters of this answer before it."""
        return self._chunk(index, {"content": piece.text}, piece.text, (piece,), offset=offset)

    def closing(self, index: int, reason: str) -> Json:
        """Return the last chunk of one answer."""
        return self._chunk(index, {}, "", (), reason=reason)

    def usage(self, usage: Usage) -> Json:
        """Return the final chunk, with the usage, if requested."""
        return self._object("chat.completion.chunk", [], usage=usage.body())

    def _whole(self, choice: Choice) -> Json:
        content: Json = (
            {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
            if self.chat
            else {"text": choice.text}
        )
        logprobs = self._logprobs(choice.pieces, 0)
        ids = self._ids(choice.pieces)
        return {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": choice.reason, **ids}

    def _chunk(
        self, index: int, delta: Json, text: str, pieces: Sequence[Piece], *, offset: int = 0, reason: str | None = None
    ) -> Json:
        content: Json = {"delta": delta} if self.chat else {"text": text}
        logprobs = self._logprobs(pieces, offset) if pieces else None
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason, **self._ids(pieces)}
        return self._object("chat.completion.chunk", [choice])

    def _object(self, kind: str, choices: list[Json], **more: Any) -> Json:
        return {
            "id": self.id,
            "object": kind if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }

    def _table(self, piece: Piece) -> dict[str, float]:
        """Return the alternatives by text; of tokens with equal texts, the most likely."""
        return {self.spelled(i): logprob for i, logprob in reversed(piece.top)}

    def _ids(self, pieces: Sequence[Piece]) -> Json:
        """Return vLLM's extension `token_ids`, if requested."""
        return {"token_ids": [p.id for p in pieces]} if self.token_ids else {}

    def _logprobs(self, pieces: Sequence[Piece], offset: int) -> Json | None:
        """Return the log probabilities of the chosen tokens, and of alternatives; a chosen token within an incomplete
        character has an empty text."""
        if not self.logprobs:
            return None
        if self.chat:
            content = [
                {**_entry(p.text, p.logprob), "top_logprobs": [_entry(self.spelled(i), x) for i, x in p.top]}
                for p in pieces
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for p in pieces:
            offsets.append(offset)
            offset += len(p.text)
        return {
            "tokens": [p.text for p in pieces],
            "token_logprobs": [p.logprob for p in pieces],
            "top_logprobs": [self._table(p) for p in pieces] if any(p.top for p in pieces) else None,
            "text_offset": offsets,
        }


def _entry(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def model_body(model: str, created: int, context: int, abilities: Json) -> Json:
    """Return an entry of /v1/models; max_model_len is vLLM's name for the context, `polyquant` our extension."""
    return {
        "id": model, "object": "model", "created": created, "owned_by": "polyquant", "max_model_len": context,
        "polyquant": abilities,
    }  # fmt: skip


def error_body(problem: RequestError) -> Json:
    """Return OpenAI's error object."""
    return {"error": {"message": str(problem), "type": problem.kind, "param": problem.param, "code": problem.code}}
