"""/v1/embeddings: request validation and response. Names and defaults are OpenAI's; its clients request base64 by
default.

{"model": ID, "input": string | [string, ...] | [id, ...] | [[id, ...], ...],
 "encoding_format": "float" | "base64", "dimensions": n}
"""

from __future__ import annotations

import asyncio
import base64
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from polyquant.integrations.server.answer import while_connected
from polyquant.integrations.server.engine import Event, Vector
from polyquant.integrations.server.fields import Fields, wrong
from polyquant.integrations.server.queue import Ticket
from polyquant.integrations.server.record import record_of
from polyquant.integrations.server.requests import Prompt, is_ids
from polyquant.integrations.server.served import Served
from polyquant.integrations.server.wire import Json
from polyquant.types import F32

__all__ = ["EmbeddingAnswer", "EmbeddingRequest", "embedding_request"]

MAX_INPUTS = 2048
_HARMLESS = ("user", "safety_identifier", "metadata")


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """inputs: strings or token ids, one vector each. base64: little-endian float32, otherwise a list of floats.
    dimensions: number of leading values to keep, None for all."""

    inputs: tuple[Prompt, ...]
    base64: bool
    dimensions: int | None


def embedding_request(body: Any, hidden: int) -> EmbeddingRequest:
    """Parse the body of /v1/embeddings; hidden: size of a full vector. Raises RequestError."""
    fields = Fields(body)
    inputs = _inputs(fields.get("input"))
    form = fields.text("encoding_format", "float")
    if form not in ("float", "base64"):
        raise wrong("encoding_format", "'float' or 'base64'", form)
    dimensions = fields.integer("dimensions", None, low=1, high=hidden)
    fields.finish((*_HARMLESS, "model"))
    return EmbeddingRequest(inputs, form == "base64", dimensions)


def _inputs(value: Any) -> tuple[Prompt, ...]:
    """Return the inputs from a string, ids, or a list of either; none may be empty."""
    items = value if isinstance(value, list) and value and not is_ids(value) else [value]
    if len(items) > MAX_INPUTS:
        raise wrong("input", f"a list of at most {MAX_INPUTS} inputs", f"{len(items)} inputs")
    if all(isinstance(text, str) and text for text in items):
        return tuple(items)
    if all(isinstance(text, list) and text and is_ids(text) for text in items):
        return tuple(tuple(ids) for ids in items)
    raise wrong("input", "a non-empty string, a list of token ids, or a list of these", value)


@dataclass(frozen=True, slots=True)
class EmbeddingAnswer:
    """An ASGI response with the vectors. Its ticket is always released at the end."""

    served: Served
    request: EmbeddingRequest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compute and send. Raises RequestError only before the first byte."""
        record = record_of(scope)
        record.model = self.served.name
        with self.served.line.enter() as ticket:
            ids = await asyncio.to_thread(self.served.engine.text_ids, self.request.inputs)
            record.prompt_tokens = sum(map(len, ids))
            await while_connected(receive, self._answer(ticket, ids, scope, receive, send))

    async def _answer(
        self, ticket: Ticket[Event], ids: list[list[int]], scope: Scope, receive: Receive, send: Send
    ) -> None:
        data: list[Json] = []
        work = ticket.run(self.served.engine.vectors(ids, self.request.dimensions))
        async with aclosing(work) as events:
            async for index, event in events:
                if isinstance(event, Vector):
                    data.append({"object": "embedding", "index": index, "embedding": self._written(event.values)})
        tokens = sum(map(len, ids))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        body = {"object": "list", "data": data, "model": self.served.name, "usage": usage}
        await JSONResponse(body)(scope, receive, send)

    def _written(self, vector: F32) -> str | list[float]:
        if self.request.base64:
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return [float(str(x)) for x in vector]  # the shortest digits that round-trip as float32
