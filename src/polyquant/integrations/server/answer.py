"""Processing of one request, streamed as server-sent events or not. A disconnecting client cancels its generation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from polyquant.errors import PolyquantError
from polyquant.integrations.server.engine import Engine, Event, Finish, Piece
from polyquant.integrations.server.queue import Line, Ticket
from polyquant.integrations.server.refusal import RequestError, refusal_of
from polyquant.integrations.server.requests import GenerationRequest
from polyquant.integrations.server.wire import Choice, Envelope, Json, Usage, error_body
from polyquant.runtime.generate import Generation

__all__ = ["Answer", "refuse", "while_connected"]

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx forwards events immediately
]


def refuse(problem: RequestError) -> JSONResponse:
    """Return an error as a complete response."""
    headers = {}
    if problem.retry_after is not None:
        headers["Retry-After"] = str(problem.retry_after)
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(problem), problem.status, headers)


@dataclass(frozen=True, slots=True)
class Answer:
    """An ASGI response that generates. Its ticket is always released at the end."""

    engine: Engine
    line: Line[Event]
    request: GenerationRequest
    model: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send. Raises RequestError only before the first byte."""
        with self.line.enter() as ticket:
            # A thread cannot be cancelled: the ticket is held until it finishes, so there are never more threads than
            # tickets.
            generations = await asyncio.to_thread(self.engine.prepare, self.request)
            await while_connected(receive, self._answer(ticket, generations, scope, receive, send))

    async def _answer(
        self, ticket: Ticket[Event], generations: list[Generation], scope: Scope, receive: Receive, send: Send
    ) -> None:
        envelope = Envelope.new(chat=self.request.chat, model=self.model, logprobs=self.request.logprobs)
        if self.request.stream:
            await self._stream(ticket, envelope, generations, send)
        else:
            body = await self._whole(ticket, envelope, generations)
            await JSONResponse(body)(scope, receive, send)

    async def _whole(self, ticket: Ticket[Event], envelope: Envelope, generations: list[Generation]) -> Json:
        choices, usage = [Choice(i) for i in range(len(generations))], Usage()
        async with aclosing(self._events(ticket, generations)) as events:
            async for index, event in events:
                if isinstance(event, Finish):
                    choices[index].reason = event.reason
                    usage.add(event, first=index % self.request.n == 0)
                elif isinstance(event, Piece):
                    choices[index].pieces.append(event)
        return envelope.whole(choices, usage)

    async def _stream(
        self, ticket: Ticket[Event], envelope: Envelope, generations: list[Generation], send: Send
    ) -> None:
        """Send errors as an event, since the status has already been sent: clients raise them."""
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        try:
            async with aclosing(self._chunks(ticket, envelope, generations)) as chunks:
                async for chunk in chunks:
                    await send(_event(json.dumps(chunk)))
                    await asyncio.sleep(0)  # with many chunks pending, lets other tasks run and detects a lost client
            await send(_event("[DONE]"))
        except PolyquantError as problem:
            await send(_event(json.dumps(error_body(refusal_of(problem)))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunks(
        self, ticket: Ticket[Event], envelope: Envelope, generations: list[Generation]
    ) -> AsyncGenerator[Json, None]:
        usage = Usage()
        offsets: dict[int, int] = {}  # characters sent of each answer that has begun
        extra: Json = {"usage": None} if self.request.include_usage else {}
        async with aclosing(self._events(ticket, generations)) as events:
            async for index, event in events:
                if index not in offsets:
                    offsets[index] = 0
                    if self.request.chat:
                        yield {**envelope.opening(index), **extra}
                if isinstance(event, Finish):
                    usage.add(event, first=index % self.request.n == 0)
                    yield {**envelope.closing(index, event.reason), **extra}
                elif isinstance(event, Piece) and (event.text or self.request.logprobs):
                    yield {**envelope.chunk(index, event, offsets[index]), **extra}
                    offsets[index] += len(event.text)
        if self.request.include_usage:
            yield envelope.usage(usage)

    def _events(self, ticket: Ticket[Event], generations: list[Generation]) -> AsyncGenerator[Event, None]:
        return ticket.run(self.engine.answers(generations))


def _event(data: str) -> dict[str, Any]:
    """Return a server-sent event. JSON is ASCII here, so no reader mistakes U+2028 for a line end."""
    return {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; cancel it when the client disconnects."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
