"""/v1/embeddings: the real openai client against a real server process, and refused requests."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import openai
import pytest

import polyquant as pq
from architectures.golden_models import Golden
from integrations.test_serve import running
from polyquant.errors import UnsupportedError
from polyquant.integrations.server.app import Access, create_app
from polyquant.integrations.server.embeddings import embedding_request
from polyquant.integrations.server.engine import Engine
from polyquant.integrations.server.queue import Line, Turn
from polyquant.integrations.server.refusal import RequestError
from polyquant.integrations.server.served import Served

TEXTS = ["the word", "of the lord", "in the beginning"]
DEMO = Path(str(files("polyquant"))) / "demo/llama"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("serve") / "bert.gguf"
    pq.convert(Golden("bert").folder, path, to="gguf", codec="f32")
    return path


@pytest.fixture(scope="module")
def model(gguf):
    return pq.load(gguf)


@pytest.fixture(scope="module")
def client(gguf):
    with running(gguf) as (_, url), openai.OpenAI(base_url=url, api_key="-", max_retries=0, timeout=60) as found:
        yield found


@dataclass(frozen=True)
class Reply:
    status_code: int
    body: bytes

    def json(self):
        return json.loads(self.body)


async def reply(app, method, path, body) -> Reply:
    """One request to an ASGI application, whose client stays until it is answered."""
    sent, came = [], [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b"", "root_path": ""}

    async def receive():
        if came:
            return came.pop()
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return Reply(sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:]))


def ask(model, *requests):
    """The answers of the application in this process; a request: (method, path, body)."""

    async def answers():
        line = Line(4)
        app = create_app([Served("tiny", Engine(model), line)], Access(hosts=None))
        found = [await reply(app, *request) for request in requests]
        await line.close()
        return found

    return asyncio.run(answers())


def asked(served, **body):
    """The answer to one request for a vector."""
    return ask(served, ("POST", "/v1/embeddings", {"model": "tiny", "input": "a", **body}))[0]


def test_vectors_with_the_openai_client(client, model):
    wanted = model.embed(TEXTS)
    answer = client.embeddings.create(model="bert", input=TEXTS)  # base64, by itself
    assert [d.index for d in answer.data] == [0, 1, 2] and answer.model == "bert"
    np.testing.assert_array_equal(np.array([d.embedding for d in answer.data], np.float32), wanted)
    tokens = sum(len(model.tokenizer.encode(text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
    plain = client.embeddings.create(model="bert", input=TEXTS[0], encoding_format="float")
    np.testing.assert_array_equal(np.array([plain.data[0].embedding], np.float32), wanted[:1])


def test_token_ids_instead_of_text(client, model):
    ids = [model.tokenizer.encode(text) for text in TEXTS]
    wanted = model.embed(TEXTS)
    for given, rows in ((ids, wanted), (ids[1], wanted[1:2])):
        found = client.embeddings.create(model="bert", input=given).data
        np.testing.assert_array_equal(np.array([d.embedding for d in found], np.float32), rows)


def test_fewer_dimensions_are_normalized_again(client, model):
    found = client.embeddings.create(model="bert", input=TEXTS[0], dimensions=16).data[0].embedding
    cut = model.embed(TEXTS[0])[0, :16]
    np.testing.assert_allclose(found, cut / np.linalg.norm(cut), atol=1e-6)


def test_an_embedding_model_does_not_generate(client):
    for call in (
        lambda: client.completions.create(model="bert", prompt="a"),
        lambda: client.chat.completions.create(model="bert", messages=[{"role": "user", "content": "a"}]),
    ):
        with pytest.raises(openai.BadRequestError, match="generates no text: use /v1/embeddings") as caught:
            call()
        assert (caught.value.code, caught.value.param) == ("unsupported_model", "model")


def test_a_model_without_pooling_gives_no_vectors():
    answer = asked(pq.load(DEMO))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (400, "unsupported_model", "invalid_request_error")
    assert "produces no embeddings" in error["message"]


def test_a_decoder_with_pooling_does_both(tmp_path):
    folder = tmp_path / "tiny"
    shutil.copytree(DEMO, folder)
    kinds = ("Transformer", "Pooling", "Normalize")
    steps = [{"path": "1_Pooling" if kind == "Pooling" else "", "type": f"models.{kind}"} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_lasttoken": true}')
    model = pq.load(folder)
    found, said = ask(
        model,
        ("POST", "/v1/embeddings", {"model": "tiny", "input": "In the beginning"}),
        ("POST", "/v1/completions", {"model": "tiny", "prompt": "In the", "max_tokens": 2}),
    )
    vector = found.json()["data"][0]["embedding"]
    np.testing.assert_array_equal(np.array(vector, np.float32), model.embed("In the beginning")[0])
    assert said.status_code == 200 and said.json()["usage"]["completion_tokens"] == 2


REFUSED = [
    ({"input": ""}, "invalid_value", "input"),
    ({"input": []}, "invalid_value", "input"),
    ({"input": None}, "invalid_value", "input"),
    ({"input": ["a", ""]}, "invalid_value", "input"),
    ({"input": ["a", [1]]}, "invalid_value", "input"),
    ({"input": [1.5]}, "invalid_value", "input"),
    ({"input": [True]}, "invalid_value", "input"),
    ({"input": {"text": "a"}}, "invalid_value", "input"),
    ({"input": ["a"] * 2049}, "invalid_value", "input"),
    ({"input": [5] * 129}, "context_length_exceeded", "input"),
    ({"input": "word " * 300}, "context_length_exceeded", "input"),
    ({"input": [384]}, "invalid_value", None),
    ({"input": [-1]}, "invalid_value", None),
    ({"encoding_format": "hex"}, "invalid_value", "encoding_format"),
    ({"dimensions": 0}, "invalid_value", "dimensions"),
    ({"dimensions": 65}, "invalid_value", "dimensions"),
    ({"dimension": 6}, "unknown_parameter", "dimension"),
    ({"model": None}, "missing_parameter", "model"),
]


@pytest.mark.parametrize(("body", "code", "param"), REFUSED, ids=lambda x: str(x)[:40])
def test_refused(body, code, param, model):
    answer = asked(model, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param)


def test_wrong_model_and_wrong_method(model):
    assert asked(model, model="other").status_code == 404
    assert ask(model, ("GET", "/v1/embeddings", None))[0].status_code == 405


def test_fields_without_effect_are_accepted():
    found = embedding_request({"model": "m", "input": "a", "user": "me", "encoding_format": None}, 8)
    assert (found.inputs, found.base64, found.dimensions) == (("a",), False, None)
    with pytest.raises(RequestError, match="from 1 to 8"):
        embedding_request({"model": "m", "input": "a", "dimensions": 9}, 8)


def test_nan_weights_are_a_server_error(model, monkeypatch):
    monkeypatch.setattr(type(model), "states", lambda self, tokens: np.full((len(tokens), 64), np.nan, np.float32))
    answer = asked(model)
    assert answer.status_code == 500 and "not a number" in answer.json()["error"]["message"]


def test_disconnecting_cancels_the_remaining_inputs(model):
    """Each input is a separate turn, and work is cancelled between turns."""
    events = list(Engine(model).vectors([[2, 5, 3]] * 3, None))
    assert [e if e is Turn.RUNNING else e[0] for e in events] == [0, Turn.RUNNING, 1, Turn.RUNNING, 2, Turn.RUNNING]


def test_pooling_can_be_requested(gguf, tmp_path):
    folder = tmp_path / "bert"
    shutil.copytree(Golden("bert").folder, folder)
    (folder / "modules.json").unlink()
    bare = pq.load(folder)
    with pytest.raises(UnsupportedError, match="choose one: --pooling"):
        Engine(bare)
    engine = Engine(bare, "cls")
    ((_, vector), _) = engine.vectors([[2, 5, 3]], None)
    np.testing.assert_array_equal(vector.values, bare.states([2, 5, 3])[0])
