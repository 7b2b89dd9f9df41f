"""polyquant embed: stdout holds the vectors and nothing else."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import click
import numpy as np

from polyquant.architectures.pooling import KINDS, Kind
from polyquant.cli.console import activations_option, as_json
from polyquant.cli.option_flags import source_option
from polyquant.cli.terminal import say, say_some
from polyquant.errors import InputError
from polyquant.runtime.embed import resolved_pooling, text_ids, vectors
from polyquant.runtime.load import load
from polyquant.runtime.text import read_text
from polyquant.types import F32

_LOADING = ("activations", "threads", "context", "ternary_layout", "tile")
"""Options that are `load`'s."""


@click.command(
    epilog="""\b
Examples:
  polyquant embed bge-small-en-v1.5/ "a cat" "a small feline"
  polyquant embed model.gguf --file lines.txt --format npy --output out.npy
  polyquant embed m.gguf "a cat" --format json | jq .embeddings[].embedding
  polyquant embed bert-base-uncased/ "a cat" --pooling mean --normalize
\b
Python:
  vectors = polyquant.load("model.gguf").embed(["a cat", "a small feline"])""",
)
@click.argument("path", metavar="MODEL", type=click.Path())
@click.argument("texts", metavar="[TEXT]...", nargs=-1)
@click.option("--file", type=click.Path(), help="A UTF-8 file with a text on each line.")
@click.option(
    "--pooling", type=click.Choice(KINDS), help="How a text's tokens become one vector.  [default: the model's own]"
)
@click.option("--normalize/--no-normalize", default=None,
              help="Bring vectors to length 1.  [default: as the model says; a GGUF file cannot: yes]")  # fmt: skip
@click.option("--format", "style", type=click.Choice(["text", "json", "npy"]), default="text", show_default=True,
              help="A line of numbers for each text, JSON, or a NumPy array.")  # fmt: skip
@click.option("--output", metavar="FILE", type=click.Path(), help="Write there instead of stdout; npy needs it.")
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
@activations_option
@click.option("--threads", type=click.IntRange(1, 256), help="Of the native kernels.  [default: one a processor]")
@click.option("--context", type=click.IntRange(1), help="Most tokens of a text.  [default: the model's]")
@source_option("ternary_layout")
@source_option("tile")
def embed(
    path: str,
    texts: tuple[str, ...],
    file: str | None,
    pooling: Kind | None,
    normalize: bool | None,
    style: str,
    output: str | None,
    overwrite: bool,
    **options: Any,
) -> None:
    """Vectors of texts by the embedding model MODEL (a GGUF file or a Hugging Face folder), pooled and normalized as it says."""
    if bool(texts) == (file is not None):
        raise click.UsageError("give texts, or a file of them with --file")
    if style == "npy" and output is None:
        raise click.UsageError("--format npy needs --output FILE")
    if output is not None and not overwrite and os.path.lexists(output):
        raise InputError("exists already", file=output, hint="--overwrite replaces it")
    words = list(texts) if file is None else _lines(file)
    model = load(path, **{k: options[k] for k in _LOADING})
    how = resolved_pooling(model, pooling, normalize)
    ids = [text_ids(model, text) for text in words]
    found = np.stack(list(vectors(model, ids, how)))
    say_some((*model.checkpoint.notes, *model.tokenizer.notes), "note: ", err=True)
    if style == "json":
        rows = [
            {"text": text, "tokens": len(tokens), "embedding": _numbers(vector)}
            for text, tokens, vector in zip(words, ids, found, strict=True)
        ]
        value = {"pooling": how.kind, "normalized": how.normalize, "dimensions": found.shape[1], "embeddings": rows}
        if output is None:
            as_json(value)
        else:
            _write(output, json.dumps(value).encode() + b"\n")
    elif output is None:
        for vector in found:
            say(_line(vector))
    else:
        _write(output, _npy(found) if style == "npy" else "".join(f"{_line(v)}\n" for v in found).encode())


def _lines(file: str) -> list[str]:
    """The texts of a file. Raises InputError for a line without one."""
    lines = [line.removesuffix("\r") for line in read_text(file).removesuffix("\n").split("\n")]
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise InputError(f"line {number} is empty", file=file, expected="a text on each line")
    return lines


def _numbers(vector: F32) -> list[float]:
    """As few digits as tell a float32 from its neighbours."""
    return [float(str(x)) for x in vector]


def _line(vector: F32) -> str:
    return " ".join(str(x) for x in vector)


def _npy(found: F32) -> bytes:
    """A NumPy file of float32 [n, hidden]."""
    held = io.BytesIO()
    np.save(held, found)
    return held.getvalue()


def _write(output: str, data: bytes) -> None:
    """The file appears when it is whole."""
    target = Path(output)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
