"""polyquant serve: several models, sampling and response options, metrics and the request log."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import re
import signal
import time
import urllib.error
import urllib.request
from collections import Counter
from operator import itemgetter
from pathlib import Path

import jsonschema
import openai
import pytest

import polyquant as pq
from integrations.test_serve import PROMPT, TEMPLATE, folder, model, running  # noqa: F401 - fixtures
from integrations.test_serve_embeddings import reply
from polyquant.cli import main
from polyquant.integrations.server.app import Access, create_app
from polyquant.integrations.server.engine import Engine
from polyquant.integrations.server.queue import Line
from polyquant.integrations.server.record import Log
from polyquant.integrations.server.refusal import RequestError
from polyquant.integrations.server.requests import requested_model
from polyquant.integrations.server.served import Served

USER = [{"role": "user", "content": "Go on"}]


@pytest.fixture(scope="module")
def files(folder, tmp_path_factory):  # noqa: F811
    """The model again, quantized: the second model of the server."""
    path = tmp_path_factory.mktemp("second") / "q4.gguf"
    pq.quantize(folder, path, codec="q4_0")
    return folder, path


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("log") / "requests.jsonl"


@pytest.fixture(scope="module")
def url(files, log):
    with running(files[0], "--model", f"b={files[1]}", "--log", str(log), "--threads", "2") as (_, found):
        yield found


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="-", max_retries=0, timeout=60) as found:
        yield found


# ---------------------------------------------------------------- several models


def test_requests_select_a_model(client, files):
    first, second = client.models.list().data
    assert (first.id, second.id) == ("tiny", "b") and client.models.retrieve("b").id == "b"
    assert first.polyquant["tokenizer"] == second.polyquant["tokenizer"] is not None
    assert first.polyquant["chat"] and first.polyquant["completions"] and not first.polyquant["embeddings"]
    for name, path in (("tiny", files[0]), ("b", files[1])):
        said = client.completions.create(model=name, prompt=PROMPT, max_tokens=8, temperature=0)
        assert said.choices[0].text == "".join(t.text for t in pq.load(path).generate(PROMPT, max_tokens=8))
        assert said.model == name
    with pytest.raises(openai.NotFoundError, match="does not exist; this server has 'tiny', 'b'") as caught:
        client.completions.create(model="c", prompt=PROMPT)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("c")


@pytest.mark.parametrize(
    ("body", "status"), [({}, 400), ({"model": 5}, 400), ({"model": "c"}, 404), ([], 400)], ids=str
)
def test_unknown_and_missing_models(body, status):
    with pytest.raises(RequestError) as caught:
        requested_model(body, ("a", "b"))
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "pass PATH, or --model NAME=PATH"),
        (["--name", "x"], "--name is the id of PATH"),
        (["--model", "x"], "--model must be NAME=PATH, found 'x'"),
        (["--model", "x=a", "--model", "x=b"], "two models are called 'x'"),
        (["a", "--log-prompts"], "--log-prompts needs --log"),
    ],
)
def test_usage_errors(options, words, capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the command's own handlers are not for this process
    with pytest.raises(SystemExit) as ended:
        main(["serve", *options])
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_a_log_that_cannot_be_written_is_one_line(tmp_path, capsys, monkeypatch, folder):  # noqa: F811
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(folder), "--port", "0", "--log", str(tmp_path / "no/log")])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and "cannot write the log: no such file or directory" in err and err.count("\n") == 1


# ---------------------------------------------------------------- options of requests


def test_alternatives_in_chats_and_completions(client):
    said = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=4, temperature=0, logprobs=True, top_logprobs=5
    )
    for entry in said.choices[0].logprobs.content:
        best, *others = entry.top_logprobs
        assert math.isclose(best.logprob, entry.logprob, abs_tol=1e-5) and len(others) == 4
        assert best.token.endswith(entry.token) and bytes(best.bytes).decode() == best.token
        assert all(a.logprob >= b.logprob for a, b in zip(entry.top_logprobs, others, strict=False))
    (choice,) = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4, temperature=0, logprobs=3).choices
    assert [len(t) for t in choice.logprobs.top_logprobs] == [3] * 4
    for table, value in zip(choice.logprobs.top_logprobs, choice.logprobs.token_logprobs, strict=True):
        assert math.isclose(max(table.values()), value, abs_tol=1e-5)
    assert "".join(max(t, key=t.get) for t in choice.logprobs.top_logprobs) == choice.text


def test_token_ids(client, model):  # noqa: F811
    ask = {"model": "tiny", "max_tokens": 6, "temperature": 0, "extra_body": {"return_token_ids": True}}
    wanted = [t.id for t in model.generate(PROMPT, max_tokens=6)]
    (choice,) = client.completions.create(prompt=PROMPT, **ask).choices
    assert choice.token_ids == wanted
    parts = client.completions.create(prompt=PROMPT, stream=True, **ask)
    assert [i for p in parts for i in p.choices[0].token_ids] == wanted
    chat = client.chat.completions.create(messages=USER, stream=True, **ask)
    assert len([i for p in chat for i in p.choices[0].token_ids]) == 6


def test_penalties_and_biases(client, model):  # noqa: F811
    ask = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    plain = client.completions.create(**ask).choices[0].text
    ids = model.tokenizer.encode(plain, add_special=False)
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        text = client.completions.create(**ask, **penalty).choices[0].text
        assert len(set(model.tokenizer.encode(text, add_special=False))) > len(set(ids))
    first = next(iter(model.generate(PROMPT, max_tokens=1))).id
    other = client.completions.create(**ask, logit_bias={str(first): -100}, logprobs=0).choices[0]
    assert other.text != plain and not other.text.startswith(plain[:3])
    forced = client.completions.create(**ask, logit_bias={"300": 100}).choices[0].text
    assert forced == model.tokenizer.decode([300] * 24)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 200}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0, 1.3])
@pytest.mark.parametrize("stream", [False, True])
def test_json_schema(client, temperature, stream):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    said = client.chat.completions.create(
        model="tiny", messages=USER, temperature=temperature, seed=1, n=2, response_format=form, stream=stream
    )
    if stream:
        texts = ["", ""]
        for part in said:
            texts[part.choices[0].index] += part.choices[0].delta.content or ""
    else:
        texts = [c.message.content for c in said.choices]
        assert [c.finish_reason for c in said.choices] == ["stop", "stop"]
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


def test_json_object(client):
    said = client.chat.completions.create(
        model="tiny", messages=USER, temperature=0, max_tokens=200, response_format={"type": "json_object"}
    )
    (choice,) = said.choices
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {}}, "Unimplemented keys"),
        ({"type": "strin"}, "Invalid type"),
        ({"$ref": "http://localhost/x"}, "not present"),
    ],
)
def test_unsupported_schemas_are_bad_requests(client, schema, words):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(model="tiny", messages=USER, response_format=form)


# ---------------------------------------------------------------- metrics and log


def fetched(url: str) -> str:
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics") as response:
        assert response.headers["content-type"].startswith("text/plain; version=")
        return response.read().decode()


def values(text: str) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def lines(log: Path) -> list[dict]:
    """The whole lines of the log."""
    return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]


def settled(url: str, log: Path) -> int:
    """The number of lines, once those of earlier requests are written.

    The server writes a line after the client has its answer, and before it answers a request that arrives later.
    """
    marker = f"/settled-{time.monotonic_ns()}"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(url.removesuffix("/v1") + marker)
    return next(n for n, line in enumerate(written(log, 0, marker), 1) if line["path"] == marker)


def written(log: Path, before: int, *paths: str) -> list[dict]:
    """The lines of the log after the first `before`, once there is one per path."""
    for _ in range(6000):
        found = lines(log)[before:]
        if not Counter(paths) - Counter(line["path"] for line in found):
            return found
        time.sleep(0.01)
    raise AssertionError(f"no line for each of {paths} in {found}")


def test_metrics_count_requests_and_tokens(client, url, log):
    start = settled(url, log)
    before = values(fetched(url))
    client.completions.create(model="b", prompt=[5, 6, 7], max_tokens=9, temperature=0)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="x", prompt="a")
    written(log, start, "/v1/completions", "/v1/completions")
    text = fetched(url)
    after = values(text)

    def grown(name):
        return after[name] - before.get(name, 0)

    assert grown('polyquant_requests_total{route="/v1/completions",status="200"}') == 1
    assert grown('polyquant_requests_total{route="/v1/completions",status="404"}') == 1
    assert grown('polyquant_generated_tokens_total{model="b"}') == 9
    assert grown('polyquant_prompt_tokens_total{model="b"}') == 3
    assert grown('polyquant_time_to_first_token_seconds_count{model="b"}') == 1
    assert grown('polyquant_tokens_per_second_count{model="b"}') == 1
    assert after['polyquant_requests_waiting{model="b"}'] == after['polyquant_requests_running{model="tiny"}'] == 0
    assert after["process_resident_memory_bytes"] > 1e7


def test_the_log_has_a_line_per_request_without_prompts(client, url, log):
    before = settled(url, log)
    client.completions.create(model="b", prompt="a secret", max_tokens=5, temperature=0)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="b", prompt="a secret", n=0)
    good, bad = sorted(written(log, before, *["/v1/completions"] * 2), key=itemgetter("status"))
    assert (good["status"], good["model"], good["completion_tokens"], good["finish"]) == (200, "b", 5, ["length"])
    assert good["seconds"] >= good["first_token_seconds"] > 0 and good["tokens_per_second"] > 0
    assert (bad["status"], bad["error"], bad["disconnected"]) == (400, "invalid_value", False)
    assert "secret" not in log.read_text()


def test_a_client_that_leaves_is_logged_with_its_tokens(client, url, log):
    before = settled(url, log)
    ask = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 500, "n": 32, "temperature": 0}
    with client.completions.create(stream=True, **ask) as stream:
        next(iter(stream))
    (left,) = written(log, before, "/v1/completions")
    assert (left["status"], left["disconnected"], left["prompt_tokens"]) == (200, True, 3)
    assert 0 < left["completion_tokens"] < 32 * 500


def handled(model, *requests, access=None, prompts=True):  # noqa: F811
    """The log of an application in this process."""
    lines = []

    async def scene():
        queue = Line(4)
        served = Served("tiny", Engine(model), queue)
        app = create_app([served], access or Access(hosts=None), Log(lines.append, prompts))
        for request in requests:
            await reply(app, *request)
        await queue.close()

    asyncio.run(scene())
    return [json.loads(line) for line in lines]


def test_the_log_can_have_prompts_and_answers(model):  # noqa: F811
    body = {"model": "tiny", "temperature": 0, "max_tokens": 4}
    chat, completion = handled(
        model,
        ("POST", "/v1/chat/completions", {**body, "messages": USER}),
        ("POST", "/v1/completions", {**body, "prompt": PROMPT, "n": 2, "stream": True}),
    )
    assert chat["messages"] == USER and len(chat["answers"]) == 1
    assert (
        completion["prompts"] == [PROMPT]
        and completion["answers"] == ["".join(t.text for t in model.generate(PROMPT, max_tokens=4))] * 2
    )


def test_routes_of_the_metrics_are_bounded(model):  # noqa: F811
    paths = ["/nothing", "/v1/models/tiny", "/health"]
    records = handled(model, *(("GET", path, None) for path in paths))
    assert [(r["path"], r["status"]) for r in records] == list(zip(paths, (404, 200, 200), strict=True))


def test_wrong_keys_are_logged_and_metrics_need_one(model):  # noqa: F811
    access = Access("secret", None)
    records = handled(model, ("GET", "/metrics", None), ("GET", "/health", None), access=access)
    assert [(r["status"], r["error"]) for r in records] == [(401, "invalid_api_key"), (200, None)]


# ---------------------------------------------------------------- the page


def page_of(model, host, access):  # noqa: F811
    found = {}

    async def scene():
        queue = Line(4)
        app = create_app([Served("tiny", Engine(model), queue)], access)
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", host)], "query_string": b"",
                 "root_path": ""}  # fmt: skip

        async def receive():
            await asyncio.Event().wait()

        async def send(message):
            found.setdefault("status", message.get("status"))
            found.setdefault("headers", dict(message.get("headers", ())))
            found["body"] = found.get("body", b"") + message.get("body", b"")

        await app(scope, receive, send)
        await queue.close()

    asyncio.run(scene())
    return found


def test_the_page_needs_no_key_and_allows_its_own_script_only(model):  # noqa: F811
    found = page_of(model, b"localhost:8080", Access("secret"))
    assert found["status"] == 200 and found["headers"][b"content-type"].startswith(b"text/html")
    policy = found["headers"][b"content-security-policy"].decode()
    page = found["body"].decode()
    for tag in ("script", "style"):
        (inline,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.findall(r"https?://|innerHTML|\son\w+=", page)
    assert len(page) < 100_000


def test_the_page_is_refused_to_other_hosts(model):  # noqa: F811
    assert page_of(model, b"evil.example", Access())["status"] == 403


def test_a_full_disk_loses_lines_of_the_log_with_one_warning(capsys):
    from polyquant.cli.serve_command import _Lines

    def full(line):
        raise OSError(28, "No space left on device")

    lines = _Lines(full)
    lines("a")
    lines("b")
    assert capsys.readouterr().err == "warning: the request log cannot be written: No space left on device\n"
