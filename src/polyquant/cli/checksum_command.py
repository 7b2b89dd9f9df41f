"""polyquant checksum"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from polyquant.analysis.checksum import Checksums, recorded, sha256_lines
from polyquant.analysis.checksum import checksum as run
from polyquant.analysis.integrity.check import compare_tensors
from polyquant.analysis.integrity.record import record_of, refuse_folder, refuse_record
from polyquant.cli.console import as_json, json_option, progress, watcher
from polyquant.cli.option_flags import source_option
from polyquant.cli.source_type import SOURCE
from polyquant.cli.terminal import say, styled
from polyquant.errors import PlanError, printable
from polyquant.findings import Finding, Severity
from polyquant.storage.one_file import write_file

_SHOWN = 5


@click.command(
    epilog="""\b
Examples:
  polyquant checksum model.gguf && polyquant validate model.gguf
  polyquant checksum hf-folder/ --against model.gguf
  polyquant checksum hf-folder/ --sha256 > SHA256SUMS""",
)
@click.argument("path", type=SOURCE)
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    metavar="FILE",
    help="Write to FILE.  [default: polyquant-checksums.json in a folder, NAME.checksums.json next to a file]",
)
@click.option("--overwrite", is_flag=True, help="Replace existing checksums.")
@click.option(
    "--against",
    type=SOURCE,
    metavar="B",
    help="Compare the weights with another model or a file of checksums. Written only with -o.",
)
@click.option("--sha256", is_flag=True, help="Only hash files: print lines for sha256sum, or write them with -o.")
@click.option("--threads", type=click.IntRange(1, 256), help="Number of threads.  [default: all cores]")
@source_option("ternary_layout")
@source_option("tile")
@json_option
def checksum(
    path: str,
    output: str | None,
    overwrite: bool,
    against: str | None,
    sha256: bool,
    threads: int | None,
    ternary_layout: str | None,
    tile: tuple[int, int, int] | None,
    style: str,
) -> None:
    """Write digests of the tensors and files of PATH, which validate checks.

    The digest of a tensor covers its values or codes, not the container: the same weights in another format have the
    same digest. Exit 0: done, or equal to B; 1: not equal to B; 2: cannot be read.
    """
    if sha256 and against is not None:
        raise click.UsageError("--sha256 and --against are mutually exclusive")
    if sha256:
        _list(path, output, threads)
        return
    writes = output is not None or (against is None and style != "json")
    target = record_of(path) if output is None else Path(output)
    if writes:
        refuse_record(target, overwrite=overwrite)
    with progress("hashing") as tell:
        result = run(path, threads=threads, on_progress=watcher(tell), ternary_layout=ternary_layout, tile=tile)
    if writes:
        result.write(target, overwrite=overwrite)
    if against is None:
        if style == "json":
            as_json(result.to_json())
        else:
            say(f"content  {result.content}")
            files = "1 file" if len(result.files) == 1 else f"{len(result.files)} files"
            say(f"{len(result.tensors)} tensors, {files}")
    else:
        with progress("hashing") as tell:
            other = recorded(
                against, threads=threads, on_progress=watcher(tell), ternary_layout=ternary_layout, tile=tile
            )
        equal = _compare(result, other, style)
    if writes and style != "json":
        say(f"wrote {printable(target)}")
    if against is not None and not equal:
        sys.exit(1)


def _compare(result: Checksums, other: Checksums, style: str) -> bool:
    """Print the differences between two models. True if all weights are equal."""
    findings = list(compare_tensors(other.tensors, result.tensors, stored=False))
    differing = [f for f in findings if f.severity is not Severity.NOTE]
    if style == "json":
        as_json({
            "equal": not differing, "content": result.content, "against": other.content,
            "equal_tensors": _equal(result, differing), "renamed": len(findings) - len(differing),
            "findings": [{"code": f.code, "tensor": f.tensor, "message": f.message} for f in differing],
        })  # fmt: skip
        return not differing
    renamed = f", {len(findings) - len(differing)} of them under other names" if len(findings) > len(differing) else ""
    for f in differing[:_SHOWN]:
        say(styled(f"{f.code} {f.severity.value}", fg="red"), f" {printable(f.tensor)}: {printable(f.message, 400)}")
    if len(differing) > _SHOWN:
        say(f"{len(differing) - _SHOWN} more")
    if differing and renamed:
        say("converted models have permuted rows and other types: `polyquant certify` compares their values")
    say(f"{_equal(result, differing)} of {len(result.tensors)} tensors are equal{renamed}")
    if not differing:
        say(styled("equal", fg="green"), f": {printable(result.path)} and {printable(other.path)}")
    return not differing


def _equal(result: Checksums, differing: list[Finding]) -> int:
    return len(result.tensors) - len({f.tensor for f in differing} & set(result.tensors))


def _list(path: str, output: str | None, threads: int | None) -> None:
    """Print SHA-256 lines, or write them to a file that does not exist."""
    if output is not None and refuse_folder(Path(output)):
        raise PlanError("target exists", file=output, hint="choose another name")
    with progress("hashing") as tell:
        text = sha256_lines(path, threads=threads, on_progress=watcher(tell))
    if output is not None:
        write_file(Path(output), text.encode("utf-8", "surrogateescape"), overwrite=False)
        say(f"wrote {printable(output)}")
        return
    for line in text.splitlines():
        say(line)
