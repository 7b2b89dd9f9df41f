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
  polyquant quantize hf-folder/ model.gguf --importance imatrix.gguf
  polyquant quantize hf-folder/ out/ --to trellis-v3 --bits 3
  polyquant quantize hf-folder/ out/ --bits 3 --rule '*down_proj*=trellis.4'""",
)
@conversion_options
def quantize(**options: Any) -> None:
    """Make SRC smaller: like convert; without --recipe, --codec or --bits the recipe q4_k_m, or 4 bits for a Trellis folder."""
    run_conversion(shrink=True, **options)
