"""polyquant serve"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from polyquant.architectures.pooling import KINDS, Kind
from polyquant.cli.console import activations_option, cache_option, lookup_option
from polyquant.cli.source_type import SOURCE
from polyquant.cli.terminal import say, say_some, stream
from polyquant.errors import InputError, UnsupportedError, printable
from polyquant.formats.sizes import memory_bytes

if TYPE_CHECKING:
    from polyquant.integrations.server.engine import Engine
    from polyquant.integrations.server.record import Log
    from polyquant.integrations.server.serving import Address
    from polyquant.runtime.kv_cache import CacheType
    from polyquant.runtime.load import Activations


@click.command(
    epilog="""\b
Examples:
  polyquant serve model.gguf
  polyquant serve hf-folder/ --port 8000 --name tiny
  polyquant serve --model a=q4.gguf --model b=q8.gguf   (compare two models)
  polyquant serve bge-small-en-v1.5/                    (embeddings)
  curl http://127.0.0.1:8080/v1/completions \\
    -H 'Content-Type: application/json' \\
    -d '{"model": "model", "prompt": "Once upon a time", "max_tokens": 32}'
\b
Python:
  client = openai.OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="-")""",
)
@click.argument("path", type=SOURCE, required=False)
@click.option("--model", "more", metavar="NAME=PATH", multiple=True,
              help="Also serve this model, as NAME; repeatable.")  # fmt: skip
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; 0.0.0.0: reachable from other machines.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Port to listen on; 0: any free port.",
)
@click.option("--name", metavar="ID", help="Model id of PATH.  [default: the name of the file or folder]")
@click.option("--api-key", envvar="POLYQUANT_API_KEY", metavar="KEY",
              help="Key that clients must send. Prefer the environment variable POLYQUANT_API_KEY.")  # fmt: skip
@click.option(
    "--cors", metavar="ORIGIN", multiple=True, help="Allow requests from web pages of this origin; repeatable."
)
@click.option("--queue", type=click.IntRange(0, 10_000), default=16, show_default=True,
              help="Maximum number of queued requests per model; more get status 503.")  # fmt: skip
@click.option("--parallel", type=click.IntRange(1, 256), metavar="N",
              help="Answers generated at once per model.  [default: 4 per thread]")  # fmt: skip
@click.option("--max-memory", metavar="SIZE",
              help="Limit of all caches, e.g. 4GB.  [default: half of the available memory]")  # fmt: skip
@click.option("--max-body", type=click.IntRange(1), default=1_000_000, show_default=True, metavar="BYTES",
              help="Maximum size of a request body.")  # fmt: skip
@click.option("--log", metavar="FILE", help="Append a line of JSON per request to FILE; -: stdout.")
@click.option("--log-prompts", is_flag=True, help="Also log prompts and answers.")
@click.option("--threads", type=click.IntRange(1, 256), help="Threads of the native kernels.  [default: one per core]")
@click.option("--pooling", type=click.Choice(KINDS), help="Pooling of embeddings.  [default: from the model]")
@activations_option
@cache_option
@lookup_option
@click.option("--context", type=click.IntRange(1), help="Maximum tokens of prompt and answer.  [default: the model's]")
def serve(
    path: str | None,
    more: tuple[str, ...],
    host: str,
    port: int,
    name: str | None,
    api_key: str | None,
    cors: tuple[str, ...],
    queue: int,
    parallel: int | None,
    max_memory: str | None,
    max_body: int,
    log: str | None,
    log_prompts: bool,
    threads: int | None,
    pooling: Kind | None,
    activations: Activations,
    cache: CacheType | None,
    prompt_lookup: int,
    context: int | None,
) -> None:
    """Serve the model at PATH over an OpenAI-compatible HTTP API: /v1/models, /v1/completions,
    /v1/chat/completions; embedding models: /v1/embeddings. A chat page is at /, metrics for Prometheus at
    /metrics.

    Answers are generated together: one pass over the weights computes a token of each. Ctrl-C stops the server.
    """
    try:
        from polyquant.integrations.server.app import Access
        from polyquant.integrations.server.engine import Engine
        from polyquant.integrations.server.serving import bind
        from polyquant.integrations.server.serving import serve as run
    except ImportError as missing:
        raise UnsupportedError(
            f"the server needs the package '{(missing.name or '').partition('.')[0]}'",
            hint="pip install 'polyquant[serve]'",
        ) from None
    from polyquant.cli.lookup_notes import lookup_notes
    from polyquant.cli.slow_engine import note_slow_engine  # imports numpy, as the model does
    from polyquant.runtime.load import load
    from polyquant.runtime.memory import default_memory

    _check_key(api_key)
    memory = None if max_memory is None else memory_bytes(max_memory)
    if log_prompts and log is None:
        raise click.UsageError("--log-prompts needs --log")
    paths = _paths(path, name, more)
    address = bind(host, port)  # before the models are loaded, so that a port in use fails fast
    note_slow_engine()
    with ExitStack() as files:
        recorded = None if log is None else _log(log, log_prompts, files)
        models = {
            identity: load(source, activations=activations, cache=cache, context=context, threads=threads)
            for identity, source in paths.items()
        }
        memory = memory or default_memory(sum(model.checkpoint.nbytes for model in models.values()))
        engines: dict[str, Engine] = {}
        for identity, model in models.items():
            engine = engines[identity] = Engine(
                model, pooling, parallel=parallel, memory=max(1, memory // len(models)), prompt_lookup=prompt_lookup
            )
            notes = tuple(lookup_notes(model, prompt_lookup)) if engine.generates else ()
            _say_notes(engine, f"{printable(identity)}: " if len(paths) > 1 else "", notes)
        if not address.loopback:
            _warn(address, api_key)

        def ready() -> None:
            say(f"serving {', '.join(map(printable, engines))} at {address.url}/v1")

        access = Access(api_key, _hosts(address), cors, max_body)
        run(engines, address, access, queue=queue, on_ready=ready, log=recorded)


def _paths(path: str | None, name: str | None, more: tuple[str, ...]) -> Mapping[str, str]:
    """Return the models by id."""
    if path is None and name is not None:
        raise click.UsageError("--name is the id of PATH, which is missing")
    if path is None and not more:
        raise click.UsageError("pass PATH, or --model NAME=PATH")
    models = [] if path is None else [(name or _identity(path), path)]
    for given in more:
        identity, equals, source = given.partition("=")
        if not (identity and equals and source):
            raise click.UsageError(f"--model must be NAME=PATH, found '{printable(given, 80)}'")
        models.append((identity, str(SOURCE.convert(source, None, None))))
    for identity, _ in models:
        if sum(identity == other for other, _ in models) > 1:
            raise click.UsageError(
                f"two models are called '{printable(identity)}'; choose names with --model NAME=PATH"
            )
    return dict(models)


def _say_notes(engine: Engine, before: str, more: tuple[str, ...]) -> None:
    model = engine.model
    notes = (*model.checkpoint.notes, *model.tokenizer.notes, *(model.recommended.notes if engine.generates else ()))
    say_some((*notes, *more), f"note: {before}", err=True)
    if engine.defaults:
        values = ", ".join(
            f"{name} {value:.4g}" for name, value in engine.defaults.items() if name != "repetition_window"
        )
        say(f"{before}sampling defaults from {model.recommended.origin}: {values}; requests override them", err=True)


def _log(target: str, prompts: bool, files: ExitStack) -> Log:
    """Return the request log, appended to a file or on stdout. Raises InputError."""
    from polyquant.integrations.server.record import Log

    if target == "-":
        return Log(_Lines(stream), prompts)
    try:
        file = Path(target).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed by `files`
    except OSError as problem:
        raise InputError(f"cannot write the log: {(problem.strerror or str(problem)).lower()}", file=target) from None
    return Log(_Lines(files.enter_context(file).write), prompts)


class _Lines:
    """Writes lines. A full disk or a closed pipe does not stop the server: lines are lost, with one warning."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write, self._failed = write, False

    def __call__(self, line: str) -> None:
        """Write a line."""
        try:
            self._write(line + "\n")
        except OSError as problem:
            if not self._failed:
                say(f"warning: the request log cannot be written: {problem.strerror}", err=True)
            self._failed = True


def _check_key(key: str | None) -> None:
    """Raise InputError for an empty key or one that cannot be sent in a header."""
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise InputError("the API key must be printable ASCII without spaces, and not empty")


def _identity(path: str) -> str:
    """model.gguf -> model, folder/ -> folder."""
    real = Path(os.path.abspath(path))  # noqa: PTH100 - the name as given; links are not resolved
    return real.stem if real.suffix == ".gguf" else real.name


def _hosts(address: Address) -> tuple[str, ...] | None:
    """Host names that a local client uses; None (any) if other machines may connect."""
    if not address.loopback:
        return None
    shown = f"[{address.host}]" if ":" in address.host else address.host
    return tuple(dict.fromkeys(("localhost", "127.0.0.1", "[::1]", shown.lower())))


def _warn(address: Address, key: str | None) -> None:
    advice = "" if key else "; set POLYQUANT_API_KEY"
    say(f"warning: {address.url} can be reached from other machines, unencrypted{advice}", err=True)
