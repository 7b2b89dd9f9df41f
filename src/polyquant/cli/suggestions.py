"""Suggestions for usage errors: the names that other programs use, and options written short."""

from __future__ import annotations

import re

import click

__all__ = ["OTHER_NAMES", "suggest"]

OTHER_NAMES = {
    "chat": "run", "cli": "run", "generate": "run", "server": "serve", "perplexity": "eval", "ppl": "eval",
    "imatrix": "importance", "info": "inspect", "show": "inspect", "dump": "inspect", "check": "validate",
    "verify": "validate", "diff": "compare", "gptq": "quantize", "awq": "quantize",
}  # fmt: skip
"""Name of a command in another program -> the command here."""

_OTHER_OPTIONS = {
    "-m": "the model is the first argument", "--model": "the model is the first argument", "-c": "--context",
    "--ctx-size": "--context", "-t": "--threads", "-f": "--file", "-ngl": "this program runs on the CPU",
    "--n-gpu-layers": "this program runs on the CPU", "--gpu-layers": "this program runs on the CPU",
    "--outtype": "--codec", "--outfile": "the target is the second argument", "--imatrix": "--importance",
    "--n-predict": "--max-tokens", "--repeat-penalty": "--repetition-penalty", "--temp": "--temperature",
}  # fmt: skip
"""Option of llama.cpp's programs -> the option here, or a sentence about it."""
_OTHER_TARGETS = {
    "vllm": "compressed-tensors", "sglang": "compressed-tensors", "int4": "compressed-tensors", "nvfp4": "modelopt",
    "llama.cpp": "gguf", "ollama": "gguf", "ascend": "msmodelslim", "vllm-ascend": "msmodelslim",
    "mindie": "msmodelslim", "transformers": "hf", "huggingface": "hf", "safetensors": "hf", "trellis": "trellis-v3",
}  # fmt: skip
"""Program or form that people give to --to -> the format here."""
_EXTRA = re.compile(r"Got unexpected extra argument \((\w+)\)")


def suggest(problem: click.ClickException) -> click.ClickException:
    """The usage error with the probable correction."""
    context = getattr(problem, "ctx", None)
    if context is None:
        return problem
    if isinstance(problem, click.MissingParameter):
        return click.UsageError(" ".join(problem.format_message().split()), context)
    if isinstance(problem, click.NoSuchOption):
        return _option_suggested(problem, context)
    if isinstance(problem, click.BadParameter) and problem.param is not None and "--to" in problem.param.opts:
        return _target_suggested(problem, context)
    if (extra := _EXTRA.search(problem.message)) is not None:  # as llama-quantize takes the type
        from polyquant.cli.completing import recipe_names

        takes = any("--recipe" in param.opts for param in context.command.get_params(context))
        if takes and extra[1].lower() in recipe_names():
            return click.UsageError(f"{problem.message}. Did you mean --recipe {extra[1].lower()}?", context)
    return problem


def _target_suggested(problem: click.BadParameter, context: click.Context) -> click.ClickException:
    """The error of --to with the format of a program, or with --codec or --recipe for their names."""
    from polyquant.cli.completing import recipe_names
    from polyquant.registry import known_codecs

    found = re.match(r"'([^']*)' is not one of", problem.message)
    word = found[1].lower() if found else ""
    if word in _OTHER_TARGETS:
        meant = f"--to {_OTHER_TARGETS[word]}"
    elif word in known_codecs():
        meant = f"--codec {word}"
    elif word in recipe_names():
        meant = f"--recipe {word}"
    else:
        return problem
    message = f"{problem.message.partition(' Did you mean')[0]} Did you mean {meant}?"
    return click.BadParameter(message, context, problem.param)


def _option_suggested(problem: click.NoSuchOption, context: click.Context) -> click.ClickException:
    """The error of an unknown option with that of this program, or the whole of an abbreviation."""
    name = problem.option_name
    other = _OTHER_OPTIONS.get(name)
    options = [option for param in context.command.get_params(context) for option in param.opts]
    longer = [option for option in options if name.startswith("--") and option.startswith(name)]
    if other is not None and not longer and (not other.startswith("-") or other in options):
        said = f"Did you mean {other}?" if other.startswith("-") else f"Here {other}."
        return click.UsageError(f"No such option: {name}. {said}", context)
    return click.NoSuchOption(name, possibilities=longer, ctx=context) if longer else problem
