"""A recipe: ordered rules over tensor names that choose codecs; the first match wins.

Patterns are shell globs over the target's or the source's tensor name. reading.py loads recipes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate
from functools import cache

__all__ = ["FALLBACK", "LAYERS", "Facts", "Recipe", "Rule"]

FALLBACK = {
    **dict.fromkeys(
        ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m", "q2_k", "q3_k", "iq4_xs"), "iq4_nl"
    ),
    **dict.fromkeys(("tq1_0", "tq2_0"), "q4_0"),
    **{"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"},
}
"""For rows that are not a multiple of 256: llama.cpp's substitute with blocks of 32; after that, f16."""

LAYERS: dict[str, Callable[[int, int], bool]] = {
    "first_2": lambda i, n: i < 2,
    "first_4": lambda i, n: i < 4,
    "first_16th": lambda i, n: i < n // 16,
    "first_8th": lambda i, n: i < n // 8,
    "more_bits": lambda i, n: i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2,
}


@dataclass(frozen=True, slots=True)
class Facts:
    """Model facts for rules: number of layers, query heads per key/value head, tied head, importance available."""

    layers: int = 0
    gqa: int = 1
    tied: bool = False
    importance: bool = False


_GLOB = re.compile(r"[*?\[]")


@cache
def _matches(pattern: str) -> Callable[[str], object]:
    return re.compile(translate(pattern)).match


@dataclass(frozen=True, slots=True)
class Rule:
    """Assign `codec` to tensors that match the glob `match`, if the conditions hold."""

    match: str
    codec: str
    layers: str | None = None
    gqa: int = 0
    importance: bool = False

    def named(self, names: Sequence[str], facts: Facts) -> list[str]:
        """The names that match, regardless of the conditions."""
        pattern = self.match
        if pattern == "output":
            pattern = "token_embd.weight" if facts.tied else "output.weight"
        if pattern in names:  # a name may hold the brackets of a glob
            return [pattern]
        return list(filter(_matches(pattern), names)) if _GLOB.search(pattern) else []

    def applies(self, names: Sequence[str], facts: Facts) -> bool:
        """True if one of the tensor's names matches and every condition holds."""
        if facts.gqa < self.gqa or (self.importance and not facts.importance):
            return False
        if self.layers is not None:
            number = re.search(r"\.(\d+)\.", names[0])
            if number is None or not LAYERS[self.layers](int(number[1]), facts.layers):
                return False
        return bool(self.named(names[:1], facts)) or bool(self.named(names, facts))


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe.

    base: codec of matrices without a rule (None: keep the source's); file_type: GGUF's general.file_type.
    """

    name: str
    base: str | None = None
    rules: tuple[Rule, ...] = field(default=())
    file_type: int | None = None

    def choose(self, names: Sequence[str], facts: Facts) -> tuple[str | None, str]:
        """Return (codec name None to keep the source's, reason) for a tensor with these names, the target's first."""
        for rule in self.rules:
            if rule.applies(names, facts):
                return rule.codec, f"{self.name}: {rule.match}" + (f" ({rule.layers})" if rule.layers else "")
        return self.base, self.name

    def with_rules(self, rules: Sequence[Rule]) -> Recipe:
        """The recipe with additional rules in front."""
        return replace(self, rules=(*rules, *self.rules))
