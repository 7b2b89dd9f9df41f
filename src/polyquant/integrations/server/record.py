"""The record of a request at its end, for the metrics (Prometheus) and the request log (JSON lines).

`Observer`, the outermost middleware, creates the record; the answers fill it in; it is reported when the response has
been sent or the client has disconnected. Texts are only kept if the log wants them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polyquant.integrations.server.engine import Finish, Piece
from polyquant.integrations.server.requests import GenerationRequest
from polyquant.integrations.server.served import Served

__all__ = ["Log", "Metrics", "Observer", "Record", "record_of"]

ROUTES = (
    "/", "/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/embeddings",
)  # fmt: skip
_KEY = "polyquant.record"  # in the scope of a request
_DISCONNECTED = 499  # nginx's status for a client that left before the response
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_RATES = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


@dataclass(slots=True)
class Record:
    """One request. began: of a monotonic clock; first, last: seconds from there to the first and last token.

    texts: None unless they are logged. complete: the whole response has been sent.
    """

    method: str
    path: str
    client: str | None
    texts: dict[int, list[str]] | None
    began: float = field(default_factory=time.monotonic)
    at: datetime = field(default_factory=lambda: datetime.now(UTC))
    status: int | None = None
    complete: bool = False
    error: str | None = None
    model: str | None = None
    request: GenerationRequest | None = None
    first: float | None = None
    last: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    finish: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Time since the request arrived."""
        return time.monotonic() - self.began

    @property
    def route(self) -> str:
        """The path without ids; `other` for unknown ones, since clients choose them."""
        return "/v1/models" if self.path.startswith("/v1/models/") else self.path if self.path in ROUTES else "other"

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first one; None with fewer than two."""
        if self.first is None or self.completion_tokens < 2 or self.last <= self.first:
            return None
        return (self.completion_tokens - 1) / (self.last - self.first)

    def asked(self, model: str, request: GenerationRequest) -> None:
        """Note a valid request."""
        self.model, self.request = model, request

    def generated(self, index: int, piece: Piece) -> None:
        """Note a token of an answer."""
        self.completion_tokens += 1
        self.last = self.seconds
        if self.first is None:
            self.first = self.last
        if self.texts is not None:
            self.texts.setdefault(index, []).append(piece.text)

    def finished(self, finish: Finish, *, first: bool) -> None:
        """Note the end of an answer; first: the first one to its prompt."""
        self.finish.append(finish.reason)
        self.drafted_tokens += finish.drafted_tokens
        self.accepted_tokens += finish.accepted_tokens
        if first:
            self.cached_tokens += finish.cached_tokens


def record_of(scope: Scope) -> Record:
    """Return the record of a request."""
    record: Record = scope[_KEY]
    return record


class Observer:
    """Create a record for each request, and pass it to `report` at the end. texts: keep prompts and answers in it."""

    def __init__(self, app: ASGIApp, report: Sequence[Callable[[Record], None]], texts: bool) -> None:
        self._app, self._report, self._texts = app, report, texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        client = scope.get("client")
        record = Record(scope["method"], scope["path"], client[0] if client else None, {} if self._texts else None)
        scope[_KEY] = record

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                record.complete = True

        try:
            await self._app(scope, receive, sending)
        except Exception:
            record.status, record.complete, record.error = record.status or 500, True, "server_error"
            raise
        finally:
            if record.status is None:
                record.status = _DISCONNECTED
            for report in self._report:
                report(record)


class Metrics:
    """Counters and histograms of all requests, in a separate registry."""

    def __init__(self, models: Sequence[Served]) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_Queues(models))
        counter = partial(Counter, registry=self._registry)
        histogram = partial(Histogram, registry=self._registry)
        model = ("model",)
        self._requests = counter("polyquant_requests", "Requests", ("route", "status"))
        self._seconds = histogram("polyquant_request_seconds", "Duration of a request", ("route",), buckets=_SECONDS)
        self._prompt = counter("polyquant_prompt_tokens", "Tokens of prompts and embedded texts", model)
        self._cached = counter("polyquant_cached_tokens", "Prompt tokens that were not recomputed", model)
        self._generated = counter("polyquant_generated_tokens", "Generated tokens", model)
        self._drafted = counter("polyquant_drafted_tokens", "Tokens drafted by prompt lookup", model)
        self._accepted = counter("polyquant_accepted_tokens", "Drafted tokens that were right", model)
        self._first = histogram(
            "polyquant_time_to_first_token_seconds",
            "Time to the first token, including the queue",
            model,
            buckets=_SECONDS,
        )
        self._rate = histogram(
            "polyquant_tokens_per_second", "Tokens per second of a request after its first token", model, buckets=_RATES
        )

    def report(self, record: Record) -> None:
        """Add a request."""
        self._requests.labels(record.route, str(record.status)).inc()
        self._seconds.labels(record.route).observe(record.seconds)
        if record.model is None:
            return
        self._prompt.labels(record.model).inc(record.prompt_tokens)
        self._cached.labels(record.model).inc(record.cached_tokens)
        self._generated.labels(record.model).inc(record.completion_tokens)
        self._drafted.labels(record.model).inc(record.drafted_tokens)
        self._accepted.labels(record.model).inc(record.accepted_tokens)
        if record.first is not None:
            self._first.labels(record.model).observe(record.first)
        if (rate := record.rate) is not None:
            self._rate.labels(record.model).observe(rate)

    def text(self) -> bytes:
        """Return all values in Prometheus' text format."""
        return generate_latest(self._registry)


class _Queues(Collector):
    """The queue of each model, read when the metrics are."""

    def __init__(self, models: Sequence[Served]) -> None:
        self._models = models

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges."""
        waiting = GaugeMetricFamily("polyquant_requests_waiting", "Requests in the queue", labels=["model"])
        running = GaugeMetricFamily("polyquant_requests_running", "Requests that are computed", labels=["model"])
        for served in self._models:
            waiting.add_metric([served.name], served.line.waiting)
            running.add_metric([served.name], served.line.running)
        yield waiting
        yield running


@dataclass(frozen=True, slots=True)
class Log:
    """The request log: one JSON object per line. write: receives each line. prompts: with prompts and answers."""

    write: Callable[[str], None]
    prompts: bool

    def report(self, record: Record) -> None:
        """Write the line of a request."""
        entry: dict[str, Any] = {
            "time": record.at.isoformat(timespec="milliseconds"),
            "client": record.client,
            "method": record.method,
            "path": record.path[:200],
            "status": record.status,
            "seconds": round(record.seconds, 4),
            "error": record.error,
            "disconnected": not record.complete,
        }
        if record.model is not None:
            entry |= {
                "model": record.model,
                "prompt_tokens": record.prompt_tokens,
                "cached_tokens": record.cached_tokens,
                "completion_tokens": record.completion_tokens,
                "drafted_tokens": record.drafted_tokens,
                "accepted_tokens": record.accepted_tokens,
                "first_token_seconds": None if record.first is None else round(record.first, 4),
                "tokens_per_second": None if (rate := record.rate) is None else round(rate, 2),
                "finish": record.finish,
            }
        if self.prompts and record.request is not None:
            entry |= _texts(record.request, record.texts or {})
        self.write(json.dumps(entry))


def _texts(request: GenerationRequest, answers: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    asked = {"messages": request.messages} if request.chat else {"prompts": request.prompts}
    return {**asked, "answers": ["".join(pieces) for _, pieces in sorted(answers.items())]}
