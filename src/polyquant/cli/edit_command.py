"""polyquant edit"""

from __future__ import annotations

import click

from polyquant.cli.source_type import SOURCE
from polyquant.cli.terminal import say
from polyquant.errors import PlanError, printable
from polyquant.formats.gguf.edit import edit as run
from polyquant.formats.gguf.settings import parse_setting
from polyquant.types import Meta


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
    """Change the metadata of a GGUF FILE. Tensor data is never touched."""
    if not (settings or remove or rename or rename_tensor):
        raise click.UsageError("nothing to do: give --set, --remove, --rename or --rename-tensor")
    changes: dict[str, Meta | str] = dict(parse_setting(s) for s in settings)
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


def _pairs(texts: tuple[str, ...]) -> dict[str, str]:
    """Parse OLD=NEW arguments. Raises PlanError."""
    pairs = {}
    for text in texts:
        old, sign, new = text.partition("=")
        if not (old and sign and new):
            raise PlanError(f"expected OLD=NEW, got '{text}'")
        pairs[old] = new
    return pairs
