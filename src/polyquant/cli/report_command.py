"""polyquant report"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from polyquant.analysis.report.drawing import ChartProcess, require_packages
from polyquant.cli.console import progress, size
from polyquant.cli.source_type import SOURCE
from polyquant.cli.terminal import say
from polyquant.errors import printable

if TYPE_CHECKING:
    from polyquant.analysis.report.gather import Candidate


@click.command(
    epilog="""\b
Examples:
  polyquant report hf-folder/ q4.gguf q8.gguf -o report.html
  polyquant report hf-folder/ q*.gguf -o report.html --text wiki.test.raw
  polyquant report model.gguf -o report.html           # one model: its codecs""",
)
@click.argument("reference", metavar="A", type=SOURCE)
@click.argument("others", metavar="[B]...", nargs=-1, type=SOURCE)
@click.option("-o", "--output", required=True, type=click.Path(), metavar="FILE", help="The page to write.")
@click.option("--text", type=click.Path(), metavar="FILE", help="Also evaluate on this text: perplexity, divergence.")
@click.option("--tokens", type=click.IntRange(2), metavar="N", help="Use only the first N tokens of the text.")
@click.option(
    "--histograms", type=click.IntRange(0, 64), default=4, show_default=True, metavar="N",
    help="Show the weights of the N worst matrices of each model.",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace an existing report.")
def report(
    reference: str,
    others: tuple[str, ...],
    output: str,
    text: str | None,
    tokens: int | None,
    histograms: int,
    overwrite: bool,
) -> None:
    """Write a page that compares the models B with the reference A: sizes, errors by layer, findings.

    The page is one file without other resources. Needs the extra `report`.
    """
    require_packages()
    target = Path(output)
    with ChartProcess() as process:
        # Imported while the process starts.
        from polyquant.analysis.report.gather import gather
        from polyquant.analysis.report.page import MAPS, begin_charts, page, refuse_existing
        from polyquant.cli.slow_engine import note_slow_engine
        from polyquant.storage.one_file import write_file

        refuse_existing(target, overwrite=overwrite)
        if text is not None:
            note_slow_engine()

        def begin(candidate: Candidate) -> None:
            if len(others) <= MAPS:  # with more, the page shows only some
                begin_charts(candidate, process)

        with progress("comparing", "%", 10) as tell:
            found = gather(reference, others, text=text, tokens=tokens, histograms=histograms, tick=tell, seen=begin)
        content = page(found, process).encode()
    write_file(target, content, overwrite=overwrite)
    efficient = [c.label for c in found.candidates if c.label in found.efficient]
    if len(found.candidates) > 1:
        say(f"efficient: {', '.join(map(printable, efficient))}")
    say(f"{printable(target)}: {size(len(content))}, open it in a browser")
