"""One worker thread, and the bounded queue of requests that wait for it.

A decoder uses all cores for one token, so two concurrent generations would each take twice as long: they run one at a
time. The native kernels release the GIL, so the event loop stays responsive.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

from polyquant.integrations.server.refusal import RequestError

__all__ = ["Line", "Stopped", "Ticket", "Work"]

T = TypeVar("T")
Stopped = Callable[[], bool]
Work = Callable[[Stopped], Iterator[T]]


class Line(Generic[T]):
    """limit: number of requests that may wait. All methods must be called from the event loop's thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._worker = ThreadPoolExecutor(1, "polyquant-generate")
        self._tickets: set[Ticket[T]] = set()
        self._closing = False
        self._seconds = 1.0  # duration of the last request

    @property
    def waiting(self) -> int:
        """Waiting requests, without the running one."""
        return sum(not t.running for t in self._tickets)

    @property
    def running(self) -> bool:
        """True if a request is running."""
        return any(t.running for t in self._tickets)

    def check(self) -> None:
        """Raise RequestError 503 if no request can be accepted."""
        if self._closing:
            raise _closing()
        if len(self._tickets) > self._limit:
            raise RequestError(
                f"the server is busy: {self._limit} requests are waiting",
                status=503,
                code="queue_full",
                retry_after=max(1, min(60, math.ceil(self._seconds))),
            )

    def enter(self) -> Ticket[T]:
        """Return a ticket, to be used with `with`. Raises RequestError 503."""
        self.check()
        ticket = Ticket(self)
        self._tickets.add(ticket)
        return ticket

    def shut(self) -> None:
        """Stop accepting requests; running and waiting ones fail at once, and the worker stops at the next token."""
        self._closing = True
        for ticket in tuple(self._tickets):
            ticket.leave()

    async def close(self) -> None:
        """Shut down, and wait for the worker."""
        self.shut()
        await asyncio.to_thread(self._worker.shutdown)
        await asyncio.sleep(0)  # run the callbacks that the worker scheduled before the loop closes

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Queue the work."""
        return self._worker.submit(work)

    def release(self, ticket: Ticket[T], seconds: float) -> None:
        """Release the ticket."""
        self._tickets.discard(ticket)
        if seconds:
            self._seconds = seconds


class Ticket(Generic[T]):
    """A place in the queue. Leaving it cancels waiting work, and stops running work at the next token."""

    def __init__(self, line: Line[T]) -> None:
        self._line = line
        self._stop = threading.Event()
        self._events: asyncio.Queue[T | None] = asyncio.Queue()
        self._future: Future[None] | None = None
        self._since = 0.0

    def __enter__(self) -> Ticket[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    @property
    def running(self) -> bool:
        """True if the worker is processing it."""
        return self._future is not None and self._future.running()

    def leave(self) -> None:
        """Release the place: immediately if the work has not started, otherwise when the worker stops."""
        self._stop.set()
        self._events.put_nowait(None)
        if self._future is None:
            self._line.release(self, 0.0)
        else:
            self._future.cancel()

    async def run(self, work: Work[T]) -> AsyncGenerator[T, None]:
        """Yield the results of `work` from the worker thread.

        Raises its exceptions, and RequestError 503 on shutdown.
        """
        if self._stop.is_set():
            raise _closing()
        loop = asyncio.get_running_loop()

        def tell(item: T | None) -> None:
            loop.call_soon_threadsafe(self._events.put_nowait, item)

        def in_worker() -> None:
            self._since = time.monotonic()
            for item in work(self._stop.is_set):
                tell(item)

        def finished(_: Future[None]) -> None:
            seconds = time.monotonic() - self._since if self._since else 0.0
            loop.call_soon_threadsafe(self._line.release, self, seconds)
            tell(None)

        self._future = self._line.submit(in_worker)
        self._future.add_done_callback(finished)
        while (item := await self._events.get()) is not None:
            yield item
        if self._stop.is_set():
            raise _closing()
        self._future.result()


def _closing() -> RequestError:
    return RequestError("the server is shutting down", status=503, code="shutting_down")
