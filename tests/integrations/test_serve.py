"""polyquant serve: the openai client against a real server process, and tests of short-lived states."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import numpy as np
import openai
import pytest
import uvicorn
from uvicorn.server import ServerState

import polyquant as pq
from polyquant.analysis.demo import demo_model
from polyquant.cli import main
from polyquant.errors import InputError
from polyquant.integrations.server import requests, serving
from polyquant.integrations.server.app import Access
from polyquant.integrations.server.engine import Engine, Finish
from polyquant.integrations.server.queue import Line, Turn
from polyquant.integrations.server.refusal import RequestError, refusal_of
from polyquant.integrations.server.requests import chat_request, completion_request
from polyquant.integrations.server.wire import Usage
from polyquant.runtime.prompt_lookup import PassTimes

DOCS = Path(__file__).parents[2] / "docs"
DEMO = Path(str(files("polyquant"))) / "demo/llama"
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('no such thing') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
PROMPT = "In the beginning"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The demo model with a chat template."""
    path = tmp_path_factory.mktemp("serve") / "tiny"
    shutil.copytree(DEMO, path)
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def model(folder):
    return pq.load(folder)


@contextmanager
def running(folder, *options, code=0, program=("-m", "polyquant"), **env):
    """Start a server on a free port -> (process, url); it must end with the given exit code and an empty stderr."""
    command = [sys.executable, *program, "serve", str(folder), "--port", "0", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **env}
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("serving "), process.stderr.read()
        yield process, line.split()[-1]
        if process.poll() is None:
            process.terminate()
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (code, "", "")
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def url(folder):
    with running(folder, "--queue", "1", "--parallel", "1", "--max-body", "20000") as (_, found):
        yield found


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="-", max_retries=0, timeout=60) as found:
        yield found


def _connected(url):
    host, port = url.split("/")[2].split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def raw(url, request: bytes) -> str:
    """The server's answer to these bytes."""
    with _connected(url) as sock:
        sock.sendall(request)
        answer = b""
        while chunk := sock.recv(65536):
            answer += chunk
    return answer.decode()


def post(path, body: bytes, *headers: str, host="localhost") -> bytes:
    lines = [f"POST /v1/{path} HTTP/1.1", f"Host: {host}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


# ---------------------------------------------------------------- the answers


def test_models(client):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 512
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


def test_completion_equals_generate(client, model):
    said = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, logprobs=0)
    answer = model.generate(PROMPT, max_tokens=12)
    tokens = list(answer)
    (choice,) = said.choices
    assert choice.text == "".join(t.text for t in tokens) and choice.finish_reason == answer.finish == "length"
    assert said.usage.prompt_tokens == answer.prompt_tokens and said.usage.completion_tokens == len(tokens) == 12
    np.testing.assert_allclose(choice.logprobs.token_logprobs, [t.logprob for t in tokens], atol=1e-3)
    assert choice.logprobs.text_offset[-1] == len("".join(choice.logprobs.tokens[:-1]))
    assert said.id.startswith("cmpl-") and said.object == "text_completion" and said.model == "tiny"


def test_chat_equals_the_rendered_prompt(client, model):
    messages = [
        {"role": "system", "content": "Tell."},
        {"role": "user", "content": [{"type": "text", "text": "Go on"}]},
    ]
    said = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=9, temperature=0, logprobs=True, user="me"
    )
    rendered = "system: Tell.\nuser: Go on\nassistant:"
    tokens = list(model.generate(rendered, max_tokens=9, add_special=False))
    (choice,) = said.choices
    assert choice.message.content == "".join(t.text for t in tokens) and choice.message.role == "assistant"
    assert [round(x.logprob, 2) for x in choice.logprobs.content] == [round(t.logprob, 2) for t in tokens]
    assert said.usage.prompt_tokens == len(model.tokenizer.encode(rendered, add_special=False))
    assert said.usage.total_tokens == said.usage.prompt_tokens + 9
    # a response can be sent again unchanged
    again = client.chat.completions.create(
        model="tiny", messages=[*messages, choice.message.model_dump()], max_tokens=1, temperature=0
    )
    assert again.choices[0].finish_reason == "length"


def test_streams_equal_whole_answers(client):
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=10, temperature=0)
    parts = list(
        client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=10,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(p.choices[0].text for p in parts[:-1]) == whole.choices[0].text
    assert [p.choices[0].finish_reason for p in parts[:-1]] == [None] * (len(parts) - 2) + ["length"]
    assert parts[-1].choices == [] and parts[-1].usage.completion_tokens == 10
    assert all(p.usage is None for p in parts[:-1]) and len({p.id for p in parts}) == 1

    chat = list(
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "developer", "content": "Tell."}],
            max_tokens=5,
            temperature=0,
            stream=True,
            logprobs=True,
        )
    )
    assert chat[0].choices[0].delta.role == "assistant" and chat[-1].choices[0].finish_reason == "length"
    assert sum(len(p.choices[0].logprobs.content) for p in chat if p.choices[0].logprobs) == 5


def test_prompts_of_all_forms_seeds_and_stops(client, model):
    ids = model.tokenizer.encode(PROMPT)
    ask = {"model": "tiny", "max_tokens": 6, "temperature": 0.9, "seed": 7, "top_p": 0.95}
    extra = {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1}
    one, two, three, four = (
        client.completions.create(prompt=p, n=n, extra_body=extra, **ask)
        for p, n in ((PROMPT, 1), (ids, 1), ([PROMPT, PROMPT], 1), ([ids], 2))
    )
    assert one.choices[0].text == two.choices[0].text == three.choices[1].text == four.choices[0].text
    assert four.choices[1].text != four.choices[0].text and [c.index for c in three.choices] == [0, 1]
    assert three.usage.prompt_tokens == 2 * one.usage.prompt_tokens and three.usage.completion_tokens == 12
    assert four.usage.prompt_tokens == one.usage.prompt_tokens and four.usage.completion_tokens == 12

    text = client.completions.create(model="tiny", prompt=PROMPT, temperature=0).choices[0].text
    stop = text[8:12]
    ended = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, stop=["zq", stop]).choices[0]
    assert ended.text == text[: text.index(stop)] and ended.finish_reason == "stop"


def test_a_full_context_ends_with_length(client, model):
    ids = [5] * 510
    said = client.completions.create(model="tiny", prompt=ids, max_tokens=99, temperature=0)
    assert said.choices[0].finish_reason == "length" and said.usage.completion_tokens <= 3


# ---------------------------------------------------------------- refusals

BAD = {
    "model": ({"model": "gpt-4"}, openai.NotFoundError, "'tiny'"),
    "long": ({"prompt": [5] * 600}, openai.BadRequestError, "600 tokens, the model's context 512"),
    "vocabulary": ({"prompt": [99999]}, openai.BadRequestError, "99999"),
    "empty": ({"prompt": []}, openai.BadRequestError, "'prompt' must be"),
    "bias": ({"logit_bias": {"99999": 1}}, openai.BadRequestError, "logit_bias has a token outside the vocabulary"),
    "unknown": ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "did you mean 'temperature'"),
}


@pytest.mark.parametrize("name", BAD)
def test_unsupported_requests_are_openai_errors(name, client):
    change, kind, words = BAD[name]
    with pytest.raises(kind) as caught:
        client.completions.create(**{"model": "tiny", "prompt": "x", "max_tokens": 1, **change})
    assert words in caught.value.body["message"] and caught.value.type == "invalid_request_error"


def test_errors_of_the_template_are_returned(client):
    with pytest.raises(openai.BadRequestError, match="no such thing") as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "refuse"}])
    assert str(Path(DEMO).anchor) + "tmp" not in str(caught.value)  # no paths of the server's machine


JSON = "Content-Type: application/json"
BYTES = {
    "no json": (post("completions", b"{}", "Content-Length: 2"), 415),
    "broken json": (post("completions", b"{", JSON, "Content-Length: 1"), 400),
    "deep json": (post("completions", b"[" * 9999, JSON, "Content-Length: 9999"), 400),
    "a promise too large": (post("completions", b"", JSON, "Content-Length: 999999999999"), 413),
    "chunks too large": (
        post("completions", (b"1000\r\n" + b"[" * 4096 + b"\r\n") * 6, JSON, "Transfer-Encoding: chunked"),
        413,
    ),
    "a page's own name": (post("completions", b"{}", JSON, "Content-Length: 2", host="evil.example:80"), 403),
    "nowhere": (post("nowhere", b"", "Content-Length: 0"), 404),
    "get": (b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 405),
    "no http": (b"\x16\x03\x01\r\n\r\n", 400),
}


@pytest.mark.parametrize("name", BYTES)
def test_untrusted_bytes(name, url):
    request, status = BYTES[name]
    answer = raw(url, request)
    assert answer.startswith(f"HTTP/1.1 {status} ")
    if name != "no http":
        assert json.loads(answer.partition("\r\n\r\n")[2])["error"]["message"]


REFUSED = {
    "n": {"n": 0},
    "many": {"n": 65},
    "temperature": {"temperature": 2.5},
    "bool": {"temperature": True},
    "top_p": {"top_p": 0},
    "max_tokens": {"max_tokens": 0},
    "tools": {"tools": [{"type": "function"}]},
    "format": {"response_format": {"type": "xml"}},
    "schema": {"response_format": {"type": "json_schema", "json_schema": 5}},
    "top_logprobs": {"top_logprobs": 3},
    "many top_logprobs": {"logprobs": True, "top_logprobs": 21},
    "penalty": {"frequency_penalty": 2.5},
    "bias": {"logit_bias": {"x": 1}},
    "strong bias": {"logit_bias": {"5": 101}},
    "biases": {"logit_bias": {str(i): 1 for i in range(1025)}},
    "stops": {"stop": ["a", "b", "c", "d", "e"]},
    "empty stop": {"stop": ""},
    "stream_options": {"stream_options": {"include_usage": True}},
    "role": {"messages": [{"role": "tool", "content": "x"}]},
    "image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    "no messages": {"messages": []},
    "calls": {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
    "limits": {"max_tokens": 3, "max_completion_tokens": 4},
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_fields(name):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    chat_request(body)
    with pytest.raises(RequestError) as caught:
        chat_request({**body, **REFUSED[name]})
    assert caught.value.status == 400 and caught.value.param and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "body", [[], "x", None, 5, {"model": 5}, {"model": "m", "prompt": [[]]}, {"model": "m", "prompt": [True]}]
)
def test_bodies_of_the_wrong_type(body):
    with pytest.raises(RequestError):
        completion_request(body)


def test_values_without_effect_pass():
    harmless = {
        "user": "u",
        "metadata": {},
        "store": False,
        "seed": -1,
        "top_k": -1,
        "stop": None,
        "echo": False,
        "best_of": 1,
    }
    request = completion_request({"model": "m", "prompt": "x", "frequency_penalty": 0, "logit_bias": {}, **harmless})
    assert request.sampling.seed == (1 << 64) - 1 and request.sampling.top_k == 0 and request.sampling.temperature == 1
    assert request.max_tokens == 16


def test_recommended_sampling_is_the_default_and_requests_override_it():
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    found = chat_request(body, defaults).sampling
    assert (found.temperature, found.top_k, found.top_p, found.repetition_penalty) == (0.6, 20, 0.95, 1.05)
    found = chat_request({**body, "temperature": 1.5, "top_k": -1}, defaults).sampling
    assert (found.temperature, found.top_k, found.top_p) == (1.5, 0, 0.95)
    assert completion_request({"model": "m", "prompt": "x"}, defaults).sampling.temperature == 0.6


def test_an_engine_uses_the_recommended_sampling(tmp_path):
    shutil.copytree(demo_model("llama"), tmp_path / "model")
    assert Engine(pq.load(tmp_path / "model")).defaults == {}
    (tmp_path / "model/generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.25, "eos_token_id": 1}'
    )
    assert Engine(pq.load(tmp_path / "model")).defaults == {"temperature": 0.25}


def test_server_paths_are_not_returned():
    assert str(refusal_of(InputError("broken", file="/secret/model", found=3))) == "broken (found 3)"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("body (`--max-body`) | {:,} bytes", Access().body),
        ("time to send the body | {:g} s", Access().body_seconds),
        ("time to send the headers | {:g} s", serving._HEADER_SECONDS),
        ("idle connection | {} s", serving._IDLE_SECONDS),
        ("does not read | {:g} s", serving._STALL_SECONDS),
        ("connections | {},", serving._CONNECTIONS),
        ("at most {} in total", requests.MAX_CHOICES),
        ("up to {}; the answer ends", requests.MAX_STOPS),
        ("`top_logprobs` from 0 to {}", requests.MAX_TOP),
        ("0 to {} (completions)", requests.MAX_COMPLETION_TOP),
        ("at most {:,} tokens", requests.MAX_BIASES),
        ("default {} for completions", requests.COMPLETION_TOKENS),
    ],
)
def test_the_page_lists_the_limits(text, value):
    assert text.format(value) in (DOCS / "serve.md").read_text()


# ---------------------------------------------------------------- the queue


def waited(client, running, waiting):
    """Wait until the server's queue has this state."""
    for _ in range(500):
        health = client.get("/../health", cast_to=object)
        if (health["running"], health["waiting"]) == (running, waiting):
            return
        threading.Event().wait(0.01)
    raise AssertionError(health)


def test_disconnected_clients_and_a_full_queue(client):
    # Answers that would take minutes: later requests are only served if these were cancelled.
    ask = {"model": "tiny", "prompt": PROMPT, "max_tokens": 500, "n": 64, "temperature": 0, "stream": True}
    first, heard = client.completions.create(**ask), []

    def second():
        with client.completions.create(**ask) as stream:
            heard.append(next(iter(stream)))

    next(iter(first))
    waiting = threading.Thread(target=second)
    waiting.start()
    waited(client, True, 1)
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(**ask)
    assert caught.value.status_code == 503 and int(caught.value.response.headers["Retry-After"]) >= 1
    assert caught.value.code == "queue_full"
    first.close()
    waiting.join()
    assert heard
    waited(client, False, 0)

    # A queued client that disconnects frees its place at once.
    with client.completions.create(**ask) as stream:
        next(iter(stream))
        request = post("completions", body := json.dumps(ask).encode(), JSON, f"Content-Length: {len(body)}")
        with _connected(str(client.base_url)) as sock:
            sock.sendall(request)
            waited(client, True, 1)
        waited(client, True, 0)
    waited(client, False, 0)


def test_requests_take_turns_and_the_queue_is_bounded_and_cancellable():
    async def scene():
        line, go, seen = Line(1, parallel=1), threading.Event(), []

        def work(name, turn):
            try:
                while not go.wait(0.001) or name == "endless":
                    seen.append(name)
                    yield turn
                yield name
            finally:
                seen.append(f"end of {name}")

        async def ask(name, turn=Turn.RUNNING):
            with line.enter() as ticket:
                return [x async for x in ticket.run(work(name, turn))]

        first = asyncio.create_task(ask("first"))
        second = asyncio.create_task(ask("second", Turn.WAITING))
        while len(seen) < 9:
            await asyncio.sleep(0.001)
        assert all(a != b for a, b in itertools.pairwise(seen[1:9]))  # in turn
        assert (line.running, line.waiting) == (1, 1)
        with pytest.raises(RequestError, match="busy"):
            line.enter()
        second.cancel()
        while line.waiting:  # its place is free at its next turn
            await asyncio.sleep(0.001)
        assert "end of second" in seen
        third = asyncio.create_task(ask("endless"))
        while "endless" not in seen:
            await asyncio.sleep(0.001)
        go.set()
        assert await first == ["first"]
        line.shut()
        with pytest.raises(RequestError, match="shutting down"):
            await third
        with pytest.raises(RequestError, match="shutting down"):
            line.enter()
        await line.close()
        assert {"end of first", "end of endless"} < set(seen) and line.running == line.waiting == 0

    asyncio.run(scene())


def test_errors_of_the_worker_reach_the_client():
    async def scene():
        line = Line(0)

        def work():
            yield 1
            raise MemoryError

        with line.enter() as ticket, pytest.raises(MemoryError):
            async for _ in ticket.run(work()):
                pass
        await asyncio.sleep(0)
        with line.enter():  # the place is free again
            pass
        await line.close()

    asyncio.run(scene())


def test_eight_clients_at_once(folder):
    """Streams of eight clients run together, one that leaves and one that is refused change nothing for the others."""
    prompts = ["And it came to pass", "The king", "In the", "He said", "Pharaoh", "Now", "And", "Of all the"]
    exact = pq.load(folder, activations="float")
    expected = ["".join(t.text for t in exact.generate(p, max_tokens=80)) for p in prompts]
    found, together = [None] * 8, []
    with (
        running(folder, "--parallel", "8", "--max-memory", "1GB", "--activations", "float") as (_, url),
        openai.OpenAI(base_url=url, api_key="-", max_retries=0) as client,
    ):

        def ask(i):
            chunks = client.completions.create(
                model="tiny", prompt=prompts[i], max_tokens=80, temperature=0, stream=True
            )
            texts = []
            for chunk in chunks:
                texts.append(chunk.choices[0].text)
                if len(texts) % 20 == 1:
                    together.append(client.get("/../health", cast_to=object)["running"])
                if i == 5:
                    return chunks.close()
            found[i] = "".join(texts)
            return None

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="tiny", prompt=[1 << 30])
        for thread in threads:
            thread.join()
        waited(client, 0, 0)
    assert max(together) >= 2
    assert [found[i] for i in (0, 1, 2, 3, 4, 6, 7)] == [expected[i] for i in (0, 1, 2, 3, 4, 6, 7)]


# ---------------------------------------------------------------- one batch for all


def answers(engine, prompt, **fields):
    """Text, log probabilities, finish of the greedy answer."""
    request = completion_request({"model": "m", "prompt": prompt, "temperature": 0, **fields})
    *pieces, finish = [e[1] for e in engine.answers(engine.prepare(request)) if not isinstance(e, Turn)]
    assert isinstance(finish, Finish)
    return "".join(p.text for p in pieces), [p.logprob for p in pieces], finish


@pytest.mark.parametrize("cache", ["f16", "int8"])
def test_a_common_prefix_is_reused_with_equal_results(cache, folder):
    model = pq.load(folder, cache=cache)
    lost = 32 if cache == "int8" else 1  # a block that int8 has rounded is not gone back into
    kept, ids = Engine(model), model.tokenizer.encode
    story = (DEMO.parent / "held-out.txt").read_text()[:400]
    first, _, _ = answers(kept, story)
    for prompt, least in (
        (story + first + " And then", len(ids(story))),  # a chat that continues
        (story[:200] + " Then", len(ids(story[:200])) - 2),  # another turn taken
        (story[:200] + " Then", len(ids(story[:200] + " Then")) - 1),  # the same again
        ("Something else", 1),
    ):
        text, logprobs, finish = answers(kept, prompt, max_tokens=8)
        fresh, expected, _ = answers(Engine(model), prompt, max_tokens=8)
        assert text == fresh == "".join(t.text for t in model.generate(prompt, max_tokens=8))
        np.testing.assert_allclose(logprobs, expected, atol=5e-4)
        assert least - lost < finish.cached_tokens < finish.prompt_tokens == len(ids(prompt))


def test_prompt_lookup_is_counted(model, monkeypatch):
    monkeypatch.setattr(PassTimes, "steps", lambda self, tokens: 1 + 0.01 * (tokens - 1))  # passes seem to cost little
    prompt = "and he reigned in the house of the king of Judah, and he reigned in the house of"
    text, _, _ = answers(Engine(model), prompt, max_tokens=40)
    found, _, finish = answers(Engine(model, prompt_lookup=3), prompt, max_tokens=40)
    assert found == text and 0 < finish.accepted_tokens <= finish.drafted_tokens
    usage = Usage()
    usage.add(finish, first=True)
    assert usage.body()["completion_tokens_details"] == {
        "accepted_prediction_tokens": finish.accepted_tokens,
        "rejected_prediction_tokens": finish.drafted_tokens - finish.accepted_tokens,
    }


def test_cancelling_leaves_a_usable_cache(model):
    engine = Engine(model)
    body = {"model": "m", "prompt": [7] * 400, "temperature": 0, "max_tokens": 50}
    for prompt, turns, least in (([7] * 400, 2, 0), (PROMPT, 6, 2)):  # within a prompt, and within an answer
        work = engine.answers(engine.prepare(completion_request({**body, "prompt": prompt})))
        seen = [next(work) for _ in range(turns)]
        assert engine.batch.running == 1 and sum(not isinstance(e, Turn) for e in seen) >= least
        work.close()
        assert engine.batch.running == engine.batch.waiting == 0
    assert answers(engine, PROMPT)[0] == answers(Engine(model), PROMPT)[0]


def test_a_failed_step_drops_the_cache(model, monkeypatch):
    engine = Engine(model)
    expected, *_ = answers(engine, PROMPT)
    hidden = type(model.decoder).hidden

    def fails(self, tokens, cache):
        if cache.length > 8:
            raise MemoryError
        return hidden(self, tokens, cache)

    with monkeypatch.context() as patch:
        patch.setattr(type(model.decoder), "hidden", fails)
        with pytest.raises(RequestError, match="out of memory") as caught:
            answers(engine, PROMPT, max_tokens=30)
        assert caught.value.status == 500
    assert answers(engine, PROMPT)[0] == expected


# ---------------------------------------------------------------- start and exit


def test_key_and_signal(folder):
    with running(folder, "--name", "m", POLYQUANT_API_KEY="secret") as (process, url):
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
        assert raw(url, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").startswith(
            "HTTP/1.1 200"
        )
        with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as client:
            stream = client.completions.create(
                model="m", prompt=PROMPT, max_tokens=500, n=64, temperature=0, stream=True
            )
            next(iter(stream))
            process.send_signal(signal.SIGINT)
            with pytest.raises(openai.APIError, match="shutting down"):
                list(stream)
            process.wait(timeout=60)


STUCK = """
import sys, time
from polyquant.cli import main
from polyquant.integrations.server.engine import Engine
from polyquant.integrations.server.queue import Turn
Engine.answers = lambda *_: (time.sleep(60) if i else Turn.RUNNING for i in range(2))  # a kernel that takes its time
main(sys.argv[1:])
"""


def test_a_second_interrupt_does_not_wait_for_the_worker(folder):
    with running(folder, code=130, program=("-c", STUCK)) as (process, url):
        with openai.OpenAI(base_url=url, api_key="-", max_retries=0) as client:
            asking = threading.Thread(target=lambda: failing.append(_status(client)))
            failing = []
            asking.start()
            waited(client, True, 0)
            process.send_signal(signal.SIGINT)
            asking.join()
            assert failing == [503]
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)


def _status(client):
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="tiny", prompt=PROMPT)
    return caught.value.status_code


class Wire(asyncio.Transport):
    """A transport that records when it is closed."""

    aborted = False

    def abort(self):
        self.aborted = True

    def is_closing(self):
        return self.aborted

    def write(self, data):
        pass

    def close(self):
        pass

    pause_reading = resume_reading = close


@pytest.mark.parametrize(
    ("said", "stalls", "cut"),
    [
        (b"", False, True),  # not a word
        (b"GET /health HTTP/1.1\r\nHost: loc", False, True),  # headers that never end
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", False, False),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", True, True),  # does not read
    ],
)
def test_idle_connections_are_closed(said, stalls, cut, monkeypatch):
    monkeypatch.setattr(serving, "_HEADER_SECONDS", 0.01)
    monkeypatch.setattr(serving, "_STALL_SECONDS", 0.01)

    async def app(scope, receive, send):
        await asyncio.sleep(10)

    async def scene():
        config = uvicorn.Config(app, ws="none", log_config=None)
        config.load()
        connection, wire = serving._Connection(config, ServerState(), {}), Wire()
        connection.connection_made(wire)
        for byte in said:  # one at a time, which must not start the time again
            connection.data_received(bytes([byte]))
        if stalls:
            connection.pause_writing()
        await asyncio.sleep(0.05)
        assert wire.aborted == cut
        connection.connection_lost(None)

    asyncio.run(scene())


def test_a_port_in_use_and_a_missing_model_are_one_line_errors(folder, capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the command's own handlers are not for this process

    def refused(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["serve", *map(str, arguments)])
        out, err = capsys.readouterr()
        assert ended.value.code == 2 and not out and err.count("\n") == 1
        return err

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "already in use; choose another with --port" in refused(folder, "--port", taken.getsockname()[1])
    assert "nothing" in refused(folder.parent / "nothing", "--port", 0)
    assert "no.such.invalid" in refused(folder, "--host", "no.such.invalid", "--port", 0)
    assert "API key" in refused(folder, "--api-key", "", "--port", 0)
