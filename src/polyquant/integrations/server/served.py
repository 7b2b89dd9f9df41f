"""The models of a server, by name."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polyquant.integrations.server.engine import Engine, Event
from polyquant.integrations.server.queue import Line
from polyquant.integrations.server.refusal import RequestError
from polyquant.integrations.server.requests import no_model, requested_model
from polyquant.integrations.server.wire import Json, model_body
from polyquant.tokenizers.tokenizer import Tokenizer

__all__ = ["Catalogue", "Served"]


@dataclass(frozen=True, slots=True)
class Served:
    """A model, its engine, and its queue. name: its id in the API."""

    name: str
    engine: Engine
    line: Line[Event]


class Catalogue:
    """All models of a server. bodies: their entries of /v1/models."""

    def __init__(self, models: Sequence[Served]) -> None:
        self.models = {served.name: served for served in models}
        created = int(time.time())
        self.bodies = [
            model_body(s.name, created, s.engine.model.context, _abilities(s.engine, compared=len(models) > 1))
            for s in models
        ]

    def body(self, name: str) -> Json:
        """Return the entry of one model. Raises RequestError for an unknown one."""
        for body in self.bodies:
            if body["id"] == name:
                return body
        raise no_model(name, tuple(self.models))

    def requested(self, body: Any) -> Served:
        """Return the model that a request names. Raises RequestError."""
        return self.models[requested_model(body, tuple(self.models))]

    def check(self) -> None:
        """Raise RequestError 503 if no model accepts a request."""
        problems = []
        for served in self.models.values():
            try:
                served.line.check()
            except RequestError as problem:
                problems.append(problem)
        if len(problems) == len(self.models):
            raise problems[0]


def _abilities(engine: Engine, *, compared: bool) -> Json:
    """Return what clients such as the chat page need to know. compared: with the identity of the tokenizer."""
    return {
        "architecture": engine.model.architecture.name,
        "completions": engine.generates,
        "chat": engine.generates and bool(engine.tokenizer.templates),
        "embeddings": engine.pooling is not None,
        "sampling": {k: v for k, v in engine.defaults.items() if k != "repetition_window"},
        "tokenizer": _fingerprint(engine.tokenizer) if compared else None,
    }


def _fingerprint(tokenizer: Tokenizer) -> str:
    """Return a hash of the vocabulary: token ids of models with equal hashes can be compared."""
    table = hashlib.sha256()
    for token, text in sorted(tokenizer.tokens().items()):
        table.update(f"{token} {text}\0".encode("utf-8", "surrogatepass"))
    return table.hexdigest()[:16]
