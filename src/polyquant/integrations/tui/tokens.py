"""The tokenizer: id to token, token to id, text to tokens. The chat templates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual import on
from textual.app import ComposeResult
from textual.widgets import Input

from polyquant.errors import printable
from polyquant.integrations.tui.jobs import Job
from polyquant.integrations.tui.pane import Pane
from polyquant.integrations.tui.rows import Rows
from polyquant.integrations.tui.sources import Fixed, Text

if TYPE_CHECKING:
    from polyquant.tokenizers.tokenizer import Tokenizer

__all__ = ["Template", "Tokens", "look_up"]

_LONGEST = 4000
"""Maximum length of the input text."""
_CONTAINING = 500
_TOKEN = 200


class _Table:
    """The whole vocabulary, in the order of ids."""

    def __init__(self, tokenizer: Tokenizer, table: dict[int, str]) -> None:
        self._tokenizer, self._table, self._ids = tokenizer, table, sorted(table)

    def heads(self, width: int) -> list[tuple[str, int, bool]]:
        """The columns are those of a search."""
        return [("id", 8, True), ("token", max(8, width - 24), False), ("kind", 12, False)]

    def count(self) -> int:
        """Number of tokens."""
        return len(self._ids)

    def cells(self, index: int) -> tuple[str, str, str]:
        """One token."""
        id_ = self._ids[index]
        return str(id_), printable(self._table[id_], _TOKEN), "special" if self._tokenizer.is_special(id_) else ""

    def style(self, index: int) -> str:
        """No highlights."""
        return ""


def look_up(tokenizer: Tokenizer, table: dict[int, str], text: str) -> list[tuple[str, str, str]]:
    """Return (id, token, why) for an input: an id, a token, text, or a part of tokens. Raises InputError."""
    out = []
    if text.isascii() and text.isdigit() and len(text) < 19 and int(text) in table:
        out.append((text, printable(table[int(text)], _TOKEN), "id"))
    if (found := tokenizer.id_of(text)) is not None:
        out.append((str(found), printable(text, _TOKEN), "token"))
    for i, piece in enumerate(tokenizer.encode(text, add_special=False)):
        out.append((str(piece), printable(table.get(piece, ""), _TOKEN), f"text {i + 1}"))
    word = text.lower()
    having = [i for i, token in table.items() if word in token.lower()]
    out += [(str(i), printable(table[i], _TOKEN), "contains") for i in sorted(having)[:_CONTAINING]]
    return out


class Tokens(Pane):
    """A field, and the tokens found."""

    title = "Tokenizer"

    def __init__(self) -> None:
        super().__init__("tokens")
        self.tokenizer: Tokenizer | None = None
        self.table: dict[int, str] = {}
        self._found = 0

    DEFAULT_CSS = """
    Tokens Input { border: none; height: 1; padding: 0 1; background: $panel; }
    Tokens Input:focus { border: none; }
    """

    def compose(self) -> ComposeResult:
        """The field above the list."""
        yield Input(placeholder="an id, a token or text (Tab: the next pane)", max_length=_LONGEST)
        yield self.rows

    def enter(self) -> None:
        """The field takes the keyboard."""
        super().enter()
        self.query_one(Input).focus()

    def load(self) -> None:
        """Open the tokenizer of the first model."""
        models = self.browser.models

        def work(job: Job) -> tuple[Tokenizer, dict[int, str]]:
            tokenizer = models().tokenizer(0)
            return tokenizer, tokenizer.tokens()

        def then(result: tuple[Tokenizer, dict[int, str]]) -> None:
            self.tokenizer, self.table = result
            self._show(self.query_one(Input).value)

        self.browser.start("tokenizer", "reading the tokenizer", work, then, self.fail)

    def _show(self, text: str) -> None:
        if self.tokenizer is None:
            return
        if not text:
            self._found = 0
            self.fill(_Table(self.tokenizer, self.table))
            return
        tokenizer, table = self.tokenizer, self.table

        def then(lines: list[tuple[str, str, str]]) -> None:
            self._found = len(lines)
            self.fill(Fixed((">id", "token", "found as"), lines, wide=1))

        self.browser.start("lookup", "", lambda job: look_up(tokenizer, table, text), then, self.fail)

    def summary(self) -> str:
        """Counts."""
        if self.tokenizer is None:
            return ""
        special = ", ".join(f"{kind} {i}" for kind, i in self.tokenizer.special.items())
        counts = (
            f"{self._found:,} found in {len(self.table):,} tokens" if self._found else f"{len(self.table):,} tokens"
        )
        return f"{counts} · {special}"

    @on(Input.Changed)
    def _changed(self, event: Input.Changed) -> None:
        event.stop()
        self._show(event.value)

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.rows.focus()

    @on(Rows.Chosen)
    def _chosen(self, event: Rows.Chosen) -> None:
        """Copy a token."""
        event.stop()
        self.browser.copy(self.rows.source.cells(event.index)[1])

    def clear_search(self) -> bool:
        """Empty the field."""
        field = self.query_one(Input)
        if not field.value:
            return False
        field.value = ""
        return True


class Template(Pane):
    """The chat templates as stored; they are not rendered."""

    title = "Template"

    def __init__(self) -> None:
        super().__init__("template")
        self._count = 0

    def load(self) -> None:
        """Read the templates of all models."""
        models, count = self.browser.models, len(self.browser.shown)

        def work(job: Job) -> list[dict[str, str]]:
            return [models().templates(i) for i in range(count)]

        def then(found: list[dict[str, str]]) -> None:
            self._count = sum(map(len, found))
            blocks = [
                f"--- {'AB'[i] + ': ' if len(found) > 1 else ''}{name} ---\n{text}"
                for i, one in enumerate(found)
                for name, text in one.items()
            ]
            self.fill(Text("chat template", "\n\n".join(blocks)))

        self.browser.start("template", "reading the chat template", work, then, self.fail)

    def summary(self) -> str:
        """The number of templates."""
        return "no chat template: a base model" if not self._count else f"{self._count} chat template(s), as stored"
