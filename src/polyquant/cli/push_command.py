"""polyquant push"""

from __future__ import annotations

import click

from polyquant.analysis.push import CARD, prepare_push
from polyquant.analysis.push import push as run
from polyquant.cli.console import as_json, json_option, size, table
from polyquant.cli.source_type import SOURCE
from polyquant.cli.terminal import say
from polyquant.errors import listed, printable


@click.command(
    epilog="""\b
Examples:
  polyquant push quantized/ hf://org/model --dry-run
  polyquant push model.gguf hf://org/model --base-model org/original
  polyquant quantize hf-folder/ q4.gguf --format json > report.json
  polyquant push q4.gguf hf://org/model-gguf --report report.json""",
)
@click.argument("path", type=click.Path())
@click.argument("target", metavar="HF_URL", type=SOURCE)
@click.option("--base-model", metavar="ORG/NAME", help="The model that this one was made from, for the card.")
@click.option("--report", type=click.Path(), metavar="FILE", help="Report of the conversion (--format json): errors.")
@click.option("--private", is_flag=True, help="Make a repository that does not exist yet private.")
@click.option("--overwrite", is_flag=True, help="Replace files of the repository that have other content.")
@click.option("--dry-run", is_flag=True, help="Show the card and the files; send nothing.")
@json_option
def push(
    path: str,
    target: str,
    base_model: str | None,
    report: str | None,
    private: bool,
    overwrite: bool,
    dry_run: bool,
    style: str,
) -> None:
    """Upload the model at PATH, with a model card, to a repository of the hub (hf://org/name), in one commit."""
    if dry_run:
        made = prepare_push(path, target, base_model=base_model, report=report)
    else:
        made = run(path, target, base_model=base_model, report=report, overwrite=overwrite, private=private)
    if style == "json":
        as_json(made.to_json())
        return
    if dry_run:
        t = table("file", ">size")
        for name, file in made.files.items():
            t.add_row(printable(name), size(file.stat().st_size))
        t.add_row(CARD, size(len(made.card.encode())))
        t.show()
        say()
        for line in made.card.splitlines():
            say(printable(line, 400))
    if made.skipped:
        say(f"not part of the model, not uploaded: {listed(made.skipped, 8)}")
    if not dry_run:
        done = f"{len(made.changed)} files" if made.changed else "nothing: the repository has all files already"
        say(f"uploaded {done}: {printable(made.url)}")
