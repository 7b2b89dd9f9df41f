"""polyquant edit"""

from __future__ import annotations

import os

import click

from polyquant.cli.source_type import SOURCE
from polyquant.cli.terminal import say
from polyquant.errors import PlanError, PolyquantError, printable
from polyquant.formats.gguf.edit import edit as run
from polyquant.formats.gguf.settings import parse_setting
from polyquant.types import Meta, Severity


@click.command(
    epilog="""\b
Examples:
  polyquant edit model.gguf --set general.name='My model'
  polyquant edit model.gguf --set llama.context_length=8192
  polyquant edit model.gguf --remove tokenizer.chat_template
  polyquant edit model.gguf --set my.flag:bool=true --output copy.gguf
  polyquant edit model.gguf --rename general.nmae=general.name""",
)
@click.argument("file", type=SOURCE)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY[:TYPE]=VALUE",
    help="Set a key. An existing key keeps its type; a new key needs a type (str, u32, f32, bool, ...).",
)
@click.option("--remove", multiple=True, metavar="KEY", help="Remove a key.")
@click.option("--rename", multiple=True, metavar="OLD=NEW", help="Rename a key; its value is kept.")
@click.option("--rename-tensor", multiple=True, metavar="OLD=NEW", help="Rename a tensor; its data is kept.")
@click.option("--output", type=click.Path(), metavar="FILE", help="Write a copy instead of editing FILE in place.")
@click.option("--overwrite", is_flag=True, help="Allow --output to replace an existing file.")
def edit(
    file: str,
    settings: tuple[str, ...],
    remove: tuple[str, ...],
    rename: tuple[str, ...],
    rename_tensor: tuple[str, ...],
    output: str | None,
    overwrite: bool,
) -> None:
    """Change the metadata of a GGUF FILE. Tensor data is never touched; what becomes wrong is reported."""
    if not (settings or remove or rename or rename_tensor):
        raise click.UsageError("nothing to do: give --set, --remove, --rename or --rename-tensor")
    changes: dict[str, Meta | str] = dict(parse_setting(s) for s in settings)
    before = _found(file)
    done = run(
        file,
        output,
        set=changes,
        remove=remove,
        rename=_pairs(rename),
        rename_tensor=_pairs(rename_tensor),
        overwrite=overwrite,
    )
    say(f"{printable(done.path)}: {done.how}, {done.nbytes:,} bytes")
    for code, message in _found(done.path) - before:
        say(f"warning: {code} {message}; polyquant explain {code}", err=True)


def _found(path: str | os.PathLike[str]) -> set[tuple[str, str]]:
    """Code and message of each error in the headers; nothing for a file that cannot be opened."""
    from polyquant.analysis.validate import validate

    try:
        return {(f.code, printable(f.message)) for f in validate(path, headers=True) if f.severity is not Severity.NOTE}
    except (PolyquantError, OSError):
        return set()


def _pairs(texts: tuple[str, ...]) -> dict[str, str]:
    """Parse OLD=NEW arguments. Raises PlanError."""
    pairs = {}
    for text in texts:
        old, sign, new = text.partition("=")
        if not (old and sign and new):
            raise PlanError(f"expected OLD=NEW, got '{text}'")
        pairs[old] = new
    return pairs
