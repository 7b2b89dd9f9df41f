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

_EXTRA = re.compile(r"Got unexpected extra argument \((\w+)\)")


def suggest(problem: click.ClickException) -> click.ClickException:
    """The usage error with what may have been meant."""
    context = getattr(problem, "ctx", None)
    if context is None:
        return problem
    if isinstance(problem, click.NoSuchOption):
        name = problem.option_name
        options = [option for param in context.command.get_params(context) for option in param.opts]
        longer = [option for option in options if name.startswith("--") and option.startswith(name)]
        return click.NoSuchOption(name, possibilities=longer, ctx=context) if longer else problem
    if (extra := _EXTRA.search(problem.message)) is not None:  # as llama-quantize takes the type
        from polyquant.cli.completing import recipe_names

        takes = any("--recipe" in param.opts for param in context.command.get_params(context))
        if takes and extra[1].lower() in recipe_names():
            return click.UsageError(f"{problem.message}. Did you mean --recipe {extra[1].lower()}?", context)
    return problem
