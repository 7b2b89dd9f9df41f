"""polyquant sweep"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polyquant.cli.completing import candidates
from polyquant.cli.console import as_json, paragraph, progress, size, table
from polyquant.cli.source_type import SOURCE
from polyquant.cli.terminal import say, say_some
from polyquant.errors import PolyquantError, UnsupportedError, printable

if TYPE_CHECKING:
    from polyquant.analysis.sweep.results import Sweep
    from polyquant.analysis.sweep.run import Outlook
    from polyquant.analysis.sweep.trials import Trial

_UNITS = {"": 1, "s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}


class _Duration(click.ParamType[float]):
    """A time: "2h", "90min", "45s", or seconds."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)\s*(s|m|min|h|d|)", str(value).strip().lower())
        if match is None or not float(match[1]):
            self.fail(f"'{printable(value)}' is not a time; write 2h, 90min or 45s", param, ctx)
        return float(match[1]) * _UNITS[match[2]]


@click.command(
    epilog="""\b
Examples:
  polyquant sweep hf-folder/ --text wiki.test.raw -o report.html
  polyquant sweep hf/ --text wiki.raw --recipes q4_k_m,iq4_xs,trellis:3
  polyquant sweep hf/ --text wiki.raw --bpw 2.5..5 --bpw-step 0.25
  polyquant sweep hf/ --text wiki.raw --max-time 2h --max-disk 20GB
  polyquant sweep hf/ --text wiki.raw --max-kl 0.02 --min-speed 10
  polyquant sweep hf-folder/ --text wiki.test.raw --dry-run""",
)
@click.argument("src", type=SOURCE)
@click.option("--text", required=True, type=click.Path(), metavar="FILE", help="UTF-8 text, not seen in training.")
@click.option(
    "--recipes", multiple=True, metavar="LIST", shell_complete=candidates,
    help="Candidates, separated by commas: recipes (q4_k_m), codecs (w8a16), FORMAT:BITS (trellis:3, trellis:2.5), "
    "each with options (trellis:3:effort=max).  [default: a ladder for the model's size]",
)  # fmt: skip
@click.option("--bpw", metavar="LOW..HIGH", help="Also these target sizes in bits per weight, allocated per tensor.")
@click.option(
    "--bpw-step", type=click.FloatRange(0.01), default=0.5, show_default=True, metavar="X", help="Step of --bpw."
)
@click.option(
    "--work", type=click.Path(), metavar="DIR",
    help="Folder of candidates and results; the same command resumes.  [default: SRC's name with -sweep]",
)  # fmt: skip
@click.option(
    "--keep", type=click.Choice(["all", "efficient", "none"]), default="efficient", show_default=True,
    help="Candidates to keep. efficient: those that no other one beats in size and divergence.",
)  # fmt: skip
@click.option("--max-time", type=_Duration(), help="Stop in time, e.g. 2h or 90min; the same command resumes.")
@click.option(
    "--max-disk", metavar="SIZE", help="Limit of the work folder, e.g. 20GB.  [default: 90 % of the free space]"
)
@click.option(
    "--tokens", type=click.IntRange(2), default=8192, show_default=True, metavar="N", help="Use the first N tokens."
)
@click.option("--context", type=click.IntRange(4), metavar="N", help="Tokens per window.  [default: at most 512]")
@click.option("--calibration", type=click.Path(), metavar="FILE", help="Text for the formats that calibrate.")
@click.option("--importance", type=click.Path(), metavar="FILE", help="Importance matrix for the other formats.")
@click.option("--requantize", is_flag=True, help="Allow requantizing a source that is already quantized.")
@click.option("--threads", type=click.IntRange(1, 256), help="[default: all cores]")
@click.option(
    "--max-kl", type=click.FloatRange(0, min_open=True), default=0.05, show_default=True, metavar="X",
    help="Recommend only candidates with at most this mean KL divergence.",
)  # fmt: skip
@click.option("--max-size", metavar="SIZE", help="Recommend only candidates up to this size.")
@click.option("--min-speed", type=click.FloatRange(0), metavar="X", help="Recommend only those with X tokens/s.")
@click.option("--restart", is_flag=True, help="Discard the results in --work.")
@click.option("--dry-run", is_flag=True, help="Print the plan with expected sizes and times, and stop.")
@click.option("-o", "--output", type=click.Path(), metavar="FILE", help="Also write a page with charts.")
@click.option("--overwrite", is_flag=True, help="Replace an existing page, also in a new sweep.")
@click.option(
    "--format", "style", type=click.Choice(["human", "json", "csv"]), default="human", show_default=True,
    help="Human-readable, JSON or CSV output.",
)  # fmt: skip
def sweep(
    src: str, work: str | None, recipes: tuple[str, ...], dry_run: bool, output: str | None, overwrite: bool,
    style: str, **options: Any,
) -> None:  # fmt: skip
    """Find the best format of SRC for this machine: quantize it in many ways, and measure each: size, perplexity,
    divergence from SRC, tokens per second, memory.

    SRC is a local model, usually a Hugging Face folder. Finished steps are never repeated: after a stop at any point
    the same command resumes.
    """
    from polyquant.analysis.sweep.folder import begun
    from polyquant.analysis.sweep.run import outlook, run
    from polyquant.cli.slow_engine import note_slow_engine

    names = [name.strip() for words in recipes for name in words.split(",") if name.strip()]
    folder = work if work is not None else f"{Path(src).absolute().name.removesuffix('.gguf')}-sweep"
    overwrite = overwrite or begun(Path(folder))  # the same command resumes, and replaces its page
    wanted = _checked_output(output, overwrite) if not dry_run else None
    made = outlook(src, work=folder, recipes=names, **options)
    if dry_run and style == "json":
        as_json(made.to_json())
        return
    if style == "human" or dry_run:
        _print_outlook(made)
    if dry_run:
        return
    note_slow_engine()
    watch = _screen(len(made.made), err=style != "human")
    try:
        with watch.stack:
            result = run(made, watch)
    except (PolyquantError, OSError, KeyboardInterrupt) as stop:
        if not isinstance(stop, PolyquantError):
            stop.add_note("the same command resumes")
        raise
    if style == "json":
        as_json(result.to_json())
    elif style == "csv":
        _print_csv(result)
    else:
        _print(result)
    if wanted is not None:
        nbytes = result.write_report(wanted, overwrite=overwrite)
        say(f"{printable(wanted)}: {size(nbytes)}, open it in a browser", err=style != "human")
    if not any(t.status == "measured" for t in result.trials):
        sys.exit(1)


def _checked_output(output: str | None, overwrite: bool) -> Path | None:
    """The page to write; None without one, or without the packages, which is printed before hours of work."""
    from polyquant.analysis.report.drawing import require_packages
    from polyquant.analysis.report.page import refuse_existing

    if output is None:
        return None
    refuse_existing(Path(output), overwrite=overwrite)
    try:
        require_packages()
    except UnsupportedError as missing:
        say(f"polyquant: no page will be written: {missing}", err=True)
        return None
    return Path(output)


def _print_outlook(made: Outlook) -> None:
    """Print the candidates with their expected sizes and times."""
    from polyquant.cli.plan_command import duration

    seen = made.inspection
    paragraph(
        f"sweep of {printable(made.source)}",
        f"{seen.weights:,} weights, {size(seen.nbytes)}, {seen.bpw:.2f} bits per weight",
        f"{len(made.requested)} candidate{'s' if len(made.requested) > 1 else ''}, about {duration(made.seconds)}",
        f"at most about {size(made.disk)} in {printable(made.work)}",
    )
    t = table("candidate", ">about", ">to make", ">to measure", "refused")
    for f in made.made:
        cells = ["", "", ""] if f.refused else [size(f.nbytes), duration(f.convert), duration(f.measure)]
        t.add_row(f.candidate.name, *cells, printable(f.refused, 200))
    t.show()
    say()


def _screen(count: int, *, err: bool) -> Any:
    """A watch that prints one line per trial, with a progress bar in between."""
    from polyquant.analysis.sweep.run import Watch

    class Screen(Watch):
        def __init__(self) -> None:
            self.stack, self.done = ExitStack(), 0
            self._tell: Callable[[int, int, str], None] | None = None

        def progress(self, name: str, what: str, done: int, total: int) -> None:
            if self._tell is None:
                self._tell = self.stack.enter_context(progress("sweep", "%", 10))
            self._tell(1000 * done // max(1, total), 1000, f"{name}, {what}")

        def finished(self, trial: Trial, seconds: float) -> None:
            self.stack.close()
            self._tell = None
            say(f"[{self.done}/{count}] {_line(trial)} ({seconds:.0f} s)", err=err)
            self.done += 1

        def note(self, text: str) -> None:
            say(f"note: {text}", err=True)

    return Screen()


def _line(trial: Trial) -> str:
    """One line about a trial."""
    from polyquant.analysis.sweep.advice import per_second

    if trial.status != "measured" or trial.speed is None or trial.perplexity is None:
        return f"{printable(trial.name)}: {trial.status}: {printable(trial.reason, 100)}"
    parts = [size(trial.nbytes or 0), f"perplexity {trial.perplexity.value:.4g}"]
    parts += [f"KL {trial.kl:.4f}"] if trial.kl is not None else []
    parts += [f"{per_second(trial.speed.decode)} tokens/s", f"{size(trial.speed.memory)} memory"]
    return f"{printable(trial.name)}: {', '.join(parts)}"


def _print(result: Sweep) -> None:
    """Print the table and the recommendation."""
    named = result.efficient
    say()
    t = table("candidate", ">size", ">bpw", ">perplexity", ">KL", ">tokens/s", ">prompt/s", ">memory")
    for trial in (result.reference, *result.trials):
        name = f"{trial.name} *" if trial.name in named else trial.name
        t.add_row(name, *_cells(trial))
    t.show()
    say("* efficient: no other candidate is both smaller and closer to the source")
    say_some((f"{t.name}: {t.reason}" for t in result.trials if t.status == "failed"), "failed: ")
    say_some((f"{t.name}: {t.reason}" for t in result.trials if t.status == "skipped"), "skipped: ")
    if result.disturbed:
        say("warning: ", result.disturbed)
    say()
    chosen = result.recommended
    say("recommended: " if chosen is not None else "", result.advice.sentence)
    if chosen is not None:
        say(f"  {printable(chosen.path)}" if chosen.path is not None else f"  {printable(chosen.command, 600)}")


def _cells(trial: Trial) -> list[str]:
    """The figures of a trial."""
    speed, perplexity = trial.speed, trial.perplexity
    if speed is None or perplexity is None:
        return [size(trial.nbytes) if trial.nbytes else "", "", "", trial.status, "", "", ""]
    return [
        size(trial.nbytes or 0),
        f"{trial.bpw:.3f}",
        f"{perplexity.value:.4f}" if perplexity.value < 1000 else f"{perplexity.value:.4g}",
        f"{trial.kl:.5f}" if trial.kl is not None else "",
        f"{speed.decode:.1f}",
        f"{speed.prompt:.0f}",
        size(speed.memory),
    ]


def _print_csv(result: Sweep) -> None:
    """Print a header and a row per trial."""
    out = io.StringIO()
    rows = result.rows()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: printable(v, 600) if isinstance(v, str) else v for k, v in row.items()} for row in rows)
    for line in out.getvalue().splitlines():
        say(line)
