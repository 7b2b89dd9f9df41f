"""Typed access to the JSON object of a request. null means absent; `finish` rejects unknown fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from polyquant.errors import printable
from polyquant.integrations.server.refusal import RequestError

__all__ = ["Fields", "wrong"]


def wrong(param: str, expected: str, found: Any) -> RequestError:
    """Return the error for an invalid value of a field."""
    shown = printable(repr(found), 80)
    return RequestError(f"'{param}' must be {expected}, found {shown}", code="invalid_value", param=param)


_OTHER_NAMES = {
    "n_predict": "max_tokens", "max_new_tokens": "max_tokens", "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty", "temp": "temperature", "n_probs": "logprobs",
}  # fmt: skip
"""Name of a field in llama.cpp, Ollama or transformers -> the field here."""


class Fields:
    """A body, and its known fields. prefix: the path of a nested object, for errors."""

    def __init__(self, body: Any, prefix: str = "") -> None:
        if not isinstance(body, Mapping):
            raise wrong(prefix.rstrip(".") or "the request", "a JSON object", body)
        self._body, self._prefix = body, prefix
        self._known: set[str] = set()

    def get(self, name: str) -> Any:
        """Return the value, None if absent."""
        self._known.add(name)
        return self._body.get(name)

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return a string."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise wrong(self._prefix + name, "a string", value)
        return default if value is None else value

    def boolean(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(self._prefix + name, "true or false", value)
        return default if value is None else value

    def integer(self, name: str, default: int | None, *, low: int, high: int) -> int | None:
        """Return an integer from low to high."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise wrong(self._prefix + name, f"an integer from {low} to {high}", value)
        return value

    def number(self, name: str, default: float, *, low: float, high: float, above: bool = False) -> float:
        """Return a number from low to high; above: excludes low itself."""
        value = self.get(name)
        if value is None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
            or (above and value == low)
        ):
            raise wrong(self._prefix + name, f"a number {'above' if above else 'from'} {low:g} to {high:g}", value)
        return float(value)

    def neutral(self, name: str, *values: Any) -> None:
        """Check an unsupported field: only null and values without effect are accepted."""
        value = self.get(name)
        if value is not None and not any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values):
            raise RequestError(
                f"'{self._prefix}{name}' is not supported: it would change the answer",
                code="unsupported_parameter",
                param=self._prefix + name,
            )

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Reject unknown fields. harmless: fields that do not affect the answer."""
        self._known.update(harmless)
        for name in self._body:
            if name not in self._known:
                other = _OTHER_NAMES.get(name)
                near = [other] if other in self._known else get_close_matches(name[:64], self._known, n=1)
                shown = printable(self._prefix + name, 80)
                raise RequestError(
                    f"unknown field '{shown}'" + (f"; did you mean '{near[0]}'?" if near else ""),
                    code="unknown_parameter",
                    param=shown,
                )
