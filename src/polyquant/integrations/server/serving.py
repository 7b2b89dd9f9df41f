"""The socket, connection timeouts, and shutdown.

SIGINT and SIGTERM: stop accepting requests, fail pending ones, end the generation at its next token, exit 0. A second
SIGINT: exit immediately, 130.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from polyquant.errors import InputError
from polyquant.integrations.server.app import Access, create_app
from polyquant.integrations.server.engine import Engine, Event
from polyquant.integrations.server.queue import Line
from polyquant.integrations.server.record import Log
from polyquant.integrations.server.served import Served

__all__ = ["Address", "bind", "serve"]

_HEADER_SECONDS = 10.0  # from the connection, or the first byte of a request, to the end of its headers
_IDLE_SECONDS = 60  # between two requests of a connection
_STALL_SECONDS = 30.0  # for a client that does not read its response
_END_SECONDS = 5  # for unfinished responses at shutdown
_CONNECTIONS = 128  # in addition to the queue


@dataclass(frozen=True, slots=True)
class Address:
    """A bound socket. loopback: reachable only from this machine."""

    socket: socket.socket
    host: str
    port: int
    loopback: bool

    @property
    def url(self) -> str:
        """The URL without a path."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def bind(host: str, port: int) -> Address:
    """Listen on a port; 0 for a free one.

    Done before loading a model, so an occupied port fails early. Raises InputError.
    """
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


def serve(
    engines: Mapping[str, Engine],
    address: Address,
    access: Access,
    *,
    queue: int,
    on_ready: Callable[[], None],
    log: Log | None = None,
) -> None:
    """Serve requests until a signal arrives. engines: by model id. queue: number of requests that may wait per model.
    on_ready is called once it listens. log: receives a line per request."""
    models = [Served(name, engine, Line(queue, engine.parallel)) for name, engine in engines.items()]
    app = create_app(models, access, log)
    for logger in ("uvicorn.error", "asyncio"):  # log bugs with tracebacks, but not disconnecting clients
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
        limit_concurrency=_CONNECTIONS + sum(queue + engine.parallel for engine in engines.values()),
    )
    lines = [served.line for served in models]
    asyncio.run(_Server(config, lines, on_ready).serve(sockets=[address.socket]))


class _Server(uvicorn.Server):
    """uvicorn's server with our shutdown."""

    def __init__(self, config: uvicorn.Config, lines: Sequence[Line[Event]], on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._lines, self._on_ready = lines, on_ready
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and call on_ready."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the connections, and wait for the workers."""
        await super().shutdown(sockets)
        for line in self._lines:
            await line.close()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install our handlers, without raising the signal again at the end: the exit status is 0."""
        before = {s: signal.signal(s, self.handle_exit) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down; a second SIGINT does not wait for the worker thread, which may be inside a kernel."""
        if self.should_exit and sig == signal.SIGINT:
            sys.stdout.flush()
            os._exit(130)
        self.should_exit = True
        if self._loop is not None:
            for line in self._lines:
                self._loop.call_soon_threadsafe(line.shut)


class _Connection(H11Protocol):
    """uvicorn's connection with additional timeouts: for headers, and for a client that does not read."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout for the headers of the first request."""
        super().connection_made(transport)
        self._watch(_HEADER_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Start the header timeout at the first byte of a request, stop it at the end of the headers."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._watch(None)
        elif self._timer is None:
            self._watch(_HEADER_SECONDS)

    def pause_writing(self) -> None:
        """Start the timeout of a client that does not read."""
        super().pause_writing()
        self._watch(_STALL_SECONDS)

    def resume_writing(self) -> None:
        """Stop that timeout."""
        super().resume_writing()
        self._watch(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timeouts."""
        self._watch(None)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Let unfinished responses end, but not unfinished requests."""
        super().shutdown()
        if self.conn.their_state is h11.SEND_BODY or self.flow.write_paused:
            self.transport.abort()

    def _watch(self, seconds: float | None) -> None:
        """Abort the connection after this many seconds; None to cancel."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)
