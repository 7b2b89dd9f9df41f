"""Completion in shells: names of codecs, recipes, formats and rules. `polyquant completion SHELL` prints the script.

A shell runs the program for each TAB, so nothing is imported here that the names do not need.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ZshComplete,
    add_completion_class,
    split_arg_string,
)

from polyquant import registry

__all__ = ["VARIABLE", "candidates", "codecs", "recipe_names", "recipes", "rules", "targets"]

VARIABLE = "_POLYQUANT_COMPLETE"
"""Set by the scripts; its value is the shell, and whether to print the script or the completions."""
_BITS = range(2, 9)
_FAMILIES_READ = 3
"""Families whose members are listed, which imports their modules; of more only the first words."""


def codecs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
    """Names of codecs."""
    return _starting(_codec_names(incomplete), incomplete)


def recipes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
    """Names of recipes; a path if none fits."""
    return _starting(recipe_names(), incomplete) or [CompletionItem(incomplete, type="file")]


def rules(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
    """The codec of GLOB=CODEC."""
    glob, sign, name = incomplete.rpartition("=")
    return _starting(_codec_names(name), name, glob + sign) if sign else []


def candidates(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
    """The last of several recipes, codecs and FORMAT:BITS, separated by commas."""
    before, sign, name = incomplete.rpartition(",")
    sizes = (f"trellis:{bits}" for bits in _BITS)
    return _starting((*recipe_names(), *sizes, *_codec_names(name)), name, before + sign)


def targets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
    """Names of programs that read models."""
    from polyquant.analysis.validate import targets as names

    return _starting(names(), incomplete)


def _starting(names: Iterable[str], incomplete: str, before: str = "") -> list[CompletionItem[Any]]:
    return [CompletionItem(before + name) for name in dict.fromkeys(names) if name.startswith(incomplete)]


def recipe_names() -> list[str]:
    """Names of the recipes of this package."""
    return list(tomllib.loads(files("polyquant.recipes").joinpath("recipes.toml").read_text(encoding="utf-8")))


def _codec_names(incomplete: str) -> list[str]:
    """Candidates: all codecs with fixed names, and the members of families that may be meant."""
    word = incomplete.partition(".")[0]
    families = [name for name in registry.families() if name.startswith(word)]
    if len(families) > _FAMILIES_READ:
        return [*registry.CODECS, *families]
    return [*registry.CODECS, *(name for family in families for name in registry.members(family))]


class _Bash(BashComplete):
    """Bash splits words at = and :, and replaces only the last piece."""

    _cut = 0

    def get_completion_args(self) -> tuple[list[str], str]:
        """Join the pieces: (complete words, incomplete word)."""
        last = int(os.environ["COMP_CWORD"])
        pieces = split_arg_string(os.environ["COMP_WORDS"])[: last + 1]
        pieces += [""] * (last + 1 - len(pieces))
        words: list[str] = []
        self._cut = 0
        for piece in pieces[1:]:
            if words and (piece in ("=", ":") or words[-1].endswith(("=", ":"))):
                self._cut = len(words[-1]) + (len(piece) if piece in ("=", ":") else 0)
                words[-1] += piece
            else:
                self._cut = 0
                words.append(piece)
        return words[:-1], words[-1] if words else ""

    def format_completion(self, item: CompletionItem[Any]) -> str:
        """The line that the script reads."""
        return f"{item.type},{item.value[self._cut :] if item.type == 'plain' else item.value}"


class _Zsh(ZshComplete):
    """Start zsh's completion if ~/.zshrc has not; without it every new shell would print an error."""

    source_template = ZshComplete.source_template.replace(
        "    compdef %(complete_func)s", "    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }\n"
        "    compdef %(complete_func)s",
    )  # fmt: skip


class _Fish(FishComplete):
    """Split only at the first comma: lists of recipes and the help contain some."""

    source_template = FishComplete.source_template.replace('string split ","', 'string split -m 1 ","')


for _shell in (_Bash, _Zsh, _Fish):
    add_completion_class(_shell)
