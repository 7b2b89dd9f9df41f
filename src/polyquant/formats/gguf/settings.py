"""Parse metadata settings: `key=value`, `key:type=value`, `key:[type]=["a", "b"]`.

type: u8 i8 u16 i16 u32 i32 u64 i64 f32 f64 bool str; in brackets an array of these, whose value is a JSON list. Without
a type the value gets the existing type of the key.
"""

from __future__ import annotations

import json
import re
from typing import Any

from polyquant.errors import PlanError, UnknownNameError, printable
from polyquant.types import Kind, Meta

__all__ = ["KINDS", "parse_setting", "parse_value"]

KINDS: dict[str, Kind] = {
    "u8": Kind.UINT8,
    "i8": Kind.INT8,
    "u16": Kind.UINT16,
    "i16": Kind.INT16,
    "u32": Kind.UINT32,
    "i32": Kind.INT32,
    "f32": Kind.FLOAT32,
    "bool": Kind.BOOL,
    "str": Kind.STRING,
    "u64": Kind.UINT64,
    "i64": Kind.INT64,
    "f64": Kind.FLOAT64,
}
_BOOLS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
_FLOATS = (Kind.FLOAT32, Kind.FLOAT64)
_TYPED = re.compile(r"(?P<key>[^=]*?):(?P<array>\[)?(?P<kind>\w+)(?(array)\])")


def parse_setting(text: str) -> tuple[str, Meta | str]:
    """Parse to (key, value): a Meta if the type was given, else a string, to be parsed by the key's existing type.

    Raises PlanError if there is no `=` or the value does not fit the type, UnknownNameError for an unknown type.
    """
    left, equals, value = text.partition("=")
    if not equals or not left:
        raise PlanError(
            "not a setting", found=text, hint="write key=value or key:type=value, e.g. general.name:str=Llama"
        )
    typed = _TYPED.fullmatch(left)
    if typed is None:
        return left, value
    if typed["kind"] not in KINDS:
        raise UnknownNameError("metadata type", typed["kind"], KINDS)
    kind = KINDS[typed["kind"]]
    key = typed["key"]
    if typed["array"]:
        return key, parse_value(key, value, Kind.ARRAY, kind)
    return key, parse_value(key, value, kind)


def parse_value(key: str, text: str, kind: Kind, item: Kind | None = None) -> Meta:
    """Parse a value of that type (arrays: a JSON list). Raises PlanError if it does not fit."""
    try:
        if kind is not Kind.ARRAY:
            return Meta(kind, _scalar(text, kind))
        if item is None or item is Kind.ARRAY:
            raise PlanError(f"'{printable(key)}' is an array of arrays, which cannot be written")
        values = json.loads(text)
        if not isinstance(values, list):
            raise ValueError("not a JSON list")
        return Meta(kind, [_item(v, item) for v in values], item)
    except (ValueError, RecursionError) as e:
        wanted = {v: k for k, v in KINDS.items()}
        name = wanted[kind] if item is None else f"a JSON list of {wanted[item]}"
        raise PlanError(
            f"the value for '{printable(key)}' does not fit its type", expected=name, found=printable(text, 60)
        ) from e


def _scalar(text: str, kind: Kind) -> Any:
    if kind is Kind.STRING:
        return text
    if kind is Kind.BOOL:
        if text.lower() not in _BOOLS:
            raise ValueError("not a bool")
        return _BOOLS[text.lower()]
    return float(text) if kind in _FLOATS else int(text, 0)


def _item(value: Any, kind: Kind) -> Any:
    wanted = {Kind.STRING: str, Kind.BOOL: bool}.get(kind)
    if wanted is not None:
        if not isinstance(value, wanted):
            raise ValueError(f"not a {kind.name.lower()}")
        return value
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or (kind not in _FLOATS and isinstance(value, float))
    ):
        raise ValueError("not a number of this type")
    return value
