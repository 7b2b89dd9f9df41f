"""polyquant recipes"""

from __future__ import annotations

import click

from polyquant.analysis.catalogue import recipes as listed_recipes
from polyquant.cli.console import json_option, show_records


@click.command(
    epilog="""\b
Examples:
  polyquant recipes
  polyquant quantize model/ model.gguf --recipe q4_k_m""",
)
@json_option
def recipes(style: str) -> None:
    """List the built-in recipes: the codec of most matrices, the others, and the size of an 8B Llama 3.

    A recipe assigns a codec to each tensor. A .toml file of the same form can be used instead of a name.
    """
    every = listed_recipes()
    rows = (
        (info.name, f"{info.bpw:.2f}", info.base, ", ".join(n for n in info.codecs if n != info.base) or "-")
        for info in every
    )
    columns = ("=recipe", ">bits per weight", "=most matrices", "others")
    show_records(every, style, columns, rows, [f"{len(every)} recipes; bits per weight of an 8B Llama 3"])
