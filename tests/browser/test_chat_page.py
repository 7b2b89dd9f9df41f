"""The chat page of `polyquant serve` in a browser: streaming, stop, comparison, access, and a hostile model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import polyquant as pq
from browser.conftest import THEMES, WIDTHS
from integrations.test_serve import DEMO, folder, running  # noqa: F401 - a fixture

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

MESSAGE = "In the beginning God created"
SLOW = """
import sys, time
from polyquant.runtime.decoder import Decoder
logits = Decoder.logits
Decoder.logits = lambda self, hidden: (time.sleep(0.03), logits(self, hidden))[1]
from polyquant.cli import main
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def small(folder) -> Path:  # noqa: F811
    path = folder.parent / "small.gguf"
    pq.quantize(folder, path, codec="q4_0")
    return path


@pytest.fixture(scope="module")
def two(folder, small):  # noqa: F811
    """The page of a server with two models."""
    with running(folder, "--model", f"small={small}") as (_, url):
        yield url.removesuffix("/v1") + "/"


@pytest.fixture(scope="module")
def one(small):
    with running(small) as (_, url):
        yield url.removesuffix("/v1") + "/"


def asked(page, text=MESSAGE, tokens=12, temperature=0, ends="Complete"):
    """Send a message, and wait for the end of the answers."""
    page.locator(".start").wait_for()
    for name, value in (("max_tokens", tokens), ("temperature", temperature)):
        if page.locator(f"#{name}").is_visible():
            page.fill(f"#{name}", str(value))
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.locator("#status", has_text=ends).wait_for()


def stream(*texts: str, error: str | None = None) -> str:
    """The body of a streamed answer with these tokens."""
    chunks = [
        {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None, "token_ids": [i]}]}
        for i, text in enumerate(texts)
    ]
    if error is not None:
        chunks.append({"error": {"message": error, "code": "server_error"}})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def answers_with(page, body: str) -> None:
    """Replace the answers of the server."""
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))


# ---------------------------------------------------------------- one model


def test_the_answer_is_the_servers(visit, one, small):
    page = visit(one).page
    asked(page)
    model = pq.load(small)
    rendered = f"user: {MESSAGE}\nassistant:"
    wanted = "".join(t.text for t in model.generate(rendered, max_tokens=12, add_special=False))
    assert page.locator(".answer .text").inner_text().split() == wanted.split()
    stats = page.locator(".answer .soft").inner_text()
    assert "12 tokens" in stats and "tokens/s" in stats and "first token after" in stats and "token limit" in stats


@pytest.fixture(scope="module")
def slow(small):
    """The page of a server whose answers take many seconds."""
    with running(small, program=("-c", SLOW)) as (_, url):
        yield url.removesuffix("/v1") + "/"


def test_answers_are_shown_while_they_stream_and_stop(visit, slow):
    page = visit(slow).page
    page.locator(".start").wait_for()
    page.fill("#prompt", MESSAGE)
    page.press("#prompt", "Enter")
    busy = page.locator(".answer[aria-busy=true]")
    busy.locator("p.soft", has_text="tokens/s").wait_for()  # some tokens are shown, and more follow
    assert not page.locator("#send").is_visible()
    page.keyboard.press("Escape")
    page.locator("#status", has_text="Stopped").wait_for()
    assert busy.count() == 0 and page.locator("#send").is_visible()
    count = page.locator(".answer p.soft").inner_text()
    assert "stopped" in count
    page.fill("#prompt", "Again")
    page.press("#prompt", "Enter")
    page.locator("#stop").click()
    page.locator("#status", has_text="Stopped").wait_for()
    assert page.locator(".turn").count() == 2


def test_regenerate_replaces_the_last_answer(visit, one):
    page = visit(one).page
    asked(page, temperature=1.5, tokens=20)
    before = page.locator(".answer .text").inner_text()
    page.get_by_role("button", name="Regenerate").click()
    page.locator("#status", has_text="Complete").wait_for()
    page.locator(".answer[aria-busy=false] .below button").wait_for()
    assert page.locator(".turn").count() == 1 and page.locator(".answer .text").inner_text() != before


def test_a_conversation_is_sent_with_its_system_prompt_and_settings(visit, one):
    page = visit(one).page
    sent = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    page.locator(".start").wait_for()
    values = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 7}
    for name, value in values.items():
        page.fill(f"#{name}", str(value))
    page.fill("#system", "Be brief.")
    asked(page, temperature=0.5)
    page.fill("#prompt", "line one")
    page.press("#prompt", "Shift+Enter")
    page.keyboard.type("line two")
    page.press("#prompt", "Enter")
    page.locator(".turn").nth(1).locator("button", has_text="Copy").wait_for()
    first, second = sent
    assert {k: first[k] for k in values} == values and (first["temperature"], first["max_tokens"]) == (0.5, 12)
    answer = second["messages"][2]
    assert answer["role"] == "assistant" and answer["content"]
    assert second["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": MESSAGE},
        answer,
        {"role": "user", "content": "line one\nline two"},
    ]


def test_the_conversation_is_exported_and_forgotten(visit, one):
    page = visit(one).page
    asked(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    saved = json.loads(Path(download.value.path()).read_text())
    (turn,) = saved["turns"]
    assert turn["user"] == MESSAGE and len(turn["answers"][0]["token_ids"]) == 12
    assert saved["settings"] == {"temperature": "0", "max_tokens": "12"}
    page.get_by_role("button", name="New chat").click()
    page.locator(".start").wait_for()
    assert page.locator(".turn").count() == 0 and page.locator("#export").is_disabled()


def test_settings_out_of_range_are_not_sent(visit, one):
    page = visit(one).page
    page.locator(".start").wait_for()
    page.fill("#temperature", "9")
    page.fill("#prompt", MESSAGE)
    page.press("#prompt", "Enter")
    assert page.evaluate("() => document.activeElement.id") == "temperature" and page.locator(".turn").count() == 0


MARKUP = """# Title <img src=x onerror=alert(1)>

Some **bold**, *italic* and `code <b>`, but 2 * 3 * 4.

- one
- two
  more

3. three
> quoted

[a link](javascript:alert(1)) <script>alert(1)</script>
```html
<b onclick=alert(1)>text</b>
```
"""


def test_output_of_a_model_is_text_never_markup(visit, one):
    page = visit(one).page
    page.locator(".start").wait_for()
    answers_with(page, stream(*MARKUP.splitlines(keepends=True)))
    asked(page)
    text = page.locator(".answer .text")
    assert text.locator("img, script, a, b").count() == 0
    assert text.locator(".heading").inner_text() == "Title <img src=x onerror=alert(1)>"
    assert text.locator("strong").inner_text() == "bold" and text.locator("em").all_inner_texts() == ["italic"]
    assert text.locator("code").first.inner_text() == "code <b>"
    assert (
        text.locator("ul li").all_inner_texts() == ["one", "two more"]
        and text.locator("ol").get_attribute("start") == "3"
    )
    assert text.locator("blockquote").inner_text() == "quoted"
    assert text.locator("pre").inner_text().strip() == "<b onclick=alert(1)>text</b>"
    page.uncheck("#formatted")
    page.locator(".answer .text.plain").wait_for()
    assert text.inner_text().strip() == MARKUP.strip()


@pytest.mark.parametrize("text", ["`" * 20_000, "*a " * 10_000, "**" * 10_000, "> " * 10_000, "- " * 10_000])
def test_hostile_markdown_is_drawn_quickly(visit, one, text):
    page = visit(one).page
    page.locator(".start").wait_for()
    answers_with(page, stream(text, " end"))
    page.set_default_timeout(3000)
    asked(page)
    page.locator(".answer .below button").wait_for()
    assert "end" in page.locator(".answer .text").inner_text()


def test_errors_are_shown_and_the_chat_goes_on(visit, one):
    page = visit(one).page
    page.locator(".start").wait_for()
    answers_with(page, stream("half", error="the weights <b>"))
    asked(page, ends="Failed")
    assert page.get_by_role("alert").filter(has_text="the weights <b>").count() == 1
    assert page.locator(".answer .text").inner_text() == "half"
    page.unroute("**/v1/chat/completions")
    page.fill("#prompt", MESSAGE)
    page.press("#prompt", "Enter")
    page.locator("#status", has_text="Complete").wait_for()


def test_a_model_without_a_template_continues_the_text(visit):
    with running(DEMO) as (_, url):
        page = visit(url.removesuffix("/v1") + "/").page
        assert "continues the text" in page.locator(".start").inner_text()
        asked(page, text=MESSAGE, tokens=5)
        assert "5 tokens" in page.locator(".answer .soft").inner_text()


def test_the_page_asks_for_the_key(visit, small):
    with running(small, POLYQUANT_API_KEY="secret") as (_, url):
        opened = visit(url.removesuffix("/v1") + "/")
        page = opened.page
        page.locator("#key[open]").wait_for()
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Enter the API key").click()
        page.fill("#key-value", "wrong")
        page.keyboard.press("Enter")
        page.get_by_role("alert").filter(has_text="does not accept this key").wait_for()
        assert opened.violations() == []
        page.fill("#key-value", "secret")
        page.keyboard.press("Enter")
        asked(page)
        assert "12 tokens" in page.locator(".answer .soft").inner_text()
        # Chromium reports each refused request
        assert len(opened.problems) == 2 and all("401" in problem for problem in opened.problems)
        opened.problems.clear()


# ---------------------------------------------------------------- two models


def test_two_models_answer_and_the_parting_is_marked(visit, two, folder, small):  # noqa: F811
    page = visit(two).page
    asked(page, tokens=40)
    rendered = f"user: {MESSAGE}\nassistant:"
    a, b = (list(pq.load(path).generate(rendered, max_tokens=40, add_special=False)) for path in (folder, small))
    at = next(i for i in range(40) if a[i].id != b[i].id)
    note = page.locator(".note").inner_text()
    assert f"part at token {at + 1}. tiny: “" in note and "; small: “" in note
    # both models know both tokens here, each with its own probabilities
    assert len(re.findall(r"“[^”]+” [\d.]+ %", note)) == 4
    for cell, tokens in zip(page.locator(".answer").all(), (a, b), strict=True):
        assert cell.locator("mark").text_content() == tokens[at].text
        assert cell.locator(".text").text_content() == "".join(t.text for t in tokens)
        assert cell.locator(".rest").text_content() == "".join(t.text for t in tokens[at + 1 :])


def test_a_model_can_be_left_out(visit, two):
    page = visit(two).page
    page.locator(".start").wait_for()
    page.get_by_role("checkbox", name="tiny").uncheck()
    asked(page, tokens=5)
    assert page.locator(".answer").count() == 1 and page.locator(".note").count() == 0
    page.get_by_role("checkbox", name="small").uncheck()
    page.fill("#prompt", MESSAGE)
    page.press("#prompt", "Enter")
    page.locator("#status", has_text="Select a model").wait_for()


@pytest.mark.parametrize(
    ("texts", "words", "marked"),
    [
        ((["a", "b"], ["a", "b"]), "identical: 2 tokens", []),
        ((["a", "b"], ["a"]), "part at token 2. tiny: “b”; small: the end", ["b"]),
        ((["a", "", "é"], ["a", "b"]), "part at token 2", ["é", "b"]),
    ],
    ids=str,
)
def test_verdicts(visit, two, texts, words, marked):
    ids = {"a": 1, "b": 2, "": 3, "é": 4}
    page = visit(two).page
    page.locator(".start").wait_for()

    def handle(route):
        pieces = texts[0 if route.request.post_data_json["model"] == "tiny" else 1]
        chunks = [{"choices": [{"delta": {"content": text}, "token_ids": [ids[text]]}]} for text in pieces]
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", handle)
    asked(page)
    assert words in page.locator(".note").inner_text()
    assert page.locator("mark").all_text_contents() == marked


# ---------------------------------------------------------------- the page itself


@pytest.mark.parametrize("theme", THEMES)
def test_accessible_in_both_themes(visit, two, theme):
    opened = visit(two, theme=theme)
    asked(opened.page, tokens=30)
    opened.page.locator("mark").first.wait_for()
    assert opened.violations() == []


@pytest.mark.parametrize("width", WIDTHS)
def test_fits_the_window(visit, two, width):
    opened = visit(two, width=width)
    opened.page.locator(".start").wait_for()
    if opened.page.locator("#toggle").is_visible():
        assert not opened.page.locator("#temperature").is_visible()
        opened.page.locator("#toggle").click()
    assert opened.page.locator("#temperature").is_visible()
    asked(opened.page, text="word " * 40, tokens=30)
    assert opened.overflow() == 0
    box = opened.page.locator("#send").bounding_box()
    assert box["x"] + box["width"] <= width and box["y"] + box["height"] <= 900


def test_the_keyboard_reaches_everything(visit, two):
    page = visit(two).page
    asked(page, tokens=5)
    page.locator("h1").click()
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("() => document.activeElement.id || document.activeElement.textContent"))
    assert {
        "log",
        "prompt",
        "send",
        "temperature",
        "seed",
        "system",
        "export",
        "new",
        "formatted",
        "Copy",
        "Regenerate",
    } <= seen


def test_only_the_pages_own_script_runs(visit, two):
    opened = visit(two)
    opened.page.locator(".start").wait_for()
    assert {request.removeprefix(two) for request in opened.requests} == {"", "v1/models", "data:,"} - (
        set() if "data:," in opened.requests else {"data:,"}
    )
    opened.page.evaluate(
        "() => { const s = document.createElement('script'); s.text = 'window.bad = 1'; document.body.append(s); }"
    )
    assert opened.page.evaluate("() => window.bad") is None
    assert "Content Security Policy" in opened.problems.pop()
