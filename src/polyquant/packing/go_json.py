"""JSON as Go's encoding/json writes it: the digest of a layer depends on each byte.

Go sorts the keys of maps, writes no spaces, ends with a newline (Encoder), and escapes <, >, & and U+2028, U+2029 in
strings. A number is the shortest decimal that gives the same double, with an exponent below 1e-6 and from 1e21 on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

__all__ = ["encode"]

_ESCAPED = "<>&\u2028\u2029"


def encode(value: Any) -> bytes:
    """Encode a value with a final newline. Mappings keep their order: sort those that are Go maps."""
    return (_text(value) + "\n").encode()


def _text(value: Any) -> str:
    if isinstance(value, str):
        plain = json.dumps(value, ensure_ascii=False)
        for character in _ESCAPED:
            plain = plain.replace(character, f"\\u{ord(character):04x}")
        return plain
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_text(k)}:{_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_text, value)) + "]"
    if isinstance(value, float):
        return _number(value)
    return json.dumps(value)


def _number(x: float) -> str:
    """A double as Go writes it."""
    if x == int(x) and abs(x) < 1e21:
        return str(int(x))
    if 1e-6 <= abs(x) < 1e21:
        return format(Decimal(repr(x)), "f")
    mantissa, _, exponent = f"{Decimal(repr(x)):e}".partition("e")
    return f"{mantissa}e{int(exponent):+03d}" if int(exponent) > 0 else f"{mantissa}e{int(exponent)}"
