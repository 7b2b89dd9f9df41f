"""The command line: parse, call one verb, print. One file per verb; a command's module is imported only when it runs.

Exit codes: 0 done (validate: clean), 1 findings, nothing to repair, or the machine failed (disk full), 2 input that cannot be used, 130 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from importlib import import_module
from types import FrameType
from typing import Any

import click

from polyquant import __version__
from polyquant.cli.terminal import bug, say, usage
from polyquant.errors import PolyquantError, printable
from polyquant.registry import PluginWarning

COMMANDS = {
    "inspect": "What is in it: types, layers, sizes, metadata.",
    "validate": "Is it sound? Findings with codes; exit 1 if any.",
    "explain": "What a finding's code means and what to do.",
    "compare": "How far is B from A, tensor by tensor.",
    "convert": "Turn it into another format.",
    "quantize": "Make it smaller, by a recipe such as q4_k_m.",
    "importance": "What columns weigh on a text, for quantize --importance.",
    "run": "Go on with a text, or converse.",
    "embed": "Vectors of texts, by an embedding model.",
    "eval": "Perplexity on a text; with --against, KL divergence and layers.",
    "serve": "Answer OpenAI's API over HTTP with it.",
    "edit": "Change GGUF metadata; tensor data stays untouched.",
    "repair": "Mend an msModelSlim folder into a new one.",
    "architectures": "Which models convert, and which of them run here.",
    "doctor": "Is this installation sound and fast?",
    "demo": "The main job on an embedded model, in a minute.",
}


class _Lazy(click.Group):
    """Names and one-line help from the table above; the module only when its command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = getattr(import_module(f"polyquant.cli.{cmd_name}_command"), cmd_name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from difflib import get_close_matches

        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = get_close_matches(args[0], COMMANDS, n=1)
            ctx.fail(f"no command '{printable(args[0])}'" + (f"; did you mean '{near[0]}'?" if near else ""))
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Lazy,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Examples:  polyquant inspect model.gguf  |  polyquant quantize hf-folder/ model.gguf --recipe q4_k_m",
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Open, check, compare, convert, quantize and run LLM weights: GGUF, I2_S and the other ternaries, Hugging Face folders."""


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _notes(problem: BaseException | None) -> str:
    """What was added to an exception on its way: how to resume."""
    return "".join(f"; {note}" for note in getattr(problem, "__notes__", ()))


def _warn_of_plugins() -> None:
    """A package that polyquant goes on without is one line on stderr, like every error."""
    others = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, PluginWarning):
            say(f"polyquant: {message}", err=True)
        else:
            others(message, category, *where, **more)

    warnings.showwarning = show


def main(args: list[str] | None = None) -> Any:
    """Entry point of the `polyquant` command. Every expected failure is one line on stderr, never a traceback."""
    signal.signal(signal.SIGTERM, _terminate)
    sys.excepthook = bug
    _warn_of_plugins()
    try:
        return cli.main(args=args, prog_name="polyquant", standalone_mode=False)
    except click.ClickException as problem:
        usage(problem)
        sys.exit(2)
    except PolyquantError as problem:
        say(f"polyquant: {problem}{_notes(problem)}", err=True)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort) as stop:
        say(f"polyquant: interrupted{_notes(stop) or _notes(stop.__cause__)}", err=True)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as problem:
        where = f"{printable(problem.filename)}: " if problem.filename else ""
        say(f"polyquant: {where}{problem.strerror or problem}{_notes(problem)}", err=True)
        sys.exit(1)
