"""One worker thread that takes turns between the requests, and the bounded queue before it.

A request's work is an iterator that yields results and, at the end of each turn, a Turn. Works that generate text share
a batch (runtime/batch.py): whichever has nothing to send advances it for all. The native kernels release the GIL, so
the event loop stays responsive.
"""

from __future__ import annotations

import asyncio
import enum
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeAlias, TypeVar

from polyquant.integrations.server.refusal import RequestError

__all__ = ["Line", "Ticket", "Turn", "Work"]

T = TypeVar("T")


class Turn(enum.Enum):
    """The end of a turn: the work waits for a place in the batch, or has started."""

    WAITING = enum.auto()
    RUNNING = enum.auto()


Work: TypeAlias = Generator[T | Turn, None, None]


class Line(Generic[T]):
    """limit: number of requests that may wait. parallel: how many run at once.

    All methods must be called from the event loop's thread.
    """

    def __init__(self, limit: int, parallel: int = 1) -> None:
        self._limit, self._parallel = limit, parallel
        self._worker = ThreadPoolExecutor(1, "polyquant-generate")
        self._tickets: set[Ticket[T]] = set()
        self._closing = False
        self._seconds = 1.0  # duration of the last request

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._tickets) - self.running

    @property
    def running(self) -> int:
        """Number of running requests."""
        return sum(t.running for t in self._tickets)

    def check(self) -> None:
        """Raise RequestError 503 if no request can be accepted."""
        if self._closing:
            raise _closing()
        if len(self._tickets) >= self._limit + self._parallel:
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
        """Stop accepting requests; running and waiting ones fail at once, and the worker stops at the next turn."""
        self._closing = True
        for ticket in tuple(self._tickets):
            ticket.leave()

    async def close(self) -> None:
        """Shut down, and wait for the worker."""
        self.shut()
        while self._tickets:
            await next(iter(self._tickets)).released.wait()
        await asyncio.to_thread(self._worker.shutdown)

    def submit(self, turn: Callable[[], bool]) -> Future[bool]:
        """Queue a turn."""
        return self._worker.submit(turn)

    def release(self, ticket: Ticket[T], seconds: float) -> None:
        """Release the ticket."""
        self._tickets.discard(ticket)
        ticket.released.set()
        if seconds:
            self._seconds = seconds


class Ticket(Generic[T]):
    """A place in the queue. Leaving it cancels the work before its next turn."""

    def __init__(self, line: Line[T]) -> None:
        self._line = line
        self._stop = threading.Event()
        self._events: asyncio.Queue[T | None] = asyncio.Queue()
        self._work: Work[T] | None = None
        self._problem: BaseException | None = None
        self._turn = Turn.WAITING
        self._since = 0.0
        self.released = asyncio.Event()

    def __enter__(self) -> Ticket[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    @property
    def running(self) -> bool:
        """True if the work has started."""
        return self._turn is Turn.RUNNING

    def leave(self) -> None:
        """Release the place: immediately if the work has not been submitted, otherwise at its next turn."""
        self._stop.set()
        self._events.put_nowait(None)
        if self._work is None:
            self._line.release(self, 0.0)

    async def run(self, work: Work[T]) -> AsyncGenerator[T, None]:
        """Yield the results of `work` from the worker thread.

        Raises its exceptions, and RequestError 503 on shutdown.
        """
        if self._stop.is_set():
            raise _closing()
        self._work, loop = work, asyncio.get_running_loop()

        def turn() -> bool:
            """Run until the end of a turn. Returns False at the end of the work."""
            self._since = self._since or time.monotonic()
            if self._stop.is_set():
                work.close()
                return False
            for item in work:
                if isinstance(item, Turn):
                    self._turn = item
                    return True
                loop.call_soon_threadsafe(self._events.put_nowait, item)
            return False

        def finished(future: Future[bool]) -> None:
            self._problem = future.exception()
            if self._problem is None and future.result():
                self._line.submit(turn).add_done_callback(finished)  # after the turns of all others
                return
            loop.call_soon_threadsafe(self._line.release, self, time.monotonic() - self._since)
            loop.call_soon_threadsafe(self._events.put_nowait, None)

        self._line.submit(turn).add_done_callback(finished)
        while (item := await self._events.get()) is not None:
            yield item
        if self._stop.is_set():
            raise _closing()
        if self._problem is not None:
            raise self._problem


def _closing() -> RequestError:
    return RequestError("the server is shutting down", status=503, code="shutting_down")
