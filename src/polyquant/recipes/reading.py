"""Recipes by name, from files and from the command line.

Built-in recipes (`recipes.toml`) are the well-known mixes (Q4_K_M, ...). A user's recipe file has the same form; a rule
on the command line is `PATTERN=CODEC`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from polyquant.errors import InputError, PlanError, PolyquantError, UnknownNameError, listed
from polyquant.recipes.recipe import LAYERS, Recipe, Rule
from polyquant.registry import CODECS, codec, known_codecs
from polyquant.storage import strict_json
from polyquant.storage.source import Source
from polyquant.types import Codec

__all__ = ["builtin_recipes", "load_recipe", "parse_rule", "uniform"]

_DOCUMENTED = "see docs/recipes.md for the recipe format"
_FILE_BYTES = 1 << 20
"""Maximum size of a recipe file: rules for 10,000 tensors."""
_TOKENS = re.compile(r'"""(?:\\.|[^\\])*?"""|\'{3}.*?\'{3}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|\#[^\n]*|\.', re.DOTALL)
"""Strings, comments, and dots elsewhere."""
_DOTS = 10_000
"""Maximum number of dots in keys: the parser's time is quadratic in the parts of a key."""
_EXTENDED = 8
"""Maximum length of a chain of recipe files."""


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


_RULE = {"match": str, "codec": str, "layers": str, "gqa": int, "importance": bool}
_RECIPE = {"base": str, "file_type": int, "rules": list, "extends": str}


def _checked(table: object, kinds: Mapping[str, type], what: str, source: object) -> dict[str, Any]:
    """The table, if it is one and each entry is known and has its type. Raises InputError."""
    entries = strict_json.typed(table, dict, what, file=source)
    for key, value in entries.items():
        if key not in kinds:
            known = ", ".join(kinds)
            raise InputError(f"{what} has the unknown key '{key}'", file=source, expected=known, hint=_DOCUMENTED)
        strict_json.typed(value, kinds[key], f"{what}: '{key}'", file=source)
    return entries


@contextmanager
def _named(source: object) -> Iterator[None]:
    """Errors of names in a recipe tell its file."""
    try:
        yield
    except PolyquantError as problem:
        problem.file = problem.file or source
        raise


def _from_table(name: str, table: object, source: object, chain: tuple[str, ...] = ()) -> Recipe:
    """chain: the files that extend this recipe."""
    entries = _checked(table, _RECIPE, f"recipe '{name}'", source)
    rules = []
    for i, item in enumerate(entries.get("rules", [])):
        what = f"recipe '{name}': rule {i + 1}"
        entry = _checked(item, _RULE, what, source)
        if not {"match", "codec"} <= set(entry):
            raise InputError(f"{what} needs match and codec", file=source, found=listed(entry), hint=_DOCUMENTED)
        if entry.get("layers") not in (None, *LAYERS):
            raise InputError(f"{what}: layers must be one of {', '.join(LAYERS)}", file=source, found=entry["layers"])
        with _named(source):
            codec(entry["codec"])
        rules.append(Rule(**entry))
    base = entries.get("base")
    if base is not None:
        with _named(source):
            codec(base)
    if not 0 <= entries.get("file_type", 0) < 1 << 32:
        what = f"recipe '{name}': file_type is out of range"
        raise InputError(what, file=source, expected="a uint32")
    recipe = Recipe(name, base, tuple(rules), entries.get("file_type"))
    if "extends" in entries:
        if len(chain) >= _EXTENDED:
            hint = "does a recipe extend itself?"
            raise InputError("too many recipes extend each other", file=source, expected=_EXTENDED, hint=hint)
        with _named(source):
            parent = _load(entries["extends"], (*chain, str(source)))
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
    return _load(name, ())


def _load(name: str, chain: tuple[str, ...]) -> Recipe:
    key = name.lower()
    if key.endswith(".toml"):
        return _from_table(Path(name).stem, _table(Path(name)), name, chain)
    known = builtin_recipes()
    if key in known:
        return known[key]
    if key in known_codecs():
        mixes = [n for n in known if n.startswith(f"{key}_")]
        other = f", or --recipe {' or '.join(mixes)}" if mixes else ""
        raise UnknownNameError("recipe", name, known, hint=f"{key} is a codec: use --codec {key}{other}")
    raise UnknownNameError("recipe", name, known)


def _table(path: Path) -> dict[str, Any]:
    """The content of a TOML file. Raises InputError."""
    source = Source(path)
    try:
        if source.size > _FILE_BYTES:
            found = f"{source.size} bytes"
            raise InputError("the recipe is too large", file=path, expected=f"at most {_FILE_BYTES} bytes", found=found)
        text = source.pread(0, source.size).tobytes().decode()
    except UnicodeDecodeError as problem:
        raise InputError(f"the recipe is not UTF-8 (byte {problem.start})", file=path) from None
    finally:
        source.close()
    if sum(found == "." for found in _TOKENS.findall(text)) > _DOTS:
        raise InputError("the recipe has too many dotted keys", file=path, hint=_DOCUMENTED)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise InputError("the recipe is nested too deep", file=path, hint=_DOCUMENTED) from None
    except ValueError as problem:  # syntax errors, and integers beyond sys.get_int_max_str_digits()
        raise InputError(f"not a readable recipe: {problem}", file=path, hint=_DOCUMENTED) from None


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
