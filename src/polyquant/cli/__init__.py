"""The command line: parse arguments, call one function, print. One file per command, imported only when it runs.

Exit codes: 0 done (validate: clean, certify: certified), 1 findings, nothing to repair or a system failure (disk full),
2 unusable input, 130 interrupted.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings
from importlib import import_module
from types import FrameType
from typing import Any

import click

from polyquant import __version__
from polyquant.cli.terminal import bug, open_standard_streams, say, usage
from polyquant.errors import PolyquantError, printable
from polyquant.registry import PluginWarning, blamed_plugin

COMMANDS = {
    "inspect": "Show types, layers, sizes and metadata.",
    "browse": "Browse tensors, metadata and tokenizer in the terminal, or compare two models.",
    "validate": "Check a model: findings with codes; exit 1 if there are any.",
    "explain": "Explain a finding's code and what to do about it.",
    "compare": "Measure the error of B against A, tensor by tensor.",
    "report": "Write a page that compares models: sizes, errors by layer, findings.",
    "certify": "Check that a conversion computes what its source does.",
    "checksum": "Write digests of tensors and files, which validate checks; compare models.",
    "convert": "Convert a model to another format.",
    "quantize": "Quantize a model, by a recipe such as q4_k_m.",
    "plan": "Estimate a conversion on several workers or many machines.",
    "merge": "Publish a conversion whose parts ran separately (--part I/N).",
    "pack": "Pack a model into Ollama's model store or an OCI image layout.",
    "push": "Upload a model with a model card to the Hugging Face hub.",
    "importance": "Measure an importance matrix for quantize --importance.",
    "run": "Continue a prompt, or chat.",
    "embed": "Compute embeddings with an embedding model.",
    "eval": "Measure perplexity; with --against, KL divergence and layer errors.",
    "sweep": "Quantize a model in many ways, measure each, recommend one.",
    "serve": "Serve a model over an OpenAI-compatible HTTP API.",
    "edit": "Change GGUF metadata; tensor data is not touched.",
    "repair": "Write a repaired copy of an msModelSlim folder.",
    "codecs": "List codecs: bits per weight, and the formats that read and write each.",
    "recipes": "List recipes: the codecs that each assigns, and the size of the result.",
    "formats": "List formats: files, and the codecs that each reads and writes.",
    "architectures": "List supported architectures: which convert, which run.",
    "completion": "Print the script that completes commands and names in a shell.",
    "doctor": "Check this installation for problems and slow code paths.",
    "demo": "Convert, validate and compare an embedded model, in a minute.",
}


class _Lazy(click.Group):
    """Take names and one-line help from the table above; import a module only when its command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"polyquant.cli.{cmd_name}_command"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from difflib import get_close_matches

        from polyquant.cli.suggestions import OTHER_NAMES

        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = [OTHER_NAMES[args[0]]] if args[0] in OTHER_NAMES else get_close_matches(args[0], COMMANDS, n=1)
            ctx.fail(f"no command '{printable(args[0])}'" + (f"; did you mean '{near[0]}'?" if near else ""))
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Lazy,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Examples:  polyquant inspect model.gguf  |  polyquant quantize hf-folder/ model.gguf --recipe q4_k_m",
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Open, check, compare, convert, quantize and run LLM weights: GGUF files, Trellis and msModelSlim folders, Hugging
    Face folders (float, GPTQ, AWQ, compressed-tensors, FP8, MXFP4, packed BitNet).
    """
    from polyquant.storage.allocator import keep_freed_memory

    keep_freed_memory()


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _notes(problem: BaseException | None) -> str:
    """The notes added to an exception: how to resume."""
    return "".join(f"; {note}" for note in getattr(problem, "__notes__", ()))


def _warn_of_plugins() -> None:
    """Print a plugin that cannot be loaded as one line on stderr, like every error."""
    others = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, PluginWarning):
            say(f"polyquant: {message}", err=True)
        else:
            others(message, category, *where, **more)

    warnings.showwarning = show


def _save_processor_time() -> None:
    """Collect cyclic garbage seldom, and let idle threads of BLAS sleep soon: most commands give both little to do."""
    gc.set_threshold(100_000, 50, 100)
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")  # 2^20 cycles instead of 2^26; read when numpy is imported


def main(args: list[str] | None = None) -> Any:
    """Run the `polyquant` command. Every expected failure is one line on stderr, never a traceback."""
    _save_processor_time()
    open_standard_streams()
    signal.signal(signal.SIGTERM, _terminate)
    sys.excepthook = bug
    _warn_of_plugins()
    if "_POLYQUANT_COMPLETE" in os.environ:  # a shell asks for completions
        import_module("polyquant.cli.completing")
    try:
        return cli.main(args=args, prog_name="polyquant", standalone_mode=False)
    except click.ClickException as problem:
        from polyquant.cli.suggestions import suggest

        usage(suggest(problem))
        sys.exit(2)
    except PolyquantError as problem:
        say(f"polyquant: {problem}{_notes(problem) or _notes(problem.__cause__)}", err=True)
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
    except Exception as problem:
        blamed = blamed_plugin(problem)
        if blamed is None:
            raise  # a bug of polyquant: the traceback helps to report it
        say(f"polyquant: {blamed}: {type(problem).__name__}: {problem}{_notes(problem)}", err=True)
        sys.exit(1)
