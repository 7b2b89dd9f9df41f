"""Run the commands of a documentation page, and compare their output.

A page runs in one bash, in an empty folder, from the first block to the last:

* ```console: lines that begin with "$ " are commands (continued after a backslash), the lines after each its output;
* ```sh: commands whose output is not shown;
* ```python whose first line is "# NAME.py": is saved under this name;
* an HTML comment that begins with "setup": commands that the reader does not see. $VECTORS and $DEMO are the folders of
  test data and of the embedded models;
* an HTML comment "not run: REASON" before a block: it is left out. Other comments do not count.

A line of output is equal if it is after these changes: "..." stands for any text, a duration, a speed, a version or an
instruction set for any other, and a number with a decimal point for all within one percent. A command must succeed
unless it prints an error or findings. Port 8080 is replaced by a free one, a server in the background is ready before
the next command, and the folder is called /models.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import polyquant

__all__ = ["Block", "Command", "blocks", "differs", "run_page"]

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>console|sh|python(?=\n# \w+\.py\n))\n(?P<body>.*?)^ *```$"
    r"|^<!-- (?P<note>.*?)\s-->$",
    re.M | re.S,
)
SERVER = re.compile(r"^polyquant serve .*&$", re.M)
READY = "for _ in {1..200}; do curl -sf http://127.0.0.1:8080/health >/dev/null && break; sleep 0.05; done\n"
CLIENT = f"""#!{sys.executable} -IS
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as s:
    s.connect(os.environ["POLYQUANT_SERVER"])
    call = {{"args": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}}
    socket.send_fds(s, [json.dumps(call).encode() + b"\\n"], [0, 1, 2])
    answers = s.makefile()
    pid = int(answers.readline())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    sys.exit(int(answers.readline() or 70))
"""


@dataclass(frozen=True)
class Command:
    line: int
    text: str
    expected: str | None
    """None: any output."""


@dataclass(frozen=True)
class Block:
    line: int
    commands: tuple[Command, ...]
    reason: str | None
    """The reason for not running it."""


def blocks(page: str) -> Iterator[Block]:
    """The blocks of a page in order, setups included."""
    reason = None
    for match in BLOCK.finditer(page):
        line = page.count("\n", 0, match.start()) + 1
        note = match["note"]
        if note is not None:
            if note.startswith("not run: "):
                reason = note.removeprefix("not run: ")
            elif note.startswith("setup\n"):
                yield Block(line, (Command(line, note.removeprefix("setup\n"), None),), None)
            continue
        body = re.sub(f"^{match['indent']}", "", match["body"], flags=re.M)
        yield Block(line, tuple(PARSE[match["language"]](body, line + 1)), reason)
        reason = None


def _script(body: str, line: int) -> Iterator[Command]:
    """One command, which ends at the first that fails with more than findings (exit status 1)."""
    yield Command(line, f"(trap '[ $? -le 1 ] || exit 9' ERR\n{body.rstrip()}\n[ $? -le 1 ])", None)


def _console(body: str, line: int) -> Iterator[Command]:
    text, expected, start = None, "", line
    for number, row in enumerate(body.splitlines(), line):
        if row.startswith("$ "):
            if text is not None:
                yield Command(start, text, expected)
            text, expected, start = row[2:], "", number
        elif text is not None and not expected and text.endswith("\\"):
            text += "\n" + row
        else:
            expected += row + "\n"
    assert text is not None, f"line {line}: a console block without a command"
    yield Command(start, text, expected)


def _saved(body: str, line: int) -> Iterator[Command]:
    name = body.partition("\n")[0].removeprefix("# ")
    yield Command(line, f"cat > {name} <<'END OF FILE'\n{body}END OF FILE", None)


PARSE = {"console": _console, "sh": _script, "python": _saved}
NUMBER = r"\d[\d,]*\.\d+"
VARIES = re.compile(
    r"\b(?:\d[\d,]*(?:\.\d+)? (?:[KMGT]i?B/s|million weights/s|billion weights/s|tokens/s|tokens a second|ms|min|s|h)\b"
    r"|about \d[\d.]* [KMG]iB)"
    r"|(?<![\d.])\d+\.\d+\.\d+(?![\d.])"
)


KERNELS = re.compile(r"AVX-512(?: VNNI(?: with AMX)?)?|AVX2|SSE2|NEON")


def differs(expected: str, found: str) -> bool:
    """True if the output is another one than the page has."""
    expected, found = (KERNELS.sub("<kernels>", VARIES.sub("<varies>", text.rstrip())) for text in (expected, found))
    pattern = re.escape(expected).replace(r"\.\.\.", "(?s:.*?)")
    numbers = re.findall(NUMBER, expected)
    for number in dict.fromkeys(numbers):
        pattern = re.sub(rf"(?<![\d,]){re.escape(re.escape(number))}(?!\d)", lambda _: f"({NUMBER})", pattern)
    match = re.fullmatch(pattern, found)
    return match is None or not all(map(_close, numbers, match.groups()))


def _close(a: str, b: str) -> bool:
    """Within one percent, or one unit of the last digit printed."""
    digits = len(a.partition(".")[2])
    x, y = (float(text.replace(",", "")) for text in (a, b))
    return abs(x - y) <= max(0.01 * abs(x), 1.001 * 10**-digits)


def run_page(page: Path, folder: Path, server: str) -> list[tuple[Command, str]]:
    """Run the page in `folder`; the commands that failed or printed something else, each with its output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    commands = [c for block in blocks(page.read_text(encoding="utf-8")) if block.reason is None for c in block.commands]
    tools = folder / ".bin"
    tools.mkdir()
    (tools / "polyquant").write_text(CLIENT)
    for program in ("pip", "make"):
        (tools / program).write_text(f"#!/bin/sh\necho {program} must not run in a test\nexit 1\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    marks = (f"printf '\\n\\036%s %s\\n' $? {i}\n" for i in range(len(commands)))
    script = "".join(
        f"{c.text}\n{READY if SERVER.search(c.text) else ''}{mark}" for c, mark in zip(commands, marks, strict=True)
    )
    script = script.replace("8080", port) + "kill $(jobs -p) 2>/dev/null; wait\n"
    env = {
        **os.environ, "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}", "POLYQUANT_SERVER": server,
        "COLUMNS": "80", "NO_COLOR": "1", "VECTORS": str(ROOT / "tests/vectors"), "HOME": str(folder),
        "DEMO": str(ROOT / "src/polyquant/demo"), "PYTHONPATH": str(Path(polyquant.__path__[0]).parent),
        "TMPDIR": str(folder), "LC_ALL": "C.UTF-8",
    }  # fmt: skip
    ran = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=300, check=False,
    )  # fmt: skip
    pieces = re.split(r"\n\x1e(\d+) (\d+)\n", ran.stdout.decode().replace(port, "8080").replace(str(folder), "/models"))
    assert len(pieces) == 3 * len(commands) + 1, f"the shell ended early: {pieces[-1]}"
    wrong = []
    for command, found, status in zip(commands, pieces[::3], pieces[1::3], strict=False):
        if command.expected is None:
            bad = status != "0"
        else:
            fails = any(f"polyquant{sign}" in command.expected for sign in (": ", " explain "))
            bad = differs(command.expected, found) or (status != "0" and not fails)
        if bad:
            wrong.append((command, f"{found}[exit status {status}]"))
    return wrong


def _end(connection: socket.socket, code: int) -> None:
    connection.sendall(f"{code}\n".encode())


def answer(listener: socket.socket) -> None:
    """Run the calls of clients, each in a fork of this process; never returns."""
    import signal

    from cli.child import call

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            text, fds, _, _ = socket.recv_fds(connection, 1 << 16, 3)
            while not text.endswith(b"\n"):
                text += connection.recv(1 << 16)
            asked = json.loads(text)
            connection.sendall(f"{os.getpid()}\n".encode())
            os.chdir(asked["cwd"])
            os.environ.update(asked["env"])
            for place, fd in enumerate(fds):
                os.dup2(fd, place)
            sys.argv = ["polyquant", *asked["args"]]
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115 - the process ends
            call(asked["args"], partial(_end, connection))
        connection.close()


def record(page: Path) -> None:
    """Replace the outputs that are out of date."""
    from cli.child import Server

    with tempfile.TemporaryDirectory() as folder:
        server, place = Server(), Path(folder, "socket")
        server.listen(place)
        work = Path(folder, "work")
        work.mkdir()
        wrong = {c.line: found for c, found in run_page(page, work, str(place))}
        server.close()
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    for block in reversed(list(blocks("".join(lines)))):
        for command in reversed(block.commands):
            if command.line in wrong:
                print(f"{page}:{command.line}: $ {command.text[:200]}\n... {wrong[command.line][-700:]}")
                if command.expected is not None:
                    begin = command.line + command.text.count("\n")
                    found = wrong[command.line].rpartition("[exit status")[0]
                    lines[begin : begin + command.expected.count("\n")] = [found.rstrip("\n") + "\n"] if found else []
    page.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        record(Path(name))
