"""polyquant validate"""

from __future__ import annotations

import sys

import click

from polyquant.analysis import sarif
from polyquant.analysis.integrity.record import record_of
from polyquant.analysis.validate import validate as run
from polyquant.cli.completing import targets
from polyquant.cli.console import as_json, progress, watcher
from polyquant.cli.option_flags import source_option
from polyquant.cli.source_type import SOURCE
from polyquant.cli.terminal import say, styled
from polyquant.errors import PolyquantError, printable
from polyquant.types import Finding, Severity

_COLOUR = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


@click.command(
    epilog="""\b
Examples:
  polyquant validate model.gguf
  polyquant validate model.gguf --against hf-folder/
  polyquant validate hf-folder/ --target vllm --tp 4 --headers
  polyquant validate model.gguf --target ollama
  polyquant validate msmodelslim-folder/ --target vllm-ascend
  polyquant validate hf://org/model --headers         # fetches a few ranges
  polyquant validate model.gguf --format json; echo $?
  polyquant validate model.gguf --format sarif > findings.sarif""",
)
@click.argument("path", type=SOURCE)
@click.option("--against", type=SOURCE, metavar="SRC", help="Compare with the source model.")
@click.option(
    "--target",
    metavar="PROGRAM",
    shell_complete=targets,
    help="Also report what this program rejects or computes wrongly, from headers: vllm, sglang, transformers, mlx, "
    "llama.cpp or ollama; vllm-ascend, sglang or mindie for an msModelSlim folder.",
)
@click.option(
    "--tp",
    type=click.IntRange(1),
    metavar="N",
    help="With --target vllm or sglang: check also that layers divide among N GPUs.",
)
@source_option("ternary_layout")
@source_option("tile")
@click.option(
    "--checksums",
    type=SOURCE,
    metavar="FILE",
    help="Check against this file of `polyquant checksum`, or list of SHA-256 lines.  [default: those next to PATH]",
)
@click.option(
    "--headers", is_flag=True, help="Check headers and small files only; do not read the data of tensors or checksums."
)
@click.option(
    "--format",
    "style",
    type=click.Choice(["human", "json", "sarif"]),
    default="human",
    show_default=True,
    help="Human-readable, JSON or SARIF 2.1.0 output.",
)
def validate(
    path: str,
    against: str | None,
    target: str | None,
    tp: int | None,
    ternary_layout: str | None,
    tile: tuple[int, int, int] | None,
    checksums: str | None,
    headers: bool,
    style: str,
) -> None:
    """Validate PATH. Exit 0: clean (notes allowed), 1: findings, 2: cannot be read."""
    try:
        with progress("checking") as tell:
            findings = run(
                path,
                against=against,
                ternary_layout=ternary_layout,
                tile=tile,
                target=target,
                tp=tp,
                checksums=checksums,
                headers=headers,
                on_progress=watcher(tell),
            )
    except PolyquantError as problem:
        if style == "sarif":
            as_json(sarif.failed(problem))
        raise
    serious = [f for f in findings if f.severity is not Severity.NOTE]
    if style == "sarif":
        as_json(sarif.report(findings, path))
    elif style == "json":
        as_json(
            [
                {"code": f.code, "severity": f.severity.value, "tensor": f.tensor, "file": f.file, "message": f.message}
                for f in findings
            ]
        )
    else:
        _print(findings)
        if serious:
            say(f"{len(serious)} finding{'s' * (len(serious) > 1)}; polyquant explain {serious[0].code}")
        else:
            agree = not headers and (checksums is not None or record_of(path).exists())
            more = ", checksums agree" if agree else ", data not read" if headers else ""
            say(styled("sound", fg="green"), f": {printable(path)}", more)
    if serious:
        sys.exit(1)


def _print(findings: list[Finding]) -> None:
    """Print findings; equal codes are printed a few times and then counted."""
    seen: dict[str, int] = {}
    for f in findings:
        seen[f.code] = seen.get(f.code, 0) + 1
        if seen[f.code] <= 5:
            where = "".join(f" {printable(x)}:" for x in (f.file, f.tensor) if x)
            say(styled(f"{f.code} {f.severity.value}", fg=_COLOUR[f.severity]), f"{where} {printable(f.message, 400)}")
    for code, n in seen.items():
        if n > 5:
            say(f"{code}: {n - 5} more")
