"""Reads of the browser: headers first, data on request; imports of the first screen."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading

import pytest

pytest.importorskip("textual", reason="textual is not installed")

import polyquant
from golden import VECTORS
from integrations.browsing import browse
from polyquant.errors import UnsupportedError
from polyquant.integrations.tui.headers import Headers, read_ahead
from polyquant.integrations.tui.listing import Entry
from polyquant.integrations.tui.models import Models
from remote_server import Server, running

HF = VECTORS / "models/tiny-llama-untied/hf"


def test_the_screen_is_imported_without_numpy():
    """numpy and the readers take as long as Textual; another process imports them at the same time."""
    code = "import sys, polyquant.cli.browse_command, polyquant.integrations.tui.app; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "textual.app" in loaded and not {"numpy", "polyquant.types", "polyquant.opening"} & set(loaded)


def headers():
    return Headers(
        "gguf", "llama", (Entry("a\udc80", (2, 3), "f32", 24), Entry("b", (), "f16", 2, (1,), "q8_0", 9)), ("n",)
    )


@pytest.fixture
def no_other_thread(monkeypatch):
    """The worker of pytest may have threads of earlier tests; a process with threads does not fork."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


def test_headers_arrive_from_the_other_process(no_other_thread):
    assert read_ahead(("x",), headers)() == headers()


def test_a_process_with_threads_does_not_fork(monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert read_ahead(("x",), headers)() is None


def test_an_error_in_the_other_process_is_met_again_in_this_one(capfd, no_other_thread):
    def read():
        raise ValueError("not shown")

    assert read_ahead(("x",), read)() is None
    assert read_ahead(("https://host/x.gguf",), headers)() is None
    assert capfd.readouterr() == ("", "")


def test_a_slow_server_sends_headers_until_more_is_asked_for(tmp_path):
    path = tmp_path / "big.gguf"
    polyquant.convert(HF, path)
    gate = threading.Event()
    with running(Server(files={"/big.gguf": path}, fault=lambda request, number: gate.wait(30) and None)) as server:

        async def script(d):
            await d.pilot.press("question_mark")
            await d.pilot.pause()
            assert "Everywhere" in d.text and not d.app.loaded  # the screen answers while the server is waited for
            await d.pilot.press("escape")
            gate.set()
            await d.settled()
            opened = server.sent
            await d.press("down", "down", "slash", "n", "enter", "f", "escape", "s", "escape", "t", "end")
            assert server.sent == opened < path.stat().st_size
            await d.press("escape", "end", "home", "enter")
            assert d.app.query_one("#tensors").measured and server.sent > opened

        browse([f"{server.url}/big.gguf"], script, wait=False)


def test_names_that_cannot_be_translated_are_matched_as_stored(tmp_path):
    """A folder whose config.json is wrong next to a GGUF file."""
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((HF / "model.safetensors").read_bytes())
    config = json.loads((HF / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 7}))
    polyquant.quantize(HF, tmp_path / "x.gguf", codec="q8_0")

    async def script(d):
        assert d.status.startswith("note: tensors are matched by their stored names")
        entries = d.app.query_one("#tensors").listing.entries
        assert {e.name for e in entries if e.alone} == set(polyquant.open(tmp_path / "x.gguf"))
        await d.press("C")
        assert not d.app.query_one("#tensors").listing.errors

    browse([folder, tmp_path / "x.gguf"], script)


def test_an_error_of_one_tensor_is_shown_in_its_panel():
    async def script(d):
        await d.press("t", "enter")
        assert "cannot be read here" in d.text

    def refuse(self, name, every, tick):
        raise UnsupportedError("cannot be read here", tensor=name)

    original, Models.statistics = Models.statistics, refuse
    try:
        browse([HF], script)
    finally:
        Models.statistics = original


def test_quitting_cancels_a_thread():
    async def script(d):
        d.app.start("statistics", "reading", endless, lambda result: None)
        await asyncio.sleep(0.1)
        await d.pilot.press("q")

    def endless(job):
        while True:
            job.tick(0, 1)

    assert browse([HF], script).return_value is None
