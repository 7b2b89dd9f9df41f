"""polyquant embed: only vectors are printed on stdout."""

from __future__ import annotations

import io
import json
import stat
from pathlib import Path
from typing import Any

import click
import numpy as np

from polyquant.architectures.pooling import KINDS, Kind
from polyquant.cli.console import activations_option, as_json
from polyquant.cli.option_flags import source_option
from polyquant.cli.slow_engine import note_slow_engine
from polyquant.cli.source_type import SOURCE
from polyquant.cli.terminal import say, say_some
from polyquant.errors import InputError, PlanError
from polyquant.runtime.embed import resolved_pooling, text_ids, vectors
from polyquant.runtime.load import load
from polyquant.runtime.text import read_text
from polyquant.storage.claims import settle_all
from polyquant.storage.one_file import write_file
from polyquant.storage.targets import refuse_present
from polyquant.types import F32

_LOADING = ("activations", "threads", "context", "ternary_layout", "tile")
"""Options passed to `load`."""


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
@click.argument("path", metavar="MODEL", type=SOURCE)
@click.argument("texts", metavar="[TEXT]...", nargs=-1)
@click.option("--file", type=click.Path(), help="A UTF-8 file with one input per line.")
@click.option("--pooling", type=click.Choice(KINDS), help="Pooling of the token states.  [default: from the model]")
@click.option("--normalize/--no-normalize", default=None,
              help="Scale vectors to length 1.  [default: from the model; yes for GGUF files]")  # fmt: skip
@click.option("--format", "style", type=click.Choice(["text", "json", "npy"]), default="text", show_default=True,
              help="One line of numbers per input, JSON, or a NumPy array.")  # fmt: skip
@click.option("--output", metavar="FILE", type=click.Path(), help="Output file instead of stdout; required for npy.")
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
@activations_option
@click.option("--threads", type=click.IntRange(1, 256), help="Threads of the native kernels.  [default: one per core]")
@click.option("--context", type=click.IntRange(1), help="Maximum tokens per input.  [default: the model's]")
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
    """Compute embeddings with MODEL (a GGUF file or a Hugging Face folder), pooled and normalized as the model
    specifies.
    """
    if bool(texts) == (file is not None):
        raise click.UsageError("give either TEXT arguments or --file")
    if style == "npy" and output is None:
        raise click.UsageError("--format npy needs --output FILE")
    if output is not None:
        _refuse_existing(Path(output), overwrite=overwrite)
    words = list(texts) if file is None else _lines(file)
    note_slow_engine()
    model = load(path, **{k: options[k] for k in _LOADING})
    how = resolved_pooling(model, pooling, normalize)
    ids = [text_ids(model, text) for text in words]
    embeddings = np.stack(list(vectors(model, ids, how)))
    say_some((*model.checkpoint.notes, *model.tokenizer.notes), "note: ", err=True)
    if style == "json":
        rows = [
            {"text": text, "tokens": len(tokens), "embedding": _numbers(vector)}
            for text, tokens, vector in zip(words, ids, embeddings, strict=True)
        ]
        value = {
            "pooling": how.kind,
            "normalized": how.normalize,
            "dimensions": embeddings.shape[1],
            "embeddings": rows,
        }
        if output is None:
            as_json(value)
        else:
            write_file(Path(output), json.dumps(value).encode() + b"\n", overwrite=overwrite)
    elif output is None:
        for vector in embeddings:
            say(_line(vector))
    else:
        data = _npy(embeddings) if style == "npy" else "".join(f"{_line(v)}\n" for v in embeddings).encode()
        write_file(Path(output), data, overwrite=overwrite)


def _lines(file: str) -> list[str]:
    """The lines of a file. Raises InputError for an empty line."""
    lines = [line.removesuffix("\r") for line in read_text(file).removesuffix("\n").split("\n")]
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise InputError(f"line {number} is empty", file=file, expected="one input per line")
    return lines


def _numbers(vector: F32) -> list[float]:
    """The shortest decimals that identify each float32."""
    return [float(str(x)) for x in vector]


def _line(vector: F32) -> str:
    return " ".join(str(x) for x in vector)


def _npy(embeddings: F32) -> bytes:
    """A NumPy file of float32 [n, hidden]."""
    held = io.BytesIO()
    np.save(held, embeddings)
    return held.getvalue()


def _refuse_existing(target: Path, *, overwrite: bool) -> None:
    """Raise PlanError for a target that exists, or that --overwrite does not replace: a link, folder or device."""
    settle_all(target.absolute())
    refuse_present(target, overwrite=overwrite, check=_refuse_irregular)


def _refuse_irregular(target: Path) -> None:
    if not stat.S_ISREG(target.lstat().st_mode):
        raise PlanError("is not a regular file and is not overwritten", file=target, hint="choose another name")
