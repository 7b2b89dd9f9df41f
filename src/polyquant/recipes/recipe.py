"""Which codec each tensor gets. A recipe is ordered rules over tensor names; the first match wins.

Built-in recipes (`recipes.toml`) are the mixes that people know by name (Q4_K_M, ...). A recipe file of one's own has the same
form, a rule on the command line is `PATTERN=CODEC`. Patterns are shell globs over the target's tensor name or the source's.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from polyquant.errors import InputError, PlanError, UnknownNameError
from polyquant.registry import CODECS, codec

__all__ = ["FALLBACK", "Facts", "Recipe", "Rule", "builtin_recipes", "load_recipe", "parse_rule"]

FALLBACK = {
    **dict.fromkeys(
        ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m", "q2_k", "q3_k", "iq4_xs"), "iq4_nl"
    ),
    **dict.fromkeys(("tq1_0", "tq2_0"), "q4_0"),
    **{"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"},
}
"""Where rows are no multiple of 256 weights: the type with blocks of 32 that llama.cpp takes instead; after that, f16."""

LAYERS: dict[str, Callable[[int, int], bool]] = {
    "first_2": lambda i, n: i < 2,
    "first_4": lambda i, n: i < 4,
    "first_16th": lambda i, n: i < n // 16,
    "first_8th": lambda i, n: i < n // 8,
    "more_bits": lambda i, n: i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2,
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What a rule may ask of a model: number of layers, query heads per key/value head, tied head, importance at hand."""

    layers: int = 0
    gqa: int = 1
    tied: bool = False
    importance: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """`match` (glob) gets `codec` if the conditions hold."""

    match: str
    codec: str
    layers: str | None = None
    gqa: int = 0
    importance: bool = False

    def applies(self, names: Sequence[str], facts: Facts) -> bool:
        """True if one of the tensor's names matches and every condition holds."""
        pattern = self.match
        if pattern == "output":
            pattern = "token_embd.weight" if facts.tied else "output.weight"
        if not any(fnmatchcase(name, pattern) for name in names):
            return False
        if facts.gqa < self.gqa or (self.importance and not facts.importance):
            return False
        if self.layers is None:
            return True
        number = re.search(r"\.(\d+)\.", names[0])
        return number is not None and LAYERS[self.layers](int(number[1]), facts.layers)


@dataclass(frozen=True, slots=True)
class Recipe:
    """`base` for every matrix that no rule names (None: keep what the source has); file_type: GGUF's general.file_type."""

    name: str
    base: str | None = None
    rules: tuple[Rule, ...] = field(default=())
    file_type: int | None = None

    def choose(self, names: Sequence[str], facts: Facts) -> tuple[str | None, str]:
        """(codec name or None to keep the source's, why) of a tensor known by these names (the target's first)."""
        for rule in self.rules:
            if rule.applies(names, facts):
                return rule.codec, f"{self.name}: {rule.match}" + (f" ({rule.layers})" if rule.layers else "")
        return self.base, self.name

    def with_rules(self, rules: Sequence[Rule]) -> Recipe:
        """The same recipe with more urgent rules in front."""
        return replace(self, rules=(*rules, *self.rules))


def parse_rule(text: str) -> Rule:
    """`PATTERN=CODEC`. Raises PlanError on another form, UnknownNameError for a codec that does not exist."""
    pattern, sign, name = text.rpartition("=")
    if not sign or not pattern or not name:
        raise PlanError(f"a rule reads PATTERN=CODEC, not '{text}'", hint="for example --rule '*ffn_down*=q6_k'")
    codec(name)
    return Rule(pattern, name.lower())


def _from_table(name: str, table: Mapping[str, Any], source: object) -> Recipe:
    def fail(what: str) -> InputError:
        return InputError(what, file=source, hint="see docs/recipes.md for the form of a recipe")

    if unknown := set(table) - {"base", "file_type", "rules", "extends"}:
        raise fail(f"recipe '{name}' has the unknown keys {sorted(unknown)}")
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
                f"recipe '{name}': a rule has match and codec, and may have layers, gqa, importance; found {entry}"
            )
        if entry.get("layers") not in (None, *LAYERS):
            raise fail(f"recipe '{name}': layers is one of {', '.join(LAYERS)}; found {entry['layers']}")
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
    """The recipes that ship, by name."""
    text = files("polyquant.recipes").joinpath("recipes.toml").read_text(encoding="utf-8")
    return {name: _from_table(name, table, "recipes.toml") for name, table in tomllib.loads(text).items()}


def load_recipe(name: str) -> Recipe:
    """A built-in recipe, a `.toml` file, or the name of a codec (then: that codec for every matrix).

    Raises UnknownNameError with near names, InputError for a file that is no recipe.
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
    if key in CODECS:
        return uniform(key)
    raise UnknownNameError("recipe or codec", name, [*known, *CODECS])


def uniform(name: str) -> Recipe:
    """One codec for every matrix. A ternary codec cannot hold embeddings, so these keep its recipe's types."""
    key = codec(name).name
    known = builtin_recipes()
    family = key.removeprefix("trinity.")
    family = "i2_s" if "i2_s" in key or key.startswith("hf_bitnet") else family
    if family in ("i2_s", "tl1", "tl2", "tq1_0", "tq2_0"):
        return replace(known[family], name=key, base=key)
    file_type = known[key].file_type if key in known else None
    return Recipe(key, key, (), file_type)
