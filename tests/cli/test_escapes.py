"""File content cannot control the terminal: every printed name and value is escaped, on one line, and bounded."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import unicodedata
from contextlib import suppress

import pytest

from cli.bad_inputs import GGUF, model
from cli.evil_inputs import EVIL, EVIL_INPUTS, LONG, NAME, running_gguf
from cli.test_run import LLAMA, PROMPT
from formats.gguf_files import ARCH, file, tensor, text
from polyquant.errors import InputError, UnknownNameError, printable

STEERS = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def steering(printed: str) -> list[str]:
    """Characters that a terminal interprets, except line ends."""
    return sorted({repr(c) for c in printed if c != "\n" and unicodedata.category(c) in STEERS})


def calm(outcome):
    """No control characters; an error is one bounded line; no traceback."""
    assert not steering(outcome.out + outcome.err)
    assert outcome.code in (0, 1, 2), outcome
    assert max(map(len, outcome.out.splitlines()), default=0) < 4500
    for line in outcome.err.splitlines():
        assert line.startswith(("polyquant: ", "note: ")) and len(line) < 1500, line
    assert outcome.code != 2 or outcome.err.count("polyquant: ") == 1
    return outcome


COMMANDS = (
    ("inspect",),
    ("convert", "out.gguf", "--dry-run", "--codec", "q8_0"),
    ("validate",),
    ("run", "-p", "x", "-n", 1, "--format", "json"),
)
"""Without the path, which is the first argument of each."""
SOME = [(name, COMMANDS[n % 2 :: 2]) for n, name in enumerate(EVIL_INPUTS)]
ALL = [pytest.param(name, COMMANDS, marks=pytest.mark.slow) for name in EVIL_INPUTS]


@pytest.mark.parametrize(("name", "commands"), [*SOME, *ALL], ids=lambda x: x if isinstance(x, str) else str(len(x)))
def test_names_from_files_cannot_control_the_terminal(name, commands, polyquant, tmp_path):
    (tmp_path / "in").mkdir()
    path = EVIL_INPUTS[name](tmp_path / "in")
    for command, *options in commands:
        calm(polyquant(command, path, *[tmp_path / o if o == "out.gguf" else o for o in options]))


ALL_VERBS = (
    "gguf tensors",
    "gguf NaN",
    "running gguf",
    "file name",
    "folder name",
    "hf tensors",
    "hf shards",
    "hf description",
    "gguf tensor type",
)


@pytest.mark.parametrize("name", ALL_VERBS)
def test_every_command_escapes_names(name, polyquant, tmp_path):
    (tmp_path / "in").mkdir()
    path = EVIL_INPUTS[name](tmp_path / "in")
    prose = tmp_path / "prose.txt"
    prose.write_text("And it came to pass " * 20)
    for words in (
        ["inspect", path, "--tensors", "*"],
        ["inspect", path, "--format", "json"],
        ["validate", path, "--format", "json"],
        ["validate", path, "--against", GGUF],
        ["validate", path, "--target", EVIL],
        ["compare", path, path],
        ["compare", GGUF, path],
        ["compare", path, path, "--format", "json"],
        ["convert", path, tmp_path / "out.gguf"],
        ["convert", path, tmp_path / f"{NAME}.gguf", "--overwrite"],
        ["convert", path, tmp_path / "hf", "--to", "hf", "--codec", "bf16"],
        ["quantize", path, tmp_path / "q.gguf", "--rule", f"{EVIL}=q8_0", "--overwrite"],
        ["convert", path, tmp_path / "t", "--to", "trellis-v3", "--bits", 2, "--effort", "fast", "--dry-run"],
        ["convert", path, tmp_path / "m", "--to", "msmodelslim", "--dry-run"],
        ["run", path, "-p", "x", "-n", 1, "--chat"],
        ["eval", path, "--text", prose, "--tokens", 40],
        ["eval", path, "--text", prose, "--against", GGUF, "--tokens", 40],
        ["serve", path, "--port", 0, "--api-key", EVIL],
        ["repair", path, tmp_path / "mended"],
        ["edit", path, "--remove", "nosuch"],
        ["edit", path, "--remove", EVIL[:-1]],
        ["edit", path, "--set", f"{EVIL}=1"],
        ["edit", path, "--set", f"{EVIL}:{EVIL}=1"],
        ["edit", path, "--rename", "nosuch=x"],
        ["edit", path, "--rename", EVIL],
        ["edit", path, "--rename-tensor", f"{EVIL}3=x"],
        ["edit", path, "--rename-tensor", f"{EVIL}=x{EVIL}", "--output", tmp_path / f"{NAME}.gguf", "--overwrite"],
    ):
        calm(polyquant(*words))


@pytest.mark.parametrize(
    "words",
    [
        ["explain", EVIL],
        [EVIL],
        ["inspect", "a", EVIL],
        ["inspect", f"--{EVIL}"],
        ["inspect", "x", "--format", EVIL],
        ["compare", "x", "y", "--limit", EVIL],
        ["convert", "x", "y", "--tile", EVIL],
        ["convert", "x", "y", "--codec", LONG],
        ["run", "x", "-f", EVIL, "-p", EVIL],
        ["run", EVIL, "-f", EVIL],
        ["demo", "--out", f"/dev/null/{EVIL}"],
    ],
)
def test_arguments_cannot_control_the_terminal(words, polyquant):
    """A shell puts names of files there: `polyquant inspect *`."""
    outcome = polyquant(*words)
    assert outcome.code in (1, 2) and len(outcome.err) < 3000
    assert not steering(outcome.out + outcome.err)


def test_hints_are_short_and_escaped(polyquant, tmp_path):
    keys = [ARCH, *(text(f"key{i}.{EVIL}", "x") for i in range(2000)), text(LONG[:60_000], "x")]
    (tmp_path / "x.gguf").write_bytes(file(keys))
    for asked in ("nosuch", f"key7.{EVIL}x", LONG[:-5]):
        outcome = calm(polyquant("edit", tmp_path / "x.gguf", "--remove", asked))
        assert outcome.code == 2 and len(outcome.line) < 1000
        assert outcome.line.count("key") <= 12
    assert " more" in polyquant("edit", tmp_path / "x.gguf", "--remove", "nosuch").line
    assert "did you mean" in polyquant("edit", tmp_path / "x.gguf", "--remove", f"key7.{EVIL}x").line


def test_long_lists_of_notes_are_shortened(polyquant, tmp_path):
    path = EVIL_INPUTS["hf description"](tmp_path)
    kinds = {f"layer{i}.weight": f"W{i}{EVIL}" for i in range(1000)}
    (path / "quant_model_description.json").write_text(json.dumps({"model_quant_type": "W8A8", **kinds}))
    for verb in ("inspect", "validate"):
        assert calm(polyquant(verb, path)).out.count("\n") < 80
    assert calm(polyquant("run", path, "-p", "x", "-n", 1)).err.count("\n") < 25


def test_every_part_of_an_error_is_escaped():
    whole = InputError(EVIL, file=EVIL, tensor=EVIL, expected=EVIL, found=EVIL, hint=EVIL)
    assert not steering(str(whole)) and "\n" not in str(whole)
    long = InputError(LONG, file=LONG, tensor=LONG, expected=LONG, found=LONG, hint=LONG)
    assert len(str(long)) < 2500 and not steering(str(long))
    unknown = UnknownNameError("key", LONG, [LONG, EVIL, *map(str, range(1000))])
    assert len(str(unknown)) < 1000 and not steering(str(unknown))
    assert str(UnknownNameError("key", "fist", ["first", "zero"])) == "no key is named 'fist'; did you mean first?"


def test_plain_text_is_unchanged():
    for plain in ("model.layers.0.mlp.up_proj.weight", "Ünïcödé 中文 😀", "a\\nb", "C:\\x"):
        assert printable(plain) == plain == printable(printable(plain))


def test_json_escapes_control_characters(polyquant, tmp_path):
    path = running_gguf(tmp_path)
    outcome = polyquant("inspect", path, "--format", "json")
    assert not steering(outcome.out) and outcome.out.isascii()
    assert json.loads(outcome.out)["metadata"]["general.name"] == EVIL


# ---------------------------------------------------------------- on a terminal

COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]|\x1b\[[0-9;]*m|\r")
"""Control sequences of rich and click: styles, and cursor moves of the progress bar."""
PAYLOAD = ("\x1b]0;", "\x1b[2J", "\x9b", "\x07", "\x08", "\x7f", "\u202e", "\u2066", "\u2028")


def on_terminal(*args) -> tuple[int, str]:
    """Run the command with a terminal as stdin, stdout and stderr. Return its exit code and output."""
    leader, follower = pty.openpty()
    code = "import sys; from polyquant.cli import main; main(sys.argv[1:])"
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")} | {"TERM": "xterm-256color"}
    child = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)], stdin=follower, stdout=follower, stderr=follower, env=env
    )
    os.close(follower)
    raw = b""
    with suppress(OSError):  # the terminal is gone
        while select.select([leader], [], [], 60)[0] and (some := os.read(leader, 1 << 16)):
            raw += some
    os.close(leader)
    return child.wait(), raw.decode()


def steered(folder):
    """A model whose answers contain control sequences: the tokenizer adds the payload after every "e"."""
    path = model("tokenizer.json", lambda t: t.update(decoder={"type": "Sequence", "decoders": [
        t["decoder"], {"type": "Replace", "pattern": {"String": "e"}, "content": EVIL}]}))(folder)  # fmt: skip
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        shutil.copy(LLAMA / name, path / name)
    body = json.loads((LLAMA / "tokenizer.json").read_text())
    body["decoder"] = {
        "type": "Sequence",
        "decoders": [body["decoder"], {"type": "Replace", "pattern": {"String": "e"}, "content": EVIL}],
    }
    (path / "tokenizer.json").write_text(json.dumps(body))
    return path


def test_answers_are_raw_in_a_pipe_and_escaped_on_a_terminal(polyquant, tmp_path):
    path = steered(tmp_path)
    words = ("run", path, "-p", PROMPT, "-n", 6)
    assert EVIL in polyquant(*words).out
    assert not steering(polyquant(*words, "--format", "json").out)
    code, shown = on_terminal(*words)
    assert code == 0 and "owned" in shown
    assert not [p for p in PAYLOAD if p in shown]


def test_progress_and_tables_on_a_terminal(tmp_path):
    (tmp_path / "in").mkdir()
    path = tmp_path / "in/x.gguf"
    names = [EVIL, "[/red]closes nothing", "[bold red]a[/]", "blk.0[/bold]"]
    path.write_bytes(file([ARCH], [tensor(n, (1024, 1024), 0, i << 22) for i, n in enumerate(names)], bytes(4 << 22)))
    for words in (
        ("validate", path),
        ("inspect", path),
        ("inspect", path, "--tensors", "*"),
        ("compare", path, path),
        ("convert", path, tmp_path / "out.gguf", "--codec", "q8_0"),
        ("edit", path, "--remove", "nosuch"),
        ("inspect", tmp_path / NAME),
        ("doctor",),
    ):
        code, shown = on_terminal(*words)
        assert code in (0, 1, 2) and "Traceback" not in shown, shown
        assert not [p for p in PAYLOAD if p in shown], words
        assert not steering(COLOURS.sub("", shown)), words
