"""polyquant run: only the generated text is printed on stdout; statistics go to stderr."""

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
"""Options passed to `load`."""
_MAX_PROMPT = 64 << 20
"""Maximum bytes of a prompt from a file or pipe."""


@click.command(
    epilog="""\b
Examples:
  polyquant run model.gguf -p "Once upon a time" -n 64
  polyquant run hf-folder/ --chat -p "Who are you?" --temperature 0.7
  polyquant run model.gguf -f prompt.txt --top-p 0.9 --temperature 1 --seed 7
  echo "It was a dark" | polyquant run model.gguf --format json | jq .text
  polyquant run model.gguf                    (on a terminal: a chat)""",
)
@click.argument("path", type=click.Path())
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt.  [default: stdin]")
@click.option("-f", "--file", type=click.Path(), help="Read the prompt from a file; one trailing newline is removed.")
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Maximum number of tokens to generate.",
)
@click.option("--chat", is_flag=True, help="Treat the prompt as a user message and apply the chat template.")
@click.option("--system", metavar="TEXT", help="System message; implies --chat.")
@click.option("--template", metavar="NAME", help="Name of the chat template, if the model has several; implies --chat.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: greedy.")
@click.option("--top-k", type=int, default=0, help="Sample from the K most likely tokens; 0: all.")
@click.option(
    "--top-p", type=float, default=1.0, help="Sample from the most likely tokens whose probabilities add up to P."
)
@click.option(
    "--min-p", type=float, default=0.0, help="Sample from tokens at least P times as likely as the most likely one."
)
@click.option("--repetition-penalty", type=float, default=1.0, help="Above 1: penalize recent tokens.")
@click.option(
    "--repetition-window", type=int, default=64, show_default=True, help="Number of recent tokens to penalize."
)
@click.option("--seed", type=int, help="Random seed, for reproducible sampling.")
@click.option("--stop", metavar="TEXT", multiple=True, help="Stop before this string; repeatable.")
@activations_option
@cache_option
@click.option("--threads", type=click.IntRange(1, 256), help="Threads of the native kernels.  [default: one per core]")
@click.option("--context", type=click.IntRange(1), help="Maximum tokens of prompt and answer.  [default: the model's]")
@click.option("--stats", is_flag=True, help="Print timings on stderr, even in a pipe.")
@source_option("ternary_layout")
@source_option("tile")
@json_option
def run(path: str, style: str, **options: Any) -> None:
    """Continue a prompt, or chat, with the model at PATH: a GGUF file, or a Trellis, msModelSlim or Hugging Face folder
    (float, GPTQ, AWQ, compressed-tensors, FP8, MXFP4, packed BitNet).
    """
    try:
        _run(path, style, options)
    except KeyboardInterrupt:
        say()
        sys.exit(130)


@dataclass(frozen=True, slots=True)
class _Job:
    """A loaded model and its sampling options (keyword arguments of Model.generate)."""

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
        raise click.UsageError("--prompt and --file are mutually exclusive")
    stats, chat, system, template = (options.pop(k) for k in ("stats", "chat", "system", "template"))
    how = {k: options.pop(k) for k in _LOADING}
    sampling = {k: v for k, v in options.items() if k not in ("max_tokens", "stop")}
    Sampling(**sampling)  # validated before the model is opened
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
            hint = f"polyquant run {printable(path)} -p TEXT (it has no chat template)"
            raise InputError("there is no prompt", file=path, hint=hint)
        _chat_loop(job, stats)
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
        _print_stats(answer, f"load {job.load_seconds:.2f} s, ")


def _read(file: str | None) -> str:
    """The prompt from a file or from stdin. Raises InputError."""
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


def _print_stats(answer: Generation, before: str = "") -> None:
    say(
        f"{before}prompt {answer.prompt_tokens} tokens at {answer.prompt_rate:.1f}/s, "
        f"{answer.generated} tokens at {answer.rate:.1f}/s, end: {answer.finish}",
        err=True,
    )


def _chat_loop(job: _Job, stats: bool) -> None:
    """Chat, one message per line, until end of file. Ctrl-C stops an answer, or at the prompt the chat."""
    with suppress(ImportError):  # Python may be built without readline
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
    pieces: list[str] = []
    answer = job.model.chat(messages, session=session, **job.answering())
    with suppress(KeyboardInterrupt):
        for token in answer:
            pieces.append(token.text)
            stream(token.text)
    say()
    if stats:
        _print_stats(answer)
    return "".join(pieces)
