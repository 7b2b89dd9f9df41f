"""`polyquant run` as users see it: text on stdout, statistics on stderr, clean exits."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from golden import VECTORS
from polyquant.analysis.demo import demo_model
from polyquant.cli.terminal import stream

LLAMA = demo_model("llama")
PROMPT = "And it came to pass"
SIX = ", when the man was come"  # the next six tokens, by transformers 5.23 in float32
SLOW = """
import os, sys, time
from polyquant.runtime.session import Session
feed = Session.feed
def slowly(self, tokens):
    time.sleep(float(os.environ.get("SECONDS_PER_TOKEN", "0.05")))
    return feed(self, tokens)
Session.feed = slowly
from polyquant.cli import main
main(sys.argv[1:])
"""
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }} {% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def start(*args, stdin=subprocess.PIPE, **options):
    """Run the command in a separate process that takes at least 50 ms per token."""
    words = [sys.executable, "-c", SLOW, "run", *map(str, args)]
    return subprocess.Popen(words, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def with_template(folder, template=TEMPLATE):
    shutil.copytree(LLAMA, folder / "model")
    settings = json.loads((LLAMA / "tokenizer_config.json").read_text())
    (folder / "model/tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return folder / "model"


def test_stdout_contains_only_the_text(polyquant):
    outcome = polyquant("run", LLAMA, "-p", PROMPT, "-n", 6)
    assert (outcome.code, outcome.out, outcome.err) == (0, SIX + "\n", "")
    outcome = polyquant("run", LLAMA, "-p", PROMPT, "-n", 6, "--stats")
    assert outcome.out == SIX + "\n" and "prompt 6 tokens at" in outcome.line and "end: length" in outcome.line


def test_prompt_lookup_counts_its_drafts(polyquant):
    again = f"{PROMPT}{SIX}, {PROMPT}"
    options = ("run", LLAMA, "-p", again, "-n", 60)
    plain, fast = polyquant(*options), polyquant(*options, "--prompt-lookup", 3, "--stats")
    assert plain.out == fast.out and "drafted tokens accepted, end: length" in fast.line
    found = json.loads(polyquant(*options, "--prompt-lookup", 15, "--format", "json").out)
    assert 0 <= found["accepted_tokens"] <= found["drafted_tokens"]
    assert polyquant(*options, "--prompt-lookup", 32).code == 2


def test_prompt_lookup_without_effect_is_noted(polyquant):
    outcome = polyquant("run", VECTORS / "architectures/mamba2", "-p", "a", "-n", 1, "--prompt-lookup", 3)
    assert "note: --prompt-lookup 3 has no effect: the recurrent states of this model cannot drop" in outcome.err


def test_every_option_has_an_effect(polyquant):
    def text(*options):
        outcome = polyquant("run", LLAMA, "-p", PROMPT, "-n", 12, *options)
        assert outcome.code == 0, outcome
        return outcome.out

    plain = text()
    warm = ("--temperature", 3, "--seed", 5)
    assert text(*warm) == text(*warm) != text("--temperature", 3, "--seed", 6)
    assert plain != text("--repetition-penalty", 3) != text("--repetition-penalty", 3, "--repetition-window", 1)
    assert text(*warm, "--top-k", 1) == text(*warm, "--top-p", 0) == text(*warm, "--min-p", 1) == plain
    assert text("--stop", " man", "--stop", "never") == ", when the\n"
    assert text("--context", 8) == ", when the\n"  # six tokens of the prompt and two generated ones
    assert text("--cache", "int8", "--threads", 1).startswith(", when the")  # keys and values are rounded: near
    assert text("--activations", "float") == plain  # the weights are bfloat16: nothing is rounded


def test_json_output(polyquant):
    outcome = polyquant("run", LLAMA, "-p", PROMPT, "-n", 6, "--format", "json")
    told = json.loads(outcome.out)
    assert told["text"] == SIX and told["finish"] == "length" and (told["prompt_tokens"], told["generated"]) == (6, 6)
    assert [t["id"] for t in told["tokens"]] == [14, 438, 261, 404, 372, 489] and all(
        t["logprob"] < 0 for t in told["tokens"]
    )


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_prompt_from_stdin_or_a_file(end, polyquant, tmp_path):
    child = start(LLAMA, "-n", 6)
    assert (
        child.communicate(f"{PROMPT}{end}".encode(), timeout=60) == (f"{SIX}\n".encode(), b"") and child.returncode == 0
    )
    (tmp_path / "prompt.txt").write_text(PROMPT + end)
    assert polyquant("run", LLAMA, "-f", tmp_path / "prompt.txt", "-n", 6).out == SIX + "\n"


def test_chat_uses_the_template(polyquant, tmp_path):
    model = with_template(tmp_path)
    assert polyquant("run", model, "--chat", "-p", PROMPT, "-n", 6).out == SIX + "\n"
    assert polyquant("run", model, "--system", "And it came", "-p", "to pass", "-n", 6).code == 0
    two = with_template(
        tmp_path / "two", [{"name": "default", "template": "no"}, {"name": "other", "template": TEMPLATE}]
    )
    assert polyquant("run", two, "--template", "other", "-p", PROMPT, "-n", 6).out == SIX + "\n"
    assert "known: default, other" in polyquant("run", two, "--template", "x", "-p", PROMPT).line


def test_an_early_stop_gives_a_reason(polyquant):
    outcome = polyquant("run", LLAMA, "-p", PROMPT)
    assert outcome.line == "note: stopped after 128 tokens; -n sets how many"
    assert polyquant("run", LLAMA, "-p", PROMPT, "-n", 8).err == ""
    assert "the context of 20 tokens is full" in polyquant("run", LLAMA, "-p", PROMPT, "--context", 20).line
    told = json.loads(polyquant("run", LLAMA, "-p", PROMPT, "--context", 20, "--format", "json").out)
    assert told["notes"] == ["the context of 20 tokens is full"]


IDLE = {
    ("--seed", 5): "note: --seed has no effect at temperature 0",
    ("--seed", 5, "--top-k", 3, "--top-p", 0.5): "note: --seed and --top-k and --top-p have no effect",
    ("--repetition-window", 9): "note: --repetition-window has no effect without a penalty",
}


@pytest.mark.parametrize("options", IDLE)
def test_options_without_effect_are_named(options, polyquant):
    outcome = polyquant("run", LLAMA, "-p", PROMPT, "-n", 2, *options)
    assert outcome.code == 0 and outcome.line.startswith(IDLE[options])


def test_sampling_of_generation_config(polyquant, tmp_path):
    model = broken(tmp_path, "generation_config.json", do_sample=True, temperature=5.0, top_p=0.5, top_k=-3)
    seeded = polyquant("run", model, "-p", PROMPT, "-n", 12, "--seed", 3)
    same = polyquant("run", LLAMA, "-p", PROMPT, "-n", 12, "--seed", 3, "--temperature", 5, "--top-p", 0.5)
    greedy = polyquant("run", model, "-p", PROMPT, "-n", 6, "--temperature", 0)
    assert seeded.out == same.out != SIX and not same.err and greedy.out == SIX + "\n"
    ignored, taken = seeded.err.splitlines()
    assert taken == "note: sampling from generation_config.json: temperature 5, top-p 0.5"
    assert ignored.startswith("note: generation_config.json is ignored where top_k is out of range")
    told = json.loads(polyquant("run", model, "-p", PROMPT, "-n", 2, "--top-k", 7, "--format", "json").out)
    assert told["sampling"]["temperature"] == 5 and told["sampling"]["top_k"] == 7


# ---------------------------------------------------------------- unusable input


def broken(folder, name, **changes):
    shutil.copytree(LLAMA, folder / "model")
    path = folder / "model" / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder / "model"


def without(folder, name):
    shutil.copytree(LLAMA, folder / "model")
    (folder / "model" / name).unlink()
    return folder / "model"


BAD = {
    "nothing there": (lambda p: p / "no", (), "no"),
    "no tokenizer": (lambda p: without(p, "tokenizer.json"), (), "no usable tokenizer"),
    "broken tokenizer": (lambda p: broken(p, "tokenizer.json", model={"type": "Nope"}), (),
        "tokenizer.json cannot be used"),
    "no template": (lambda p: LLAMA, ("--chat",), "use a plain prompt"),
    "template loops": (lambda p: with_template(p,
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"), ("--chat",),
            "runs too long"),
    "template loops 10^12": (lambda p: with_template(p, "{% for i in range(10**12) %}x{% endfor %}"), ("--chat",),
        "Range too big"),
    "template reaches out": (lambda p: with_template(p, "{{ ''.__class__.__mro__ }}"), ("--chat",),
        "forbidden attribute"),
    "template fills memory": (lambda p: with_template(p, "{{ 'x' * 10**11 }}"), ("--chat",), "too much memory"),
    "prompt too long": (lambda p: LLAMA, ("-p", "word " * 600),
        "longer than the model's context (expected at most 512 tokens, found"),
    "context of two": (lambda p: LLAMA, ("--context", 2), "expected at most 2 tokens, found 6 tokens"),
    "context too long": (lambda p: LLAMA, ("--context", 10**6), "expected 1 to 512 tokens"),
    "empty": (lambda p: without(p, "tokenizer_config.json"), ("-p", "", "--chat"), "no chat template"),
    "top_p": (lambda p: p / "no", ("--top-p", 2), "top_p is out of range"),
    "temperature": (lambda p: p / "no", ("--temperature", "nan"), "temperature is out of range"),
    "seed": (lambda p: p / "no", ("--seed", -1), "seed is out of range"),
    "stop": (lambda p: LLAMA, ("--stop", ""), "stop strings"),
    "no such file": (lambda p: LLAMA, ("-f", "no-such-prompt"), "no-such-prompt"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_one_line_error(case, polyquant, tmp_path):
    make, options, said = BAD[case]
    prompt = () if {"-p", "-f"} & set(options) else ("-p", PROMPT)
    outcome = polyquant("run", make(tmp_path), *prompt, *options)
    assert outcome.code == (1 if case == "no such file" else 2) and said in outcome.line and not outcome.out
    assert outcome.cpu < 10


def test_invalid_options(polyquant):
    for options, said in {
        ("--threads", 0): "1<=x<=256",
        ("--cache", "f64"): "'f64' is not one of",
        ("-n", 0): "x>=1",
    }.items():
        outcome = polyquant("run", LLAMA, "-p", "x", *options)
        assert outcome.code == 2 and said in outcome.err and not outcome.out


def test_notes_of_the_model_go_to_stderr(polyquant):
    masters = VECTORS / "models/tiny-bitnet/hf"
    outcome = polyquant("run", masters, "-p", "x", "-n", 2)
    assert outcome.code == 0 and outcome.line.startswith("note: ") and "ternary" in outcome.line
    told = json.loads(polyquant("run", masters, "-p", "x", "-n", 2, "--format", "json").out)
    assert [f"note: {n}" for n in told["notes"]] == [outcome.line]


def test_a_prompt_that_is_not_utf8(polyquant, tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in polyquant("run", LLAMA, "-f", tmp_path / "bytes").line
    assert "too long" in polyquant("run", LLAMA, "-f", "/dev/zero").line
    both = polyquant("run", LLAMA, "-f", tmp_path / "bytes", "-p", "x")
    assert both.code == 2 and "are mutually exclusive" in both.err


# ---------------------------------------------------------------- interrupts and closed pipes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_cleanly(number):
    child = start(LLAMA, "-p", PROMPT, "-n", 400)
    first = child.stdout.read(10)
    child.send_signal(number)
    rest, err = child.communicate(timeout=60)
    assert child.returncode == 130 and err == b""
    assert (first + rest).startswith(b", when the") and rest.endswith(b"\n") and rest.count(b"\n") == 1


def test_text_streams_and_a_closed_pipe_ends_the_program_quietly():
    child = start(LLAMA, "-p", PROMPT, "-n", 400)
    assert child.stdout.read(10) == b", when the"  # long before the end
    child.stdout.close()
    assert child.stderr.read() == b"" and child.wait(timeout=60) == 1


class Terminal:
    """Run the command on its own terminal. seconds: at least, for each token."""

    def __init__(self, *args, seconds=0.0):
        self.master, slave = pty.openpty()
        words = [sys.executable, "-c", SLOW, "run", *map(str, args)]
        env = {**os.environ, "TERM": "dumb", "SECONDS_PER_TOKEN": str(seconds)}
        self.child = subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=env)
        os.close(slave)
        self.seen = ""

    def until(self, text):
        """Read until `text` appears; return everything before it."""
        end = time.monotonic() + 60
        while text not in self.seen and time.monotonic() < end:
            if select.select([self.master], [], [], 1)[0]:
                self.seen += os.read(self.master, 4096).decode().replace("\r\n", "\n")
        before, found, self.seen = self.seen.partition(text)
        assert found, before
        return before

    def type(self, text):
        os.write(self.master, text.encode())

    def close(self):
        code = self.child.wait(timeout=60)
        os.close(self.master)
        return code


def test_a_conversation_on_a_terminal(tmp_path):
    terminal = Terminal(with_template(tmp_path), "-n", 6)
    assert "sampling: greedy" in terminal.until("you> ")
    terminal.type(f"{PROMPT}\n")
    assert f"model> {SIX}\n" in terminal.until("you> ")
    terminal.type(", that\n\n")  # the second turn continues the first; an empty line is ignored
    assert len(terminal.until("you> ").strip()) > len(", that")
    for _ in range(30):  # an end of input that comes while the terminal changes its mode is lost: users press again
        terminal.type("\x04")
        with suppress(subprocess.TimeoutExpired):
            terminal.child.wait(1)
            break
    assert terminal.close() == 0


ROLES = "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"


def test_commands_of_a_conversation(tmp_path):
    terminal = Terminal(with_template(tmp_path, ROLES), "-n", 6, "--temperature", 1, "--seed", 5)
    assert "sampling: temperature 1" in terminal.until("you> ")

    def ask(line):
        terminal.type(f"{line}\n")
        return terminal.until("you> ").partition("\n")[2]

    assert "/regenerate" in ask("/help") and "/regenerate" in ask("/nonsense")
    assert "no answer yet" in ask("/regenerate")
    first = ask(PROMPT)
    assert first.startswith("model> ") and "--max-tokens is 6" in first
    assert ask("/regenerate") != first  # another seed
    assert ask("/no command: a message") != first  # a line that only begins like one
    assert "forgotten" in ask("/clear")
    assert ask(PROMPT) == first  # the previous conversation is gone
    terminal.type("/exit\n")
    assert terminal.close() == 0


def test_a_full_context_drops_the_oldest_messages(tmp_path):
    terminal = Terminal(with_template(tmp_path, ROLES), "--context", 48, "-n", 12, "--system", "In the beginning")
    terminal.until("you> ")
    said = []
    for _ in range(4):
        terminal.type(f"{PROMPT}\n")
        said.append(terminal.until("you> "))
        assert "model> " in said[-1]
    assert "oldest messages are dropped" not in said[0] and any("oldest messages are dropped" in s for s in said)
    terminal.type("and he said " * 30 + "\n")
    assert "longer than the model's context" in terminal.until("you> ")
    terminal.type(f"{PROMPT}\n")  # the conversation continues
    assert "model> " in terminal.until("you> ")
    terminal.type("/exit\n")
    assert terminal.close() == 0


def test_a_chat_answer_continues_until_the_context_is_full(tmp_path):
    terminal = Terminal(with_template(tmp_path), "--context", 150)
    terminal.until("you> ")
    terminal.type(f"{PROMPT}\n")
    assert "the context of 150 tokens is full" in terminal.until("you> ")
    terminal.type("/exit\n")
    assert terminal.close() == 0


def test_an_interrupt_ends_an_answer_then_the_conversation(tmp_path):
    terminal = Terminal(with_template(tmp_path), "-n", 400, seconds=0.05)
    terminal.until("you> ")
    terminal.type(f"{PROMPT}\n")
    terminal.until(", when the")
    terminal.child.send_signal(signal.SIGINT)
    terminal.until("\nyou> ")
    for _ in range(30):  # Python does not see a signal that comes just before it waits for a line: users press again
        terminal.child.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            terminal.child.wait(1)
            break
    assert terminal.close() == 130


def test_a_terminal_without_a_template_needs_a_prompt():
    terminal = Terminal(LLAMA)
    assert "no prompt" in terminal.until("-p TEXT")
    assert terminal.close() == 2


def test_control_characters_do_not_reach_a_terminal(monkeypatch, capsys):
    said = "a\x1b[2J\x9b\n\tb\u202e\r\x7f\u2028\ud800é\u3000\u200d"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    stream(said)
    assert capsys.readouterr().out == "a\\x1b[2J\\x9b\n\tb\\u202e\\r\\x7f\\u2028\\ud800é\u3000\u200d"
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    stream(said.replace("\ud800", ""))
    assert capsys.readouterr().out == said.replace("\ud800", "")


def test_an_answer_follows_a_json_schema(polyquant, tmp_path):
    pytest.importorskip("llguidance")
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 2, "maxItems": 3}')
    found = json.loads(polyquant("run", LLAMA, "-p", PROMPT, "--json-schema", schema).out)
    assert 2 <= len(found) <= 3 and all(isinstance(x, int) for x in found)
    for text, words in (("[]", "the schema has the wrong type"), ("{", "JSON"), ('{"not": {}}', "Unimplemented keys")):
        schema.write_text(text)
        refused = polyquant("run", LLAMA, "-p", PROMPT, "--json-schema", schema)
        assert refused.code == 2 and words in refused.err and refused.err.count("\n") == 1
