"""Routes, and access control: API key, host, size and time of a body.

| rejected | status |
|---|---|
| a non-local Host while only this machine can connect (DNS rebinding by a web page) | 403 |
| a missing or wrong key, if one is set | 401 |
| a body that is not application/json, which a web page could send cross-origin without a preflight | 415 |
| a body over the limit, regardless of its headers | 413 |
| a body that arrives too slowly | 408 |
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polyquant.errors import PolyquantError
from polyquant.integrations.server.answer import Answer, refuse
from polyquant.integrations.server.chat_page import chat_page
from polyquant.integrations.server.embeddings import EmbeddingAnswer, embedding_request
from polyquant.integrations.server.record import Log, Metrics, Observer, record_of
from polyquant.integrations.server.refusal import RequestError, refusal_of
from polyquant.integrations.server.requests import GenerationRequest, chat_request, completion_request
from polyquant.integrations.server.served import Catalogue, Served
from polyquant.storage import strict_json

__all__ = ["Access", "create_app"]

_VALUES = 300_000  # values of a JSON body, such as the token ids of a prompt
_LINGER_SECONDS, _LINGER_BYTES = 2.0, 8_000_000
_WITHOUT_KEY = ("/", "/health")  # the page contains no data, and asks for the key
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True)
class Access:
    """Access control. key None: no key required. hosts: allowed Host headers, None for any. cors: origins of web pages.
    body: limit in bytes. body_seconds: time limit to receive it."""

    key: str | None = None
    hosts: tuple[str, ...] | None = _LOOPBACK
    cors: tuple[str, ...] = ()
    body: int = 1_000_000
    body_seconds: float = 30.0


def create_app(models: Sequence[Served], access: Access, log: Log | None = None) -> Starlette:
    """Return the ASGI application for these models. log: receives a line per request."""
    catalogue, metrics, page = Catalogue(models), Metrics(models), chat_page()

    async def chat(_: Request) -> Response:
        return page

    async def health(_: Request) -> Response:
        lines = [served.line for served in models]
        return JSONResponse(
            {"status": "ok", "running": sum(q.running for q in lines), "waiting": sum(q.waiting for q in lines)}
        )

    async def numbers(_: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def listed(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": catalogue.bodies})

    async def one_model(request: Request) -> Response:
        return JSONResponse(catalogue.body(request.path_params["model"]))

    def generation(read: Callable[[Any, Mapping[str, Any]], GenerationRequest]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Any:
            catalogue.check()  # before the body is read: full queues are reported immediately
            body = await _json(request, access)
            served = catalogue.requested(body)
            served.engine.check_generates(served.name)
            served.line.check()
            return Answer(served, read(body, served.engine.defaults))

        return endpoint

    async def embeddings(request: Request) -> Any:
        catalogue.check()
        body = await _json(request, access)
        served = catalogue.requested(body)
        served.engine.check_embeds(served.name)
        served.line.check()
        return EmbeddingAnswer(served, embedding_request(body, served.engine.model.hyper.hidden))

    return Starlette(
        routes=[
            Route("/", chat),
            Route("/health", health),
            Route("/metrics", numbers),
            Route("/v1/models", listed),
            Route("/v1/models/{model:path}", one_model),
            Route("/v1/completions", generation(completion_request), methods=["POST"]),
            Route("/v1/chat/completions", generation(chat_request), methods=["POST"]),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
        ],
        middleware=_middleware(access, metrics, log),
        exception_handlers={
            PolyquantError: _refused,
            HTTPException: _not_found,
            ClientDisconnect: _disconnected,
            Exception: _failed,
        },
    )


def _middleware(access: Access, metrics: Metrics, log: Log | None) -> Sequence[Middleware]:
    cors = [Middleware(CORSMiddleware, allow_origins=access.cors, allow_methods=["GET", "POST"], allow_headers=["*"])]
    reports = [metrics.report] if log is None else [metrics.report, log.report]
    return [
        Middleware(Observer, report=reports, texts=log is not None and log.prompts),
        Middleware(_Drain),
        *(cors if access.cors else []),
        Middleware(_AccessControl, access=access),
    ]


async def _refused(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, PolyquantError)
    refusal = refusal_of(problem)
    record_of(request.scope).error = refusal.code
    return refuse(refusal)


async def _not_found(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    what = {404: "there is nothing at", 405: f"{request.method} is not allowed at"}.get(problem.status_code, "no")
    answer = refuse(RequestError(f"{what} {request.url.path[:200]}", status=problem.status_code, code="not_found"))
    answer.headers.update(problem.headers or {})
    return answer


async def _failed(_: Request, problem: Exception) -> Response:
    """Report a bug: starlette raises it again, so it is logged with its traceback."""
    return refuse(RequestError(f"the server failed ({type(problem).__name__})", status=500, code="server_error"))


async def _disconnected(_: Request, problem: Exception) -> Response:
    """Return a response that no client reads."""
    return Response(status_code=400)


async def _json(request: Request, access: Access) -> Any:
    """Return the parsed body. Raises RequestError, ClientDisconnect."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError("the body must be sent as 'Content-Type: application/json'", status=415, code="invalid_json")
    too_large = RequestError(f"the body is larger than {access.body} bytes", status=413, code="body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length[:20]) > access.body:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(access.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > access.body:
                    raise too_large
    except TimeoutError:
        raise RequestError("the body took too long", status=408, code="timeout") from None
    if not body:
        raise RequestError("the body is empty", code="invalid_json")
    try:
        return strict_json.parse(body, strict_json.Limit(access.body, _VALUES))
    except PolyquantError as problem:
        raise RequestError(str(problem), code="invalid_json") from None


class _AccessControl:
    """Check host and key before reading the body."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._door = app, access
        self._key = None if access.key is None else b"Bearer " + access.key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject the request, or pass it on."""
        problem = self._problem(scope)
        if problem is not None:
            record_of(scope).error = problem.code
        await (self._app if problem is None else refuse(problem))(scope, receive, send)

    def _problem(self, scope: Scope) -> RequestError | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self._door.hosts is not None:
            name, colon, port = headers.get(b"host", b"").decode("latin-1").rpartition(":")
            host = name if colon and port.isdigit() else name + colon + port
            if host.lower() not in self._door.hosts:
                return RequestError(
                    f"this server answers to {', '.join(self._door.hosts)} only", status=403, code="wrong_host"
                )
        if self._key is None or scope["path"] in _WITHOUT_KEY:
            return None
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._key):
            return RequestError("no API key, or a wrong one", status=401, code="invalid_api_key")
        return None


class _Drain:
    """Drain the body after an early response.

    A response sent before the body has been received closes the connection. Unread bytes are received and dropped for a
    moment: closing with unread data resets the connection, and the client would not see the response.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on; drain before the last part of an early response."""
        names = {name for name, _ in scope["headers"]}
        unread = b"transfer-encoding" in names or dict(scope["headers"]).get(b"content-length", b"0") != b"0"

        async def receiving() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and message["type"] == "http.request" and message.get("more_body", False)
            return message

        async def sending(message: Message) -> None:
            if unread and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Connection"] = "close"
            if unread and message["type"] == "http.response.body" and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await _drop(receive)
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        await self._app(scope, receiving, sending)


async def _drop(receive: Receive) -> None:
    """Read to the end of the request, within limits."""
    left = _LINGER_BYTES
    try:
        async with asyncio.timeout(_LINGER_SECONDS):
            while left > 0:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
                left -= len(message.get("body", b""))
    except TimeoutError:
        return
