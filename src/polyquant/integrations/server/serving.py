"""The socket, the timeouts of connections, and the end.

SIGINT and SIGTERM: no new requests, those inside are told so, the generation ends at its next token, exit 0. A second SIGINT: at once, 130.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from polyquant.errors import InputError
from polyquant.integrations.server.app import Door, create_app
from polyquant.integrations.server.engine import Engine, Event
from polyquant.integrations.server.queue import Line

__all__ = ["Address", "bind", "serve"]

_HEADER_SECONDS = 10.0  # from the connection, or the first byte of a request, to the end of its headers
_IDLE_SECONDS = 60  # between two requests of a connection
_STALL_SECONDS = 30.0  # a client that does not read what it is sent
_END_SECONDS = 5  # for answers that are on their way when the server ends
_CONNECTIONS = 128  # beside those in the line


@dataclass(frozen=True, slots=True)
class Address:
    """A bound socket. loopback: only this machine reaches it."""

    socket: socket.socket
    host: str
    port: int
    loopback: bool

    @property
    def url(self) -> str:
        """Where it is, without a path."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def bind(host: str, port: int) -> Address:
    """Listen; port 0: a free one. Done before a model is loaded, so that a taken port costs nothing. Raises InputError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError):
        raise InputError(f"there is no address for the host '{host}'", hint="--host 127.0.0.1") from None
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(128)
    except OSError as problem:
        sock.close()
        reason = (problem.strerror or str(problem)).lower()
        raise InputError(f"cannot listen on {host} port {port}: {reason}", hint="choose another with --port") from None
    number = sock.getsockname()[0]
    return Address(sock, host, sock.getsockname()[1], number == "::1" or number.startswith("127."))


def serve(engine: Engine, name: str, address: Address, door: Door, *, queue: int, on_ready: Callable[[], None]) -> None:
    """Answer requests until a signal comes. queue: how many may wait. on_ready is called once it answers."""
    line: Line[Event] = Line(queue)
    app = create_app(engine, line, name, door)
    for logger in ("uvicorn.error", "asyncio"):  # bugs with their tracebacks; clients that vanish are no news
        logging.getLogger(logger).setLevel(logging.ERROR)
    config = uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_END_SECONDS,
        limit_concurrency=_CONNECTIONS + queue,
    )
    asyncio.run(_Server(config, line, on_ready).serve(sockets=[address.socket]))


class _Server(uvicorn.Server):
    """uvicorn's server with our end."""

    def __init__(self, config: uvicorn.Config, line: Line[Event], on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._line, self._on_ready = line, on_ready
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the connections, and wait for the worker."""
        await super().shutdown(sockets)
        await self._line.close()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours, without raising the signal again at the end: the exit status is 0."""
        before = {s: signal.signal(s, self.handle_exit) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End; a second SIGINT does not wait for the worker thread, which may be deep in a kernel."""
        if self.should_exit and sig == signal.SIGINT:
            sys.stdout.flush()
            os._exit(130)
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._line.shut)


class _Connection(H11Protocol):
    """uvicorn's connection with the timeouts that it lacks: for headers, and for a client that does not read."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The headers of the first request are due."""
        super().connection_made(transport)
        self._watch(_HEADER_SECONDS)

    def data_received(self, data: bytes) -> None:
        """The first byte of a request starts the time of its headers, their end stops it."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._watch(None)
        elif self._timer is None:
            self._watch(_HEADER_SECONDS)

    def pause_writing(self) -> None:
        """The client has not read for a while."""
        super().pause_writing()
        self._watch(_STALL_SECONDS)

    def resume_writing(self) -> None:
        """It reads again."""
        super().resume_writing()
        self._watch(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is due any more."""
        self._watch(None)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Answers on their way may end; a request that is still coming in may not."""
        super().shutdown()
        if self.conn.their_state is h11.SEND_BODY or self.flow.write_paused:
            self.transport.abort()

    def _watch(self, seconds: float | None) -> None:
        """Cut the connection off after so many seconds; None: no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)
