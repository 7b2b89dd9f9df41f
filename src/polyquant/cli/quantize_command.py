"""polyquant quantize"""

from __future__ import annotations

from typing import Any

import click

from polyquant.cli.conversion import conversion_options, run_conversion


@click.command(
    epilog="""\b
Examples:
  polyquant quantize hf-folder/ model.gguf                     # q4_k_m
  polyquant quantize hf-folder/ model.gguf --recipe q5_k_m
  polyquant quantize hf-folder/ model.gguf --rule '*ffn_down*=q6_k'
  polyquant quantize hf-folder/ model.gguf --importance imatrix.gguf""",
)
@conversion_options
def quantize(**options: Any) -> None:
    """Make SRC smaller: like convert, with the recipe q4_k_m unless --recipe or --codec says otherwise."""
    if not options["codec"] and not options["recipe"]:
        options["recipe"] = "q4_k_m"
    run_conversion(**options)
