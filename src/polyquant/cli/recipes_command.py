"""polyquant recipes"""

from __future__ import annotations

from dataclasses import asdict

import click

from polyquant.analysis.catalogue import recipes as listed_recipes
from polyquant.cli.console import as_json, json_option, table
from polyquant.cli.terminal import say


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
    if style == "json":
        as_json([asdict(info) for info in every])
        return
    rows = table("=recipe", ">bits per weight", "=most matrices", "others")
    for info in every:
        others = ", ".join(name for name in info.codecs if name != info.base)
        rows.add_row(info.name, f"{info.bpw:.2f}", info.base, others or "-")
    rows.show()
    say(f"{len(every)} recipes; bits per weight of an 8B Llama 3")
