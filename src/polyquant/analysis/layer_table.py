"""The type of each linear layer as a table that fits a terminal: a row per group of equal layers, a column per linear.

layers  q     k     v     o     gate  up    down
0-30    W8A8  W8A8  W8A8  W8A8  W8A8  W8A8  W8A8
31      W8A8  W8A8  W8A8  W8A8  W8A8  W8A8  FLOAT
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["LayerTable", "layer_table"]

_LAYER = re.compile(r"(?:.*\.)?(?:layers|blocks|h)\.(\d{1,9})\.(.+)\.weight")
_MIXED = "mixed"
_ORDER = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "query_key_value",
    "o_proj",
    "dense",
    "gate_proj",
    "up_proj",
    "dense_h_to_4h",
    "down_proj",
)
"""Common linears in order of computation; others follow in file order."""


@dataclass(frozen=True, slots=True)
class LayerTable:
    """The table. columns: names of linears within a layer; rows: layer numbers such as "0-30, 40", and a type per
    column.

        The type is "" if a layer has no such linear.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


def layer_table(types: Mapping[str, str]) -> LayerTable | None:
    """Build the table from matrix types (weight name -> type); None if no name has a layer number. Experts share a
    column.
    """
    layers: dict[int, dict[str, str]] = {}
    for name, kind in types.items():
        if (match := _LAYER.fullmatch(name)) is not None:
            linear = re.sub(r"(?<=\.)\d+(?=\.)", "*", match[2])
            row = layers.setdefault(int(match[1]), {})
            row[linear] = kind if row.get(linear, kind) == kind else _MIXED
    if not layers:
        return None
    linears = list(dict.fromkeys(linear for i in sorted(layers) for linear in layers[i]))
    linears.sort(key=_place)
    layers_by_types: dict[tuple[str, ...], list[int]] = {}
    for i in sorted(layers):
        layers_by_types.setdefault(tuple(layers[i].get(x, "") for x in linears), []).append(i)
    rows = tuple((_ranges(numbers), kinds) for kinds, numbers in layers_by_types.items())
    return LayerTable(tuple(_short(linears)), rows)


def _place(linear: str) -> int:
    name = linear.rpartition(".")[2]
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: 0, 1, 2, 5 -> "0-2, 5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _short(linears: Sequence[str]) -> list[str]:
    """The shortest distinct suffixes of the names: "self_attn.q_proj" -> "q"."""
    choices = [
        [
            x.rpartition(".")[2].removesuffix("_proj"),
            x.rpartition(".")[2],
            ".".join(x.replace(".*", "").split(".")[-2:]),
            x,
        ]
        for x in linears
    ]
    out: list[str] = []
    for i, own in enumerate(choices):
        others = Counter(c for j, other in enumerate(choices) if j != i for c in other)
        out.append(next((c for c in own if not others[c]), own[-1]))
    return out
