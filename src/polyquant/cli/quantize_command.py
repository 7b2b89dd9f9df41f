"""polyquant quantize"""

from __future__ import annotations

from typing import Any

import click

from polyquant.cli.conversion_options import conversion_options
from polyquant.cli.grouped import GroupedCommand


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  polyquant quantize hf-folder/ model.gguf                     # q4_k_m
  polyquant quantize hf-folder/ model.gguf --recipe q5_k_m
  polyquant quantize hf-folder/ model.gguf --rule '*ffn_down*=q6_k'
  polyquant quantize hf-folder/ model.gguf --importance imatrix.gguf
  polyquant quantize hf-folder/ out/ --to trellis-v3 --bits 3
  polyquant quantize hf-folder/ out/ --bits 3 --rule '*down_proj*=trellis.4'
  polyquant quantize hf-folder/ out/ --to msmodelslim                  # w8a16
  polyquant quantize hf-folder/ out/ --codec w8a8 --ranges ranges.json
  polyquant quantize hf-folder/ out/ --codec w8a8s --calibration text.txt
  polyquant quantize hf/ out/ --codec w8a8 --smooth m4 --calibration text.txt
  polyquant quantize hf/ out/ --codec w8a8 --kv c8 --calibration text.txt
  polyquant quantize hf/ out/ --codec w8a8.dynamic --keep '*down_proj'
  polyquant quantize hf/ out/ --codec w8a16 --effort max --calibration t.txt
  polyquant quantize hf-folder/ s3://bucket/model.gguf""",
)
@conversion_options
def quantize(**options: Any) -> None:
    """Quantize SRC. Without --recipe, --codec or --bits: q4_k_m for GGUF, 4 bits for Trellis, w8a16 for msModelSlim."""
    from polyquant.cli.conversion import run_conversion

    run_conversion(shrink=True, **options)
