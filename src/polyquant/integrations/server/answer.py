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
from polyquant.integrations.server.engine import Event, Finish, Piece
from polyquant.integrations.server.queue import Ticket
from polyquant.integrations.server.record import Record, record_of
from polyquant.integrations.server.refusal import RequestError, refusal_of
from polyquant.integrations.server.requests import GenerationRequest
from polyquant.integrations.server.served import Served
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

    served: Served
    request: GenerationRequest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send. Raises RequestError only before the first byte."""
        record = record_of(scope)
        record.asked(self.served.name, self.request)
        with self.served.line.enter() as ticket:
            # A thread cannot be cancelled: the ticket is held until it finishes, so there are never more threads than
            # tickets.
            generations = await asyncio.to_thread(self.served.engine.prepare, self.request)
            record.prompt_tokens = sum(g.prompt_tokens for g in generations[:: self.request.n])
            events = self._events(ticket, generations, record)
            await while_connected(receive, self._answer(events, len(generations), scope, receive, send))

    async def _answer(
        self, source: AsyncGenerator[Event, None], count: int, scope: Scope, receive: Receive, send: Send
    ) -> None:
        envelope = Envelope.new(self.request, self.served.name, self.served.engine.tokenizer.piece)
        if self.request.stream:
            await self._stream(source, envelope, record_of(scope), send)
        else:
            body = await self._whole(source, envelope, count)
            await JSONResponse(body)(scope, receive, send)

    async def _whole(self, source: AsyncGenerator[Event, None], envelope: Envelope, count: int) -> Json:
        choices, usage = [Choice(i) for i in range(count)], Usage()
        async with aclosing(source) as events:
            async for index, event in events:
                if isinstance(event, Finish):
                    choices[index].reason = event.reason
                    usage.add(event, first=index % self.request.n == 0)
                elif isinstance(event, Piece):
                    choices[index].pieces.append(event)
        return envelope.whole(choices, usage)

    async def _stream(
        self, source: AsyncGenerator[Event, None], envelope: Envelope, record: Record, send: Send
    ) -> None:
        """Send errors as an event, since the status has already been sent: clients raise them."""
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        try:
            async with aclosing(self._chunks(source, envelope)) as chunks:
                async for chunk in chunks:
                    await send(_event(json.dumps(chunk)))
                    await asyncio.sleep(0)  # with many chunks pending, lets other tasks run and detects a lost client
            await send(_event("[DONE]"))
        except PolyquantError as problem:
            refusal = refusal_of(problem)
            record.error = refusal.code
            await send(_event(json.dumps(error_body(refusal))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunks(self, source: AsyncGenerator[Event, None], envelope: Envelope) -> AsyncGenerator[Json, None]:
        usage, offsets = Usage(), dict[int, int]()  # characters of each answer so far
        extra: Json = {"usage": None} if self.request.include_usage else {}
        async with aclosing(source) as events:
            async for index, event in events:
                if index not in offsets:
                    offsets[index] = 0
                    if self.request.chat:
                        yield {**envelope.opening(index), **extra}
                if isinstance(event, Finish):
                    usage.add(event, first=index % self.request.n == 0)
                    yield {**envelope.closing(index, event.reason), **extra}
                elif isinstance(event, Piece) and (event.text or self.request.logprobs or self.request.token_ids):
                    yield {**envelope.chunk(index, event, offsets[index]), **extra}
                    offsets[index] += len(event.text)
        if self.request.include_usage:
            yield envelope.usage(usage)

    async def _events(
        self, ticket: Ticket[Event], generations: list[Generation], record: Record
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of the worker; note their times and tokens for metrics and log."""
        work = ticket.run(self.served.engine.answers(generations))
        async with aclosing(work) as events:
            async for index, event in events:
                if isinstance(event, Finish):
                    record.finished(event, first=index % self.request.n == 0)
                elif isinstance(event, Piece):
                    record.generated(index, event)
                yield index, event


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
