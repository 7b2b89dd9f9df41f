"""polyquant browse in a pseudo-terminal: it starts, quits, reports errors in one line, and restores the terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from dataclasses import dataclass

import pytest

pytest.importorskip("textual", reason="textual is not installed")

from cli.evil_inputs import EVIL
from folders import safetensors_bytes
from golden import VECTORS
from remote_server import Server, running

HF = VECTORS / "models/tiny-llama-untied/hf"
_PATIENCE = 60.0
_ENTERS, _LEAVES = b"\x1b[?1049h", b"\x1b[?1049l"
_RUN = "from polyquant.cli import main; main()"


@dataclass
class Ended:
    out: bytes
    code: int
    restored: bool
    """The settings of the terminal are those of before."""

    @property
    def after(self) -> str:
        """The output after the screen was left."""
        return self.out.rpartition(_LEAVES)[2].decode()


def session(*args, until=b"", keys=b"q", sent=None, code=_RUN, env=None):
    """Run in a terminal of 80 x 24; after `until` appeared, type `keys` or send a signal."""
    pid, fd = pty.fork()
    if pid == 0:
        os.environ.update({"TERM": "xterm-256color", **(env or {})})
        os.execv(sys.executable, [sys.executable, "-c", code, *map(str, args)])
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before, held = termios.tcgetattr(fd), os.dup(fd)
    out, typed, end = b"", not until, time.monotonic() + _PATIENCE
    settings = before
    while time.monotonic() < end:
        if select.select([fd], [], [], 0.05)[0]:
            try:
                piece = os.read(fd, 1 << 16)
            except OSError:  # the other side is closed
                break
            out += piece
            if not piece:
                break
        settings = termios.tcgetattr(held)
        if not typed and until in out:
            typed = True
            if sent is not None:
                os.kill(pid, sent)
            else:
                os.write(fd, keys)
    else:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(fd)
    os.close(held)
    return Ended(out, os.waitstatus_to_exitcode(status), settings == before)


def _plain(text):
    """Without escape sequences."""
    return re.sub(r"\x1b\[[\d?<>;]*[a-zA-Z]", "", text)


def test_it_starts_and_quits():
    ended = session("browse", HF, until=b"lm_head")
    assert ended.code == 0 and _ENTERS in ended.out and _LEAVES in ended.out and ended.restored
    assert b"LlamaForCausalLM" in ended.out and b"Tokenizer" in ended.out
    assert _plain(ended.after) == ""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_restores_the_terminal(signum):
    ended = session("browse", HF, until=b"lm_head", sent=signum)
    assert _LEAVES in ended.out and ended.restored and "Traceback" not in ended.after
    assert ended.code == 130 and _plain(ended.after).strip() == "polyquant: interrupted"


def test_errors_are_one_line(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF\x03\x00\x00")
    for path in (tmp_path / "x.gguf", tmp_path / "none.gguf"):
        ended = session("browse", path)
        lines = [line for line in _plain(ended.after).splitlines() if line]
        assert ended.code == 2 and len(lines) == 1 and lines[0].startswith("polyquant: "), ended.out
        assert ended.restored


def test_names_from_files_do_not_reach_the_terminal(tmp_path):
    path = tmp_path / "model.safetensors"
    names = (f"t{EVIL}", "y" * 10_000, "[red]z", "\u05d0\u202e.w")
    path.write_bytes(safetensors_bytes({name: ("F32", [4], bytes(16)) for name in names}, {f"k{EVIL}": f"v{EVIL}"}))
    ended = session("browse", path, until=b"[red]z", keys=b"\r2q")
    assert ended.code == 0 and rb"]0;owned" in ended.out and b"\x1b]0;owned" not in ended.out
    shown = ended.out.decode()
    assert not set(shown) & set("\u202e\u2066\u2028\u200e\x9b\x7f") and "\x1b[2J" not in shown.partition("token")[2]


def test_without_colors():
    ended = session("browse", HF, until=b"lm_head", env={"NO_COLOR": "1"})
    styles = set(re.findall(rb"\x1b\[([\d;]*)m", ended.out))
    codes = {code for style in styles for code in style.split(b";") if code}
    assert codes and not {c for c in codes if c in (b"38", b"48") or 30 <= int(c) <= 37 or 40 <= int(c) <= 47}, codes


def test_not_a_terminal(polyquant):
    done = polyquant("browse", HF)
    assert done.code == 2 and "polyquant inspect" in done.line and "terminal" in done.line


def test_without_the_package():
    ended = session("browse", HF, code="import sys; sys.modules['textual'] = None; " + _RUN)
    assert ended.code == 2 and ended.out.count(b"\n") == 1 and b"pip install 'polyquant[tui]'" in ended.out


def test_a_silent_server_does_not_delay_quitting(tmp_path):
    with running(Server(files={"/x.gguf": HF / "config.json"}, delay=20.0)) as server:
        began = time.monotonic()
        ended = session("browse", f"{server.url}/x.gguf", until=b"reading headers", keys=b"q")
        assert ended.code == 0 and time.monotonic() - began < 15 and ended.restored
