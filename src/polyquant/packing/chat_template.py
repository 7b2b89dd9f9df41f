"""The Go template that Ollama needs for a model's chat template, if there is one that renders every message the same.

Most chat templates write a string before and after each message, chosen by its role, and a string that starts
the answer. These strings are found by rendering probes, and become a Go template of Ollama's values (.Messages,
.System; see ollama/template/template.go). Further probes with empty, spaced and long messages then decide: a template
that trims contents, changes them, or uses tools or reasoning has no exact counterpart, and none is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polyquant.errors import PolyquantError

__all__ = ["GoTemplate", "go_template"]

Render = Callable[[Sequence[tuple[str, str]], bool], str]
"""Renders messages (role, content), with or without the start of the answer."""
_ROLES = ("system", "user", "assistant")
_MARK = "\ue000{}\ue001"
_MORE = ("tool", "think", "reasoning")
_PROBES: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", " two \n\n words "),),
    (("system", "Be brief.\n"), ("user", ""), ("assistant", "  yes\t"), ("user", "{{ .Content }} and {% if %}")),
    (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "Ünïcödé " * 50)),
)


class _UnfitError(Exception):
    """The template has no counterpart."""


@dataclass(frozen=True, slots=True)
class GoTemplate:
    """A template in parts. before, after: role -> text; opening: without a system message, before all others."""

    before: dict[str, str]
    after: dict[str, str]
    opening: str
    answer: str

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """Return what Ollama renders from `text`."""
        opening = "" if messages[0][0] == "system" else self.opening
        return opening + "".join(self.before[r] + c + self.after[r] for r, c in messages) + self.answer

    @property
    def text(self) -> str:
        """The template in Go's language."""
        cases = "".join(
            f'{"{{ if" if i == 0 else "{{ else if"} eq .Role "{role}" }}}}'
            f"{self.before[role]}{{{{ .Content }}}}{self.after[role]}"
            for i, role in enumerate(r for r in _ROLES if r in self.before)
        )
        opening = f"{{{{ if not .System }}}}{self.opening}{{{{ end }}}}" if self.opening else ""
        return f"{opening}{{{{ range .Messages }}}}{cases}{{{{ end }}}}{{{{ end }}}}{self.answer}"


def go_template(source: str, render: Render) -> GoTemplate | str:
    """Return the counterpart of a chat template, or the reason why there is none.

    source: the chat template. render: renders it; its errors are reasons.
    """
    used = [word for word in _MORE if word in source]
    if used:
        return f"the chat template uses {' and '.join(used)}, which a fixed template cannot express"
    try:
        found = _derived(render)
        for messages in _PROBES:
            if found.render(messages) != render(messages, True):
                return "the chat template changes messages or depends on their order"
    except _UnfitError as problem:
        return str(problem)
    except PolyquantError as problem:
        return f"the chat template cannot be rendered: {problem}"
    return found


def _derived(render: Render) -> GoTemplate:
    """Find the strings by rendering marked messages. Raises _UnfitError, and the errors of `render`."""
    user, assistant, again, last = (_MARK.format(i) for i in range(4))
    closed = _between(
        render([("user", user), ("assistant", assistant), ("user", again), ("assistant", last)], False),
        [user, assistant, again, last],
    )
    asked = _between(
        render([("user", user), ("assistant", assistant), ("user", again)], True), [user, assistant, again]
    )
    alone = _between(render([("user", user)], False), [user])
    led = _between(render([("system", last), ("user", user)], False), [last, user])
    after_user, after_assistant = alone[1], closed[4]
    before_assistant = _without(closed[1], start=after_user)
    before_user = _without(closed[2], start=after_assistant)
    after_system = _without(led[1], end=before_user)
    opening = _without(alone[0], end=before_user)
    answer = _without(asked[3], start=after_user)
    found = GoTemplate(
        {"system": led[0], "user": before_user, "assistant": before_assistant},
        {"system": after_system, "user": after_user, "assistant": after_assistant},
        opening,
        answer,
    )
    if any("{{" in text or "}}" in text for text in (*found.before.values(), *found.after.values(), opening, answer)):
        raise _UnfitError("the chat template writes braces, which Go's language reserves")
    return found


def _without(text: str, *, start: str = "", end: str = "") -> str:
    """Return the text without its start or end. Raises _UnfitError if it is different."""
    if not text.startswith(start) or not text.endswith(end) or len(text) < len(start) + len(end):
        raise _UnfitError("the text around a message depends on its place")
    return text[len(start) : len(text) - len(end)]


def _between(text: str, marks: Sequence[str]) -> list[str]:
    """The strings before, between and after the marks. Raises _UnfitError unless each occurs once, in order."""
    out = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found or mark in text:
            raise _UnfitError("the chat template leaves out or repeats messages")
        out.append(before)
    return [*out, text]
