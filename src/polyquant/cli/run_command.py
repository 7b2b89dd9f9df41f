"""polyquant run: only the generated text is printed on stdout; statistics go to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from polyquant.cli.console import activations_option, as_json, cache_option, json_option, lookup_option
from polyquant.cli.conversation import Conversation
from polyquant.cli.grouped import SPEED, GroupedCommand, GroupedOption
from polyquant.cli.lookup_notes import lookup_notes
from polyquant.cli.option_flags import source_option
from polyquant.cli.slow_engine import note_slow_engine
from polyquant.cli.source_type import SOURCE
from polyquant.cli.terminal import say, say_some, stream
from polyquant.errors import InputError, printable
from polyquant.runtime.chat import render_chat
from polyquant.runtime.generate import Generation, generate
from polyquant.runtime.grammar import Grammars
from polyquant.runtime.load import load
from polyquant.runtime.model import Model
from polyquant.runtime.recommended import shown
from polyquant.runtime.sampling import Sampling
from polyquant.storage import strict_json

_LOADING = ("activations", "cache", "threads", "context", "ternary_layout", "tile")
"""Options passed to `load`."""
_RANDOM = ("seed", "top_k", "top_p", "min_p")
"""Options without effect at temperature 0."""
_MAX_PROMPT = 64 << 20
"""Maximum bytes of a prompt from a file or pipe."""
_MAX_TOKENS = 128
"""Default limit of a continued prompt. Answers in a chat have none."""
_prompting = partial(click.option, cls=GroupedOption, group="Prompt")
_sampling = partial(click.option, cls=GroupedOption, group="Sampling (default: the model's own, else greedy)")
_running = partial(click.option, cls=GroupedOption, group=SPEED)


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  polyquant run model.gguf -p "Once upon a time" -n 64
  polyquant run hf-folder/ --chat -p "Who are you?" --temperature 0.7
  polyquant run model.gguf -p "A person as JSON:" --json-schema person.json
  polyquant run model.gguf -f prompt.txt --top-p 0.9 --temperature 1 --seed 7
  echo "It was a dark" | polyquant run model.gguf --format json | jq .text
  polyquant run model.gguf              (on a terminal: a chat; /help, /exit)""",
)
@click.argument("path", type=SOURCE)
@_prompting("-p", "--prompt", metavar="TEXT", help="The prompt.  [default: stdin; on a terminal, chat]")
@_prompting("-f", "--file", type=click.Path(), help="Read the prompt from a file; one trailing newline is removed.")
@_prompting("--chat", is_flag=True, help="Treat the prompt as a user message and apply the chat template.")
@_prompting("--system", metavar="TEXT", help="System message; implies --chat.")
@_prompting("--template", metavar="NAME", help="Name of the chat template, if the model has several; implies --chat.")
@_prompting(
    "-n",
    "--max-tokens",
    type=click.IntRange(1),
    help=f"Maximum number of tokens to generate.  [default: {_MAX_TOKENS}; with --chat until the answer ends]",
)
@_prompting("--stop", metavar="TEXT", multiple=True, help="Stop before this string; repeatable.")
@_prompting("--json-schema", metavar="FILE", type=click.Path(), help="Answer with JSON of this schema.")
@_sampling("--temperature", type=float, help="0: greedy.")
@_sampling("--top-k", type=int, help="Sample from the K most likely tokens; 0: all.")
@_sampling("--top-p", type=float, help="Sample from the most likely tokens whose probabilities add up to P.")
@_sampling("--min-p", type=float, help="Sample from tokens at least P times as likely as the most likely one.")
@_sampling("--repetition-penalty", type=float, help="Above 1: penalize recent tokens.")
@_sampling("--repetition-window", type=int, help="Number of recent tokens to penalize.  [default: 64]")
@_sampling("--seed", type=int, help="Random seed, for reproducible sampling.")
@activations_option
@cache_option
@_running("--threads", type=click.IntRange(1, 256), help="Threads of the native kernels.  [default: one per core]")
@_running("--context", type=click.IntRange(1), help="Maximum tokens of prompt and answer.  [default: the model's]")
@lookup_option
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
    """A loaded model and its generation options. max_tokens: as given by the user."""

    model: Model
    chat: bool
    system: str | None
    template: str | None
    sampling: Sampling
    max_tokens: int | None
    stop: tuple[str, ...]
    notes: tuple[str, ...]
    load_seconds: float
    prompt_lookup: int = 0
    schema: object = None

    def start(self, text: str) -> Generation:
        """The answer to one prompt."""
        prompt = text
        if self.chat:
            messages = [*self.opening(), {"role": "user", "content": text}]
            prompt = render_chat(self.model.tokenizer, messages, name=self.template)
        most = self.max_tokens if self.chat else self.max_tokens or _MAX_TOKENS
        constraint = None
        if self.schema is not None:
            constraint = Grammars(self.model.tokenizer, self.model.vocab).json(self.schema)
        return generate(
            self.model, prompt, max_tokens=most, sampling=self.sampling, stop=self.stop, add_special=not self.chat,
            constraint=constraint, prompt_lookup=self.prompt_lookup,
        )  # fmt: skip

    def opening(self) -> list[dict[str, str]]:
        """The system message, if there is one."""
        return [{"role": "system", "content": self.system}] if self.system is not None else []

    def ended(self, answer: Generation) -> Iterator[str]:
        """The reason why generation ended, unless an option requested the end."""
        if answer.full:
            yield f"the context of {self.model.context} tokens is full"
        elif answer.finish == "length" and self.schema is not None:
            yield f"the JSON is incomplete: stopped after {answer.generated} tokens; -n sets how many"
        elif answer.finish == "length" and self.max_tokens is None:
            yield f"stopped after {answer.generated} tokens; -n sets how many"


def _run(path: str, style: str, options: dict[str, Any]) -> None:
    prompt, file = options.pop("prompt"), options.pop("file")
    if prompt is not None and file is not None:
        raise click.UsageError("--prompt and --file are mutually exclusive")
    stats, chat, system, template = (options.pop(k) for k in ("stats", "chat", "system", "template"))
    max_tokens, stop, schema_file = (options.pop(k) for k in ("max_tokens", "stop", "json_schema"))
    how, lookup = {k: options.pop(k) for k in _LOADING}, options.pop("prompt_lookup")
    given = {k: v for k, v in options.items() if v is not None}
    Sampling(**given)  # validated before the model is opened
    talk = prompt is None and file is None and sys.stdin.isatty()
    if talk and style == "json":
        raise click.UsageError("--format json needs a prompt")
    if talk and schema_file is not None:
        raise click.UsageError("--json-schema needs a prompt")
    schema = None
    if schema_file is not None:
        schema = strict_json.typed(strict_json.read(Path(schema_file)), dict, "the schema", file=schema_file)
    text = None if talk else prompt if prompt is not None else _read(file)
    note_slow_engine()
    began = perf_counter()
    model = load(path, **how)
    templates = model.tokenizer.templates
    chat = chat or talk or system is not None or template is not None
    sampling = Sampling(**{**model.recommended.values, **given})
    notes = (
        *model.checkpoint.notes,
        *model.tokenizer.notes,
        *_of_sampling(model, sampling, given),
        *lookup_notes(model, lookup),
    )
    loaded = perf_counter() - began
    job = _Job(model, chat, system, template, sampling, max_tokens, stop, notes, loaded, lookup, schema)
    if style == "human":
        say_some(notes, "note: ", err=True)
    if text is None:
        if not templates:
            hint = f"polyquant run {printable(path)} -p TEXT (it has no chat template)"
            raise InputError("there is no prompt", file=path, hint=hint)
        if not any(note.startswith("sampling from") for note in notes):
            say(f"sampling: {shown(sampling)}", err=True)
        figures = _print_stats if stats else None
        Conversation(model, job.opening(), template, sampling, max_tokens, stop, figures, lookup).hold()
        return
    answer = job.start(text)
    if style == "json":
        _report(job, answer)
        return
    for token in answer:
        stream(token.text)
    say()
    say_some(job.ended(answer), "note: ", err=True)
    if stats or sys.stderr.isatty():
        _print_stats(answer, f"load {job.load_seconds:.2f} s, ")


def _of_sampling(model: Model, sampling: Sampling, given: dict[str, Any]) -> Iterator[str]:
    """Notes about sampling: values from the model's files, flags without effect."""
    yield from model.recommended.notes
    without = Sampling(**given)
    if shown(without) != shown(sampling):
        yield f"sampling from {model.recommended.origin}: {shown(sampling)}"
    idle = [f"--{n.replace('_', '-')}" for n in _RANDOM if n in given] if sampling.temperature == 0 else []
    if idle:
        has = "has" if len(idle) == 1 else "have"
        yield f"{' and '.join(idle)} {has} no effect at temperature 0; add --temperature 0.8, for example"
    if "repetition_window" in given and sampling.repetition_penalty == 1:
        yield "--repetition-window has no effect without a penalty; add --repetition-penalty 1.1, for example"


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
            "notes": [*job.notes, *job.ended(answer)],
            "sampling": asdict(job.sampling),
            "prompt_tokens": answer.prompt_tokens,
            "generated": answer.generated,
            "tokens": [{"id": t.id, "text": t.text, "logprob": t.logprob} for t in tokens],
            "load_seconds": job.load_seconds,
            "prompt_tokens_per_second": answer.prompt_rate,
            "tokens_per_second": answer.rate,
            "drafted_tokens": answer.lookup.drafted if answer.lookup else 0,
            "accepted_tokens": answer.lookup.accepted if answer.lookup else 0,
        }
    )


def _print_stats(answer: Generation, before: str = "") -> None:
    lookup = answer.lookup
    drafts = "" if lookup is None else f"{lookup.accepted} of {lookup.drafted} drafted tokens accepted, "
    say(
        f"{before}prompt {answer.prompt_tokens} tokens at {answer.prompt_rate:.1f}/s, "
        f"{answer.generated} tokens at {answer.rate:.1f}/s, {drafts}end: {answer.finish}",
        err=True,
    )
