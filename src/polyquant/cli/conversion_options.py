"""The options of `convert` and `quantize`: all that `--help` needs. The work is in conversion.py, imported when a
command runs.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from polyquant.cli.completing import codecs, recipes, rules
from polyquant.cli.console import json_option
from polyquant.cli.grouped import GroupedOption
from polyquant.cli.option_flags import format_names, format_options, writable
from polyquant.cli.source_type import SOURCE
from polyquant.errors import printable

__all__ = ["conversion_options", "options_of_conversions"]

F = TypeVar("F", bound=Callable[..., Any])


class _TargetName(click.ParamType[str]):
    """The name of a writable format, including those of installed packages."""

    name = "FORMAT"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return f"[{'|'.join(format_names())}|SCHEME]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        names = writable()
        if value not in names:
            near = get_close_matches(value, names, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            self.fail(f"'{printable(value)}' is not one of {', '.join(repr(n) for n in names)}.{hint}", param, ctx)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
        return [CompletionItem(name) for name in writable() if name.startswith(incomplete)]


_shared = partial(click.option, cls=GroupedOption, group="Many machines")

_OPTIONS = (
    click.option(
        "--to",
        type=_TargetName(),
        help="Target: gguf, hf, trellis-v3, msmodelslim; or a scheme of Hugging Face folders: compressed-tensors, "
        "gptq, awq, mlx, fp8, modelopt, mxfp4.  [default: gguf for *.gguf; trellis-v3 with --bits or from Trellis; "
        "msmodelslim with its codecs; else hf]",
    ),
    click.option(
        "--codec",
        metavar="NAME",
        shell_complete=codecs,
        help="One codec for every matrix: q8_0, q4_k, bf16, i2_s.x86, trellis.3.mul1.16, ...; msModelSlim: w8a16, "
        "w8a16.g128, w8a16.asym, w8a8, w8a8s, w8a8.dynamic, w8a8.mix, w4a16, ...",
    ),
    click.option(
        "--recipe",
        metavar="NAME|FILE",
        shell_complete=recipes,
        help="A mix: q4_k_m, q5_k_m, q2_k, ... or a .toml file of rules.",
    ),
    click.option(
        "--rule",
        "rules",
        multiple=True,
        metavar="GLOB=CODEC",
        shell_complete=rules,
        help="Takes precedence over the recipe; repeatable, first match wins. trellis.4 takes its window and codebook "
        "from "
        "--effort and --codebook.",
    ),
    click.option("--importance", type=click.Path(), metavar="FILE", help="Importance matrix (imatrix as a GGUF file)."),
    click.option(
        "--requantize", is_flag=True, help="Allow requantizing weights that are already quantized (loses more)."
    ),
    click.option(
        "--allow-unknown", is_flag=True, help="Write models of unknown architectures, or with missing or extra tensors."
    ),
    click.option("--dry-run", is_flag=True, help="Print the plan with exact sizes and stop."),
    click.option("--overwrite", is_flag=True, help="Replace an existing DST once the new one is complete."),
    click.option(
        "--resume",
        type=click.Choice(["auto", "required", "never"]),
        default="auto",
        show_default=True,
        help="Resume an unfinished run of the same job.",
    ),
    click.option(
        "--threads", type=click.IntRange(1, 256), help="Threads, with --engine of each worker.  [default: all cores; 1]"
    ),
    click.option(
        "--max-memory",
        metavar="SIZE",
        help="Keep the resident memory of the process below SIZE, e.g. 2GB: fewer tensors are in progress at once.",
    ),
    click.option("--no-measure", is_flag=True, help="Do not measure the error of each tensor."),
    json_option,
    _shared(
        "--part",
        metavar="I/N",
        help="Do share I of N of the work, on any machine; `polyquant merge DST` publishes the whole.",
    ),
    _shared(
        "--engine",
        type=click.Choice(["ray", "dask"]),
        help="Let workers do the work: of a cluster at --address, else new ones on this machine. DST must be in a "
        "folder that all workers share.",
    ),
    _shared("--workers", type=click.IntRange(1, 10_000), metavar="N", help="Their number.  [default: one per core]"),
    _shared("--address", metavar="HOST:PORT", help="A running Ray or Dask cluster."),
    _shared(
        "--lease",
        type=click.FloatRange(1, 86_400),
        metavar="SECONDS",
        help="Replace a worker that takes longer for a unit of work.  [default: 10 times the expected time]",
    ),
)


def conversion_options(command: F) -> F:
    """Add SRC, DST and all options of a conversion, those of the formats last."""
    profile = click.option("--profile", is_flag=True, help="Print where the time went.")
    command = click.argument("dst", type=SOURCE)(profile(options_of_conversions(command)))
    return click.argument("src", type=SOURCE)(command)


def options_of_conversions(command: F) -> F:
    """Add all options of a conversion, those of the formats last."""
    command = format_options(sources=True, targets=True)(command)
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
