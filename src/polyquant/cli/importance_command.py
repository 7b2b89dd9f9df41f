"""polyquant importance"""

from __future__ import annotations

import click

from polyquant.calibration.importance import unreached_notice
from polyquant.calibration.sizes import TOKENS, WINDOWS
from polyquant.cli.console import as_json, json_option, progress, size, watcher
from polyquant.cli.slow_engine import note_slow_engine
from polyquant.cli.source_type import SOURCE
from polyquant.cli.terminal import say, say_some
from polyquant.errors import printable
from polyquant.formats.gguf.imatrix import importance as run


@click.command(
    epilog="""\b
Examples:
  polyquant importance hf-folder/ imatrix.gguf --calibration text.txt
  polyquant importance model-f16.gguf imatrix.gguf --calibration self
  polyquant quantize hf-folder/ model.gguf --importance imatrix.gguf""",
)
@click.argument("src", type=SOURCE)
@click.argument("dst", type=click.Path())
@click.option(
    "--calibration",
    required=True,
    metavar="FILE|self",
    help="Calibration text; self: text that the model generates.",
)
@click.option(
    "--windows",
    type=click.IntRange(1, 1 << 20),
    default=WINDOWS,
    show_default=True,
    help=f"Number of windows of {TOKENS} tokens, spread evenly over the text.",
)
@click.option("--overwrite", is_flag=True, help="Replace DST if it exists.")
@json_option
def importance(src: str, dst: str, calibration: str, windows: int, overwrite: bool, style: str) -> None:
    """Measure the importance of each input column of the float model SRC on a calibration text, per expert.

    DST is a file for quantize --importance and for llama.cpp.
    """
    note_slow_engine()
    with progress("measuring", "%", 1) as tell:
        done = run(
            src,
            dst,
            calibration=calibration,
            windows=windows,
            overwrite=overwrite,
            on_progress=watcher(tell),
        )
    if style == "json":
        unreached = {name: list(experts) for name, experts in done.unreached.items()}
        result = {"path": str(done.path), "bytes": done.nbytes, "tensors": done.tensors, "tokens": done.tokens}
        as_json({**result, "unreached": unreached})
        return
    if done.unreached:
        say(f"warning: {unreached_notice(done.unreached)}")
        say_some([f"{printable(n)}: expert {', '.join(map(str, e))}" for n, e in done.unreached.items()])
    say(f"wrote {printable(done.path)}: {done.tensors} tensors, {done.tokens} tokens ({size(done.nbytes)})")
