"""polyquant serve"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from polyquant.architectures.pooling import KINDS, Kind
from polyquant.cli.console import activations_option, cache_option
from polyquant.cli.source_type import SOURCE
from polyquant.cli.terminal import say, say_some
from polyquant.errors import InputError, UnsupportedError, printable
from polyquant.formats.sizes import memory_bytes

if TYPE_CHECKING:
    from polyquant.integrations.server.serving import Address
    from polyquant.runtime.kv_cache import CacheType
    from polyquant.runtime.load import Activations


@click.command(
    epilog="""\b
Examples:
  polyquant serve model.gguf
  polyquant serve hf-folder/ --port 8000 --name tiny
  polyquant serve bge-small-en-v1.5/                (embeddings)
  curl http://127.0.0.1:8080/v1/completions \\
    -H 'Content-Type: application/json' \\
    -d '{"model": "model", "prompt": "Once upon a time", "max_tokens": 32}'
\b
Python:
  client = openai.OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="-")""",
)
@click.argument("path", type=SOURCE)
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
@click.option("--name", metavar="ID", help="Model id in the API.  [default: the name of the file or folder]")
@click.option("--api-key", envvar="POLYQUANT_API_KEY", metavar="KEY",
              help="Key that clients must send. Prefer the environment variable POLYQUANT_API_KEY.")  # fmt: skip
@click.option(
    "--cors", metavar="ORIGIN", multiple=True, help="Allow requests from web pages of this origin; repeatable."
)
@click.option("--queue", type=click.IntRange(0, 10_000), default=16, show_default=True,
              help="Maximum number of queued requests; more get status 503.")  # fmt: skip
@click.option("--parallel", type=click.IntRange(1, 256), metavar="N",
              help="Answers generated at once.  [default: 4 per thread]")  # fmt: skip
@click.option("--max-memory", metavar="SIZE",
              help="Limit of all caches, e.g. 4GB.  [default: half of what is available]")  # fmt: skip
@click.option("--max-body", type=click.IntRange(1), default=1_000_000, show_default=True, metavar="BYTES",
              help="Maximum size of a request body.")  # fmt: skip
@click.option("--pooling", type=click.Choice(KINDS), help="Pooling of embeddings.  [default: from the model]")
@activations_option
@cache_option
@click.option("--context", type=click.IntRange(1), help="Maximum tokens of prompt and answer.  [default: the model's]")
def serve(
    path: str,
    host: str,
    port: int,
    name: str | None,
    api_key: str | None,
    cors: tuple[str, ...],
    queue: int,
    parallel: int | None,
    max_memory: str | None,
    max_body: int,
    pooling: Kind | None,
    activations: Activations,
    cache: CacheType | None,
    context: int | None,
) -> None:
    """Serve the model at PATH over an OpenAI-compatible HTTP API: /v1/models, /v1/completions,
    /v1/chat/completions; embedding models: /v1/embeddings.

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
    from polyquant.runtime.load import load

    _check_key(api_key)
    memory = None if max_memory is None else memory_bytes(max_memory)
    address = bind(host, port)  # before the model is loaded, so that a port in use fails fast
    model = load(path, activations=activations, cache=cache, context=context)
    engine = Engine(model, pooling, parallel=parallel, memory=memory)
    access = Access(api_key, _hosts(address), cors, max_body)
    identity = name or _identity(path)
    notes = (*model.checkpoint.notes, *model.tokenizer.notes, *(model.recommended.notes if engine.generates else ()))
    say_some(notes, "note: ", err=True)
    if engine.defaults:
        values = ", ".join(
            f"{name} {value:.4g}" for name, value in engine.defaults.items() if name != "repetition_window"
        )
        say(f"sampling defaults from {model.recommended.origin}: {values}; requests override them", err=True)
    if not address.loopback:
        _warn(address, api_key)

    def ready() -> None:
        say(f"serving {printable(identity)} at {address.url}/v1")

    run(engine, identity, address, access, queue=queue, on_ready=ready)


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
