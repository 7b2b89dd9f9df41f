"""polyquant convert"""

from __future__ import annotations

from typing import Any

import click

from polyquant.cli.conversion_options import conversion_options
from polyquant.cli.grouped import GroupedCommand


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  polyquant convert hf-folder/ model.gguf               # same precision, GGUF
  polyquant convert hf-folder/ model.gguf --codec q8_0
  polyquant convert model.gguf hf-folder/ --to hf
  polyquant convert bitnet-hf/ bitnet.gguf --codec i2_s.x86 --dry-run
  polyquant convert trellis-v2/ trellis-v3/             # codes are kept
  polyquant convert trellis-v3/ floats/ --to hf --codec bf16
  polyquant convert msmodelslim/ older/ --dialect v0    # codes are kept
  polyquant convert msmodelslim/ floats/ --to hf --codec bf16
  polyquant convert hf-folder/ s3://bucket/model.gguf   # no copy on this disk""",
)
@conversion_options
def convert(**options: Any) -> None:
    """Convert SRC (GGUF file, Hugging Face, Trellis or msModelSlim folder) to DST (a path, or a URL such as s3://).

    Without --codec or --recipe the weights keep their types.
    """
    from polyquant.cli.conversion import run_conversion

    run_conversion(**options)
