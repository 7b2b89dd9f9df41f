"""Recipes by name, from files and from the command line.

Built-in recipes (`recipes.toml`) are the well-known mixes (Q4_K_M, ...). A user's recipe file has the same form; a rule
on the command line is `PATTERN=CODEC`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from polyquant.errors import InputError, PlanError, UnknownNameError
from polyquant.recipes.recipe import LAYERS, Recipe, Rule
from polyquant.registry import CODECS, codec, known_codecs
from polyquant.types import Codec

__all__ = ["builtin_recipes", "load_recipe", "parse_rule", "uniform"]


def parse_rule(text: str) -> Rule:
    """Parse `PATTERN=CODEC`. Raises PlanError for a syntax error, UnknownNameError for an unknown codec."""
    pattern, sign, name = text.rpartition("=")
    if not sign or not pattern or not name:
        raise PlanError(f"a rule has the form PATTERN=CODEC, got '{text}'", hint="for example --rule '*ffn_down*=q6_k'")
    _codec(name, "a rule takes a codec, e.g.")
    return Rule(pattern, name.lower())


def _codec(name: str, hint: str) -> Codec:
    """The codec. Raises PlanError for a recipe (`hint` and similar codecs); UnknownNameError for other names."""
    try:
        return codec(name)
    except UnknownNameError:
        key = name.lower()
        if key not in builtin_recipes():
            raise
        near = [c for c in CODECS if key in c.split(".")] or [c for c in CODECS if key.startswith(c)]
        raise PlanError(f"{key} is a recipe, not a codec", hint=f"{hint} {' or '.join(near)}") from None


def _from_table(name: str, table: Mapping[str, Any], source: object) -> Recipe:
    def fail(what: str) -> InputError:
        return InputError(what, file=source, hint="see docs/recipes.md for the recipe format")

    if unknown := set(table) - {"base", "file_type", "rules", "extends"}:
        raise fail(f"recipe '{name}' has unknown keys {sorted(unknown)}")
    rules = []
    for entry in table.get("rules", []):
        if not isinstance(entry, dict) or not {"match", "codec"} <= set(entry) <= {
            "match",
            "codec",
            "layers",
            "gqa",
            "importance",
        }:
            raise fail(
                f"recipe '{name}': a rule needs match and codec, and may have layers, gqa, importance; found {entry}"
            )
        if entry.get("layers") not in (None, *LAYERS):
            raise fail(f"recipe '{name}': layers must be one of {', '.join(LAYERS)}; found {entry['layers']}")
        codec(entry["codec"])
        rules.append(Rule(**entry))
    base = table.get("base")
    if base is not None:
        codec(base)
    recipe = Recipe(name, base, tuple(rules), table.get("file_type"))
    if "extends" in table:
        parent = load_recipe(table["extends"])
        recipe = Recipe(name, base or parent.base, (*rules, *parent.rules), recipe.file_type or parent.file_type)
    return recipe


@cache
def builtin_recipes() -> Mapping[str, Recipe]:
    """The built-in recipes by name."""
    text = files("polyquant.recipes").joinpath("recipes.toml").read_text(encoding="utf-8")
    return {name: _from_table(name, table, "recipes.toml") for name, table in tomllib.loads(text).items()}


def load_recipe(name: str) -> Recipe:
    """Load a built-in recipe or a `.toml` file.

    Raises UnknownNameError with close names, also for the name of a codec; InputError for an invalid file.
    """
    key = name.lower()
    known = builtin_recipes()
    if key.endswith(".toml"):
        try:
            table = tomllib.loads(Path(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
            raise InputError(f"not a readable recipe: {problem}", file=name) from None
        return _from_table(Path(name).stem, table, name)
    if key in known:
        return known[key]
    if key in known_codecs():
        mixes = [n for n in known if n.startswith(f"{key}_")]
        other = f", or --recipe {' or '.join(mixes)}" if mixes else ""
        raise UnknownNameError("recipe", name, known, hint=f"{key} is a codec: use --codec {key}{other}")
    raise UnknownNameError("recipe", name, known)


def uniform(name: str) -> Recipe:
    """A recipe with one codec for every matrix. Ternary codecs cannot hold embeddings, which keep the types of their
    recipe.
    """
    key = _codec(name, f"use --recipe {name.lower()}, or --codec with").name
    known = builtin_recipes()
    family = key.removeprefix("trinity.")
    family = "i2_s" if "i2_s" in key or key.startswith("hf_bitnet") else family
    if family in ("i2_s", "tl1", "tl2", "tq1_0", "tq2_0"):
        return replace(known[family], name=key, base=key)
    file_type = known[key].file_type if key in known else None
    return Recipe(key, key, (), file_type)
