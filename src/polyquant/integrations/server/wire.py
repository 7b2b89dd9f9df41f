"""OpenAI's JSON: completions and chat completions, whole and in chunks, usage, errors, models."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from polyquant.integrations.server.engine import Finish, Piece
from polyquant.integrations.server.refusal import RequestError

__all__ = ["Choice", "Envelope", "Json", "Usage", "error_body", "model_body"]

Json: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class Usage:
    """Tokens of a request. A prompt that is answered n times counts once."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def add(self, finish: Finish, *, first: bool) -> None:
        """One answer more; first: the first to its prompt."""
        self.completion += finish.completion_tokens
        if first:
            self.prompt += finish.prompt_tokens
            self.cached += finish.cached_tokens

    def body(self) -> Json:
        """The `usage` object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(slots=True)
class Choice:
    """One answer as it grows."""

    index: int
    pieces: list[Piece] = field(default_factory=list)
    reason: str | None = None

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(p.text for p in self.pieces)


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every object of one answer says: id, creation time, model; chat or completion; with log probabilities or not."""

    chat: bool
    model: str
    logprobs: bool
    id: str
    created: int

    @classmethod
    def new(cls, *, chat: bool, model: str, logprobs: bool) -> Envelope:
        """With a fresh id."""
        name = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        return cls(chat, model, logprobs, name, int(time.time()))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Json:
        """The answer that is not streamed."""
        return self._object("chat.completion", [self._whole(c) for c in choices], usage=usage.body())

    def opening(self, index: int) -> Json:
        """The first chunk of a chat's answer: who speaks."""
        return self._chunk(index, {"role": "assistant", "content": ""}, "", ())

    def chunk(self, index: int, piece: Piece, offset: int) -> Json:
        """A piece of text; offset: characters of this answer before it."""
        return self._chunk(index, {"content": piece.text}, piece.text, (piece,), offset=offset)

    def closing(self, index: int, reason: str) -> Json:
        """The last chunk of one answer."""
        return self._chunk(index, {}, "", (), reason=reason)

    def usage(self, usage: Usage) -> Json:
        """The last chunk of all, if it was asked for."""
        return self._object("chat.completion.chunk", [], usage=usage.body())

    def _whole(self, choice: Choice) -> Json:
        said: Json = (
            {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
            if self.chat
            else {"text": choice.text}
        )
        logprobs = self._logprobs(choice.pieces, 0)
        return {"index": choice.index, **said, "logprobs": logprobs, "finish_reason": choice.reason}

    def _chunk(
        self, index: int, delta: Json, text: str, pieces: Sequence[Piece], *, offset: int = 0, reason: str | None = None
    ) -> Json:
        said: Json = {"delta": delta} if self.chat else {"text": text}
        logprobs = self._logprobs(pieces, offset) if pieces else None
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}
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

    def _logprobs(self, pieces: Sequence[Piece], offset: int) -> Json | None:
        """Of the chosen tokens; a token whose text waits for the rest of a character has an empty one."""
        if not self.logprobs:
            return None
        if self.chat:
            content = [
                {"token": p.text, "logprob": p.logprob, "bytes": list(p.text.encode()), "top_logprobs": []}
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
            "top_logprobs": None,
            "text_offset": offsets,
        }


def model_body(model: str, created: int, context: int) -> Json:
    """An entry of /v1/models; max_model_len is vLLM's word for the context."""
    return {"id": model, "object": "model", "created": created, "owned_by": "polyquant", "max_model_len": context}


def error_body(problem: RequestError) -> Json:
    """OpenAI's error object."""
    return {"error": {"message": str(problem), "type": problem.kind, "param": problem.param, "code": problem.code}}
