"""polyquant run: stdout holds the text and nothing else; figures go to stderr."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from polyquant.cli.console import activations_option, as_json, cache_option, json_option
from polyquant.cli.option_flags import source_option
from polyquant.cli.terminal import say, say_some, stream
from polyquant.errors import InputError, printable
from polyquant.runtime.generate import Generation
from polyquant.runtime.load import load
from polyquant.runtime.model import Model
from polyquant.runtime.sampling import Sampling
from polyquant.runtime.session import Session

_LOADING = ("activations", "cache", "threads", "context", "ternary_layout", "tile")
"""Options that are `load`'s."""
_MAX_PROMPT = 64 << 20
"""Bytes of a prompt that is read from a file or a pipe."""


@click.command(
    epilog="""\b
Examples:
  polyquant run model.gguf -p "Once upon a time" -n 64
  polyquant run hf-folder/ --chat -p "Who are you?" --temperature 0.7
  polyquant run model.gguf -f prompt.txt --top-p 0.9 --temperature 1 --seed 7
  echo "It was a dark" | polyquant run model.gguf --format json | jq .text
  polyquant run model.gguf                    (on a terminal: a conversation)""",
)
@click.argument("path", type=click.Path())
@click.option("-p", "--prompt", metavar="TEXT", help="The text to go on with.  [default: stdin]")
@click.option("-f", "--file", type=click.Path(), help="A file that holds it; one newline at its end is left out.")
@click.option(
    "-n", "--max-tokens", type=click.IntRange(1), default=128, show_default=True, help="Most tokens to write."
)
@click.option("--chat", is_flag=True, help="The prompt is a user's message: use the chat template.")
@click.option("--system", metavar="TEXT", help="A system message before it; implies --chat.")
@click.option("--template", metavar="NAME", help="Which of several chat templates; implies --chat.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: always the likeliest token.")
@click.option("--top-k", type=int, default=0, help="Only the K likeliest tokens; 0: all.")
@click.option("--top-p", type=float, default=1.0, help="Only the likeliest that reach this probability.")
@click.option("--min-p", type=float, default=0.0, help="Only those at least this likely beside the first.")
@click.option("--repetition-penalty", type=float, default=1.0, help="Above 1: tokens of late become unlikely.")
@click.option("--repetition-window", type=int, default=64, show_default=True, help="How many of the last tokens.")
@click.option("--seed", type=int, help="The same seed, the same text.")
@click.option("--stop", metavar="TEXT", multiple=True, help="End before this text; may be repeated.")
@activations_option
@cache_option
@click.option("--threads", type=click.IntRange(1, 256), help="Of the native kernels.  [default: one a processor]")
@click.option("--context", type=click.IntRange(1), help="Most tokens of prompt and answer.  [default: the model's]")
@click.option("--stats", is_flag=True, help="Times on stderr, in a pipe too.")
@source_option("ternary_layout")
@source_option("tile")
@json_option
def run(path: str, style: str, **options: Any) -> None:
    """Go on with a text, or answer it, with the model at PATH (a GGUF file or a Hugging Face folder)."""
    try:
        _run(path, style, options)
    except KeyboardInterrupt:
        say()
        sys.exit(130)


@dataclass(frozen=True, slots=True)
class _Job:
    """A loaded model and what it is to do. sampling: keyword arguments of Model.generate."""

    model: Model
    chat: bool
    system: str | None
    template: str | None
    sampling: dict[str, Any]
    load_seconds: float

    def start(self, text: str) -> Generation:
        if not self.chat:
            return self.model.generate(text, **self.sampling)
        return self.model.chat([*self.opening(), {"role": "user", "content": text}], **self.answering())

    def opening(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system is not None else []

    def answering(self) -> dict[str, Any]:
        return {**self.sampling, "template": self.template}


def _run(path: str, style: str, options: dict[str, Any]) -> None:
    prompt, file = options.pop("prompt"), options.pop("file")
    if prompt is not None and file is not None:
        raise click.UsageError("--prompt and --file exclude each other")
    stats, chat, system, template = (options.pop(k) for k in ("stats", "chat", "system", "template"))
    how = {k: options.pop(k) for k in _LOADING}
    sampling = {k: v for k, v in options.items() if k not in ("max_tokens", "stop")}
    Sampling(**sampling)  # refused before the model is opened
    talk = prompt is None and file is None and sys.stdin.isatty()
    if talk and style == "json":
        raise click.UsageError("--format json needs a prompt")
    text = None if talk else prompt if prompt is not None else _read(file)
    began = perf_counter()
    model = load(path, **how)
    templates = model.tokenizer.templates
    chat = chat or talk or system is not None or template is not None
    job = _Job(model, chat, system, template, options, perf_counter() - began)
    if style == "human":
        say_some((*model.checkpoint.notes, *model.tokenizer.notes), "note: ", err=True)
    if talk:
        if not templates:
            hint = f"polyquant run {printable(path)} -p TEXT (it has no chat template to converse by)"
            raise InputError("there is no prompt", file=path, hint=hint)
        _converse(job, stats)
        return
    assert text is not None
    answer = job.start(text)
    if style == "json":
        _report(job, answer)
        return
    for token in answer:
        stream(token.text)
    say()
    if stats or sys.stderr.isatty():
        _figures(answer, f"load {job.load_seconds:.2f} s, ")


def _read(file: str | None) -> str:
    """The prompt of a file, or of stdin. Raises InputError."""
    if file is None:
        raw = sys.stdin.buffer.read(_MAX_PROMPT + 1)
    else:
        with Path(file).open("rb") as source:
            raw = source.read(_MAX_PROMPT + 1)
    name = file or "stdin"
    if len(raw) > _MAX_PROMPT:
        raise InputError("the prompt is too long", file=name, expected=f"at most {_MAX_PROMPT} bytes")
    try:
        return raw.decode().removesuffix("\n")
    except UnicodeDecodeError as e:
        raise InputError(f"the prompt is not UTF-8 (byte {e.start})", file=name) from None


def _report(job: _Job, answer: Generation) -> None:
    tokens = list(answer)
    as_json(
        {
            "text": "".join(t.text for t in tokens),
            "finish": answer.finish,
            "notes": [*job.model.checkpoint.notes, *job.model.tokenizer.notes],
            "prompt_tokens": answer.prompt_tokens,
            "generated": answer.generated,
            "tokens": [{"id": t.id, "text": t.text, "logprob": t.logprob} for t in tokens],
            "load_seconds": job.load_seconds,
            "prompt_tokens_per_second": answer.prompt_rate,
            "tokens_per_second": answer.rate,
        }
    )


def _figures(answer: Generation, before: str = "") -> None:
    say(
        f"{before}prompt {answer.prompt_tokens} tokens at {answer.prompt_rate:.1f}/s, "
        f"{answer.generated} tokens at {answer.rate:.1f}/s, end: {answer.finish}",
        err=True,
    )


def _converse(job: _Job, stats: bool) -> None:
    """One message a line until end of file; Ctrl-C ends an answer, and at the prompt the conversation."""
    with suppress(ImportError):  # where Python was built without it, lines are edited by the terminal alone
        import readline  # noqa: F401
    messages: list[dict[str, str]] = job.opening()
    session = job.model.session()
    while True:
        try:
            line = input("> ")
        except EOFError:
            say()
            return
        if line.strip():
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": _answer(job, messages, session, stats)})


def _answer(job: _Job, messages: list[dict[str, str]], session: Session, stats: bool) -> str:
    said: list[str] = []
    answer = job.model.chat(messages, session=session, **job.answering())
    with suppress(KeyboardInterrupt):
        for token in answer:
            said.append(token.text)
            stream(token.text)
    say()
    if stats:
        _figures(answer)
    return "".join(said)
