"""`convert` and `quantize`: print the plan, run it, print the report."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from polyquant.capabilities import FitsInputs, WithBits
from polyquant.cli.console import (
    as_json,
    decibel,
    paragraph,
    progress,
    size,
    table,
    watcher,
)
from polyquant.cli.profile_table import print_profile, profile_json
from polyquant.cli.slow_engine import note_slow_engine
from polyquant.cli.terminal import say, say_some
from polyquant.conversion.convert import check_disk, convert, guess_format, plan, smaller
from polyquant.conversion.execute import Engine, memory_limit, refuse_shared
from polyquant.conversion.report import Report, StepReport, errors_of
from polyquant.conversion.steps import Plan
from polyquant.conversion.tasks import Part, cost, parse_part, shares
from polyquant.errors import PolyquantError, listed, printable
from polyquant.formats.existing import refuse_existing, refuse_overlap, refuse_target
from polyquant.storage.locations import located
from polyquant.storage.phases import phase, profiled
from polyquant.types import Action

_COMPUTED = (Action.QUANTIZE, Action.DEQUANTIZE, Action.REQUANTIZE)


def run_conversion(
    *, src: str, dst: str, to: str | None, rules: tuple[str, ...], dry_run: bool, overwrite: bool, resume: Any,
    threads: int | None, no_measure: bool, max_memory: str | None, part: str | None, engine: str | None,
    workers: int | None, address: str | None, lease: float | None, style: str, profile: bool = False,
    shrink: bool = False, **options: Any,
) -> None:  # fmt: skip
    """Plan, print, and convert unless it is a dry run. shrink: quantize even if no option selects a codec.

    profile: print where the time went.
    """
    began = perf_counter()
    if profile and (dry_run or engine is not None):
        raise click.UsageError("--profile needs a conversion in this process: omit --dry-run and --engine")
    target = located(dst)
    share = parse_part(part) if part is not None else None
    on_engine = _engine(engine, part, {"--workers": workers, "--address": address, "--lease": lease}, threads or 1)
    refuse_shared(target, share, on_engine)
    if dry_run:  # which writes nothing, so what exists there stops the run alone
        refuse_overlap(target, located(src))
    else:
        refuse_target(target, located(src), overwrite=overwrite)
    with ExitStack() as stack:
        phases = stack.enter_context(profiled()) if profile else None
        with phase("plan"):
            conversion = planned(src, target, to, shrink=shrink, rules=rules, **options)
        made = _converted(
            conversion, target, share, on_engine, dry_run=dry_run, overwrite=overwrite, resume=resume, threads=threads,
            measure=not no_measure, max_memory=max_memory, command=part_command(sys.argv, part), style=style,
        )  # fmt: skip
    if made is None:
        return
    seconds = perf_counter() - began
    if style == "json":
        as_json(made.to_json() | ({} if phases is None else {"profile": profile_json(phases, seconds)}))
        return
    print_report(made, share)
    if phases is not None:
        print_profile(phases, seconds)


def _converted(
    conversion: Plan, target: Path, share: Part | None, engine: Engine | None, *, dry_run: bool, overwrite: bool,
    resume: Any, threads: int | None, measure: bool, max_memory: str | None, command: str, style: str,
) -> Report | None:  # fmt: skip
    """Print the plan and convert; None after a dry run."""
    if style == "human":
        print_plan(conversion, steps=dry_run)
        if share is not None:
            print_share(conversion, share)
    if dry_run:
        refused = _refusals(conversion, target, overwrite, max_memory)
        if style == "json":
            as_json({**plan_json(conversion), "refused": refused})
        else:
            say_some(refused, "without --dry-run this is refused: ")
        return None
    if any(s.action in _COMPUTED for s in conversion.steps):
        note_slow_engine()
    with progress("converting") as tell:
        return convert(
            conversion,
            target,
            resume=resume,
            overwrite=overwrite,
            threads=threads,
            measure=measure,
            max_memory=max_memory,
            part=share,
            command=command,
            engine=engine,
            on_progress=watcher(tell),
        )


def planned(src: str, target: Path, to: str | None, *, shrink: bool = False, **options: Any) -> Plan:
    """Plan a conversion, with progress. to: None to guess the format. shrink: quantize even if no option selects a
    codec.
    """
    to = to or guess_format(target, src, **options)
    if shrink:
        options = smaller(to, options)
    with progress("measuring", "tensors/s", 1) as tell:
        return plan(src, to, on_tensor=tell, **options)


def _engine(name: str | None, part: str | None, options: Mapping[str, Any], threads: int) -> Engine | None:
    """The engine of the options. Raises click.UsageError for options that need one, or contradict it."""
    if name is None:
        for flag in (flag for flag, value in options.items() if value is not None):
            raise click.UsageError(f"{flag} needs --engine")
        return None
    if part is not None:
        raise click.UsageError("--engine and --part are mutually exclusive")
    return Engine(name, options["--workers"], threads, options["--address"], options["--lease"])


def part_command(argv: list[str], part: str | None) -> str:
    """The command that makes a part, from the one that is running: its --part becomes {part}."""
    if part is None:
        return ""
    words = ["polyquant"]
    for before, word in pairwise(argv):
        option = "--part=" if word.startswith("--part=") else ""
        words.append(f"{option}{{part}}" if option or before == "--part" else shlex.quote(word))
    return " ".join(words)


def print_share(made: Plan, part: Part) -> None:
    """Print the share of one part of a plan."""
    parts = shares(made, part.count)
    tasks = parts[part.number - 1]
    share = cost(made, tasks) / max(1, sum(cost(made, p) for p in parts))
    plural = "" if len(tasks) == 1 else "s"
    what = f"{len(tasks)} tensor{plural}, {size(sum(t.nbytes for t in tasks))}, {100 * share:.1f} % of the work"
    say(f"part {part.number} of {part.count}: {what}")


def _refusals(conversion: Plan, target: Path, overwrite: bool, max_memory: str | None) -> list[str]:
    """Reasons why the run would be refused: an existing target, a missing folder, too little disk space or memory."""
    try:
        refuse_existing(target, overwrite=overwrite)
        check_disk(conversion, target)
        memory_limit(conversion, max_memory, target)
    except PolyquantError as problem:
        return [str(problem)]
    return []


def plan_json(made: Plan) -> dict[str, Any]:
    """The plan as JSON-compatible values."""
    return {
        "to": made.format,
        "recipe": made.recipe.name,
        "bytes": made.nbytes,
        "bpw": made.bpw,
        "quantized_bpw": made.quantized_bpw,
        "method": made.method,
        "working_memory": made.working_memory,
        "peak_memory": made.peak_memory,
        "warnings": list(made.warnings),
        "files": {f.name: f.size for f in made.layout.files},
        "dropped": dict(made.translation.dropped),
        "steps": [
            {
                "source": s.map.origin,
                "target": s.map.target,
                "shape": list(s.map.shape),
                "action": s.action.value,
                "from": str(s.source),
                "to": str(s.target),
                "bytes": s.nbytes,
                "why": s.why,
            }
            for s in made.steps
        ],
    }


def print_plan(made: Plan, *, steps: bool) -> None:
    """Print the plan: every step (dry run), or only the summary."""
    if steps:
        t = table("tensor", "from", "to", "action", ">size", ">bpw", "why")
        for s in made.steps:
            t.add_row(
                printable(s.map.target),
                str(s.source or "-"),
                str(s.target),
                s.action.value,
                size(s.nbytes),
                f"{8 * s.nbytes / max(1, s.weights):.2f}",
                printable(s.why),
            )
        t.show()
    actions = ", ".join(f"{n} {a.value}" for a, n in made.actions.items())
    quantized = [f"{made.method}: quantized weights at {made.quantized_bpw:.3f} bits each"] if made.method else []
    paragraph(
        f"plan: {made.format}, {printable(made.recipe.name)}",
        actions,
        f"exactly {made.nbytes:,} bytes ({size(made.nbytes)}), {made.bpw:.3f} bits per weight",
        *quantized,
        f"working memory about {size(made.working_memory)}, peak about {size(made.peak_memory)}",
    )
    kept = [s.map.target.removesuffix(".weight") for s in made.steps if s.why.startswith("--keep")]
    if kept:
        say(f"kept as floats: {listed(kept, 20)}")
    for name, why in list(made.translation.dropped.items())[:5]:
        say(f"left out: {printable(name)}: {printable(why)}")
    say_some(made.warnings, "warning: ")
    if getattr(made.options, "target_bpw", None) is not None:
        print_allocation(made)


def print_allocation(made: Plan) -> None:
    """Print the bits of the quantized weights: a row per layer, a column per matrix."""
    bits: dict[str, dict[str, str]] = {}
    for s in made.steps:
        if isinstance(s.target, FitsInputs) and isinstance(s.target, WithBits):
            layer, _, rest = re.sub(r"(\d+)\.", r"\1 ", s.map.target, count=1).partition(" ")
            column = rest.removesuffix(".weight").rpartition(".")[2].removesuffix("_proj") if rest else "weight"
            bits.setdefault(layer, {})[column] = str(s.target.bits)
    columns = list(dict.fromkeys(c for layer_bits in bits.values() for c in layer_bits))
    t = table("bits", *(f">{printable(c)}" for c in columns))
    for layer, layer_bits in bits.items():
        t.add_row(printable(layer), *(layer_bits.get(c, "-") for c in columns))
    t.show()


_MERGED = 4
"""Equal notes from which on they are printed as one."""


def _notes(report: Report) -> list[str]:
    """The notes of the steps without duplicates; the same note on many tensors becomes one line."""
    tensors_by_note: dict[str, dict[str, str]] = {}  # note without the tensor's name -> tensor -> note
    for s in report.steps:
        if s.note:
            tensors_by_note.setdefault(s.note.removeprefix(f"{s.tensor}: "), {})[s.tensor] = s.note
    out: list[str] = []
    for what, by_tensor in tensors_by_note.items():
        notes = list(dict.fromkeys(by_tensor.values()))
        out += [f"{len(notes)} tensors {what} (first: {next(iter(by_tensor))})"] if len(notes) >= _MERGED else notes
    return out


def print_report(report: Report, part: Part | None = None) -> None:
    """Print tensors, bytes and error per codec, then the total. part: the report is of this part."""
    t = table("action", ">tensors", ">size", ">SNR dB", ">rel. RMSE")
    groups: dict[tuple[str, str, str], list[StepReport]] = {}
    for s in report.steps:
        groups.setdefault((s.action, s.source, s.target), []).append(s)
    for (action, source, target), steps in groups.items():
        what = f"copy {source}" if action == "copy" else f"{action} {source} > {target}"
        e = errors_of(steps)
        row = [decibel(e["snr_db"]), f"{e['rrmse']:.5f}"] if e else ["", ""]
        t.add_row(what, str(len(steps)), size(sum(s.nbytes for s in steps)), *row)
    t.show()
    say_some(_notes(report))
    rate = report.nbytes / max(report.seconds, 1e-9)
    wrote = f"{report.nbytes:,} bytes in {report.seconds:.1f} s ({size(rate)}/s)"
    if part is None:
        say(f"wrote {printable(report.path)}: {wrote}")
    else:
        say(f"part {part.number} of {part.count} is complete: {wrote}")
        say(f"when all parts are: polyquant merge {printable(report.path)}")
